"""Steps and results over real sockets, with real processes at the other end where one has to die or to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest

import raytp.transport
from raytp.errors import RankFailedError, StepTimeoutError
from raytp.transport import SocketTransport
from tests.control_plane.connections import (
    EPOCH,
    KEY,
    PROMPTLY_S,
    address_of,
    listening,
    pairs,
    result_frame,
    transport_of,
)
from tests.control_plane.example_frames import a_step, assert_same
from workers.channel import ChannelAddress
from workers.errors import ChannelError
from workers.frames import (
    ERROR,
    HEARTBEAT,
    RESULT,
    SHUTDOWN,
    ErrorReport,
    Frame,
    FrameDecoder,
    encode,
    error_body,
    read_step,
)


def test_steps_and_results_pass_several_at_once(kind: str) -> None:
    drivers, ranks = pairs(kind, num_ranks=3)
    transport = transport_of(drivers, timeout_s=5)
    for step_id in range(3):
        step = a_step()
        transport.send(type(step)(**{name: getattr(step, name) for name in step.__slots__} | {"step_id": step_id}))
        ranks[0].send_bytes(result_frame(step_id, token_id=step_id + 10))
    for step_id in range(3):
        assert transport.receive().token_ids.tolist() == [step_id + 10]
    transport.close()
    for rank in ranks:
        decoder = FrameDecoder(EPOCH)
        frames = [decoder.decode(rank.recv_bytes()) for _ in range(4)]
        assert [frame.step_id for frame in frames[:3]] == [0, 1, 2]
        assert frames[3].kind == SHUTDOWN
        with pytest.raises(EOFError):
            rank.recv_bytes()


def test_a_frame_of_16_mb_passes(kind: str) -> None:
    drivers, ranks = pairs(kind)
    step = a_step(4 * 2**20)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(ranks[0].recv_bytes()))
    reader.start()
    transport_of(drivers, timeout_s=20).send(step)
    reader.join()
    assert len(received[0]) > 16 * 2**20
    assert_same(read_step(FrameDecoder(EPOCH).decode(received[0])), step)


def test_a_rank_that_raises_is_quoted_and_so_are_the_others(kind: str) -> None:
    drivers, ranks = pairs(kind, num_ranks=3)
    for rank in (2, 1):
        report = ErrorReport(rank=rank, node="n", pid=1, type="ValueError", message=f"at {rank}", traceback="tb")
        ranks[rank].send_bytes(encode(Frame(EPOCH, 0, ERROR, error_body(report))))
    with pytest.raises(RankFailedError, match=r"rank 1 raised ValueError: at 1\ntb\nrank 2 raised ValueError: at 2"):
        transport_of(drivers, timeout_s=20).receive()


@pytest.mark.parametrize("damage", ["flip", "epoch", "gap", "garbage"])
def test_a_bad_answer_is_an_error_and_no_hang(kind: str, damage: str) -> None:
    drivers, ranks = pairs(kind)
    good = result_frame(0)
    data = {
        "flip": good[:-1] + bytes([good[-1] ^ 1]),
        "epoch": encode(Frame(EPOCH - 1, 0, RESULT, [b"", None])),
        "gap": result_frame(1),
        "garbage": b"\x80\x04}",
    }[damage]
    ranks[0].send_bytes(data)
    with pytest.raises(ChannelError):
        transport_of(drivers, timeout_s=20).receive()


def test_silence_is_a_timeout_by_the_deadline(kind: str) -> None:
    drivers, _ranks = pairs(kind, num_ranks=2)
    start = time.monotonic()
    with pytest.raises(StepTimeoutError, match=r"no rank answered within step_timeout_s=0.3"):
        transport_of(drivers, timeout_s=0.3).receive()
    assert time.monotonic() - start < PROMPTLY_S


def test_half_an_answer_is_a_failure_by_the_deadline(kind: str) -> None:
    drivers, ranks = pairs(kind)
    os.write(ranks[0].fileno(), b"\0\0\1\0half")
    with pytest.raises(RankFailedError, match=r"rank 0 stopped in the middle of an answer.* for 0\.3 s"):
        transport_of(drivers, timeout_s=0.3).receive()


_RANK = """
import sys, time
from workers.channel import ChannelAddress, connect
connection = connect(ChannelAddress(path={path!r}, host={host!r}, port={port}), {key!r}, {epoch}, {rank}, timeout_s=30)
print("connected", flush=True)
while True:
    connection.recv_bytes()
"""


class RankProcess:
    """A process that connects as a rank and reads whatever comes."""

    def __init__(self, address: ChannelAddress, rank: int) -> None:
        code = _RANK.format(path=address.path, host=address.host, port=address.port, key=KEY, epoch=EPOCH, rank=rank)
        self._process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def processes(kind: str) -> Iterator[tuple[list[Connection], list[RankProcess]]]:
    """(the driver's ends, two processes)"""
    with listening() as listener:
        ranks = [RankProcess(address_of(listener, kind), rank) for rank in range(2)]
        try:
            yield listener.accept_ranks(2, timeout_s=60), ranks
        finally:
            for rank in ranks:
                rank.end()


def test_a_killed_rank_is_noticed_at_once(processes: tuple[list[Connection], list[RankProcess]]) -> None:
    drivers, ranks = processes
    transport = transport_of(drivers, timeout_s=60)
    transport.send(a_step())
    threading.Timer(0.2, ranks[1].signal, (signal.SIGKILL,)).start()
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"^rank 1 died without a word"):
        transport.receive()
    assert time.monotonic() - start < PROMPTLY_S
    transport.close()


def test_sending_to_a_killed_rank_is_an_error(processes: tuple[list[Connection], list[RankProcess]]) -> None:
    drivers, ranks = processes
    transport = transport_of(drivers, timeout_s=60)
    ranks[0].signal(signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"^rank 0 died without a word"):
        _send_many(transport)
    assert time.monotonic() - start < PROMPTLY_S


def _send_many(transport: SocketTransport) -> None:
    for _ in range(1000):  # the first may still fit a dead peer's buffers
        transport.send(a_step(2**16))


def test_a_stopped_rank_is_a_timeout_by_the_deadline(processes: tuple[list[Connection], list[RankProcess]]) -> None:
    drivers, ranks = processes
    transport = transport_of(drivers, timeout_s=0.5)
    ranks[1].signal(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(StepTimeoutError, match=r"rank 1 did not take step 0 .* within step_timeout_s=0.5"):
        transport.send(a_step(4 * 2**20))  # more than any socket buffer holds
    with pytest.raises(StepTimeoutError, match="no rank answered"):
        transport.receive()
    transport.close()
    assert time.monotonic() - start < 4 + PROMPTLY_S


HEARTBEAT_FRAME = encode(Frame(EPOCH, 0, HEARTBEAT, None))


def test_a_long_step_is_told_from_a_stopped_process_by_its_heartbeats(kind: str) -> None:
    """The step takes four times as long as silence may last."""
    drivers, ranks = pairs(kind, 2)
    transport = transport_of(drivers, timeout_s=20, heartbeat_timeout_s=0.5)

    def compute() -> None:
        for _ in range(20):
            time.sleep(0.1)
            for rank in ranks:
                rank.send_bytes(HEARTBEAT_FRAME)
        ranks[0].send_bytes(result_frame(0))

    threading.Thread(target=compute, daemon=True).start()
    assert transport.receive().token_ids.tolist() == [5]


def test_a_pause_of_the_driver_itself_is_no_rank_s_silence(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole machine was frozen, say: nobody could speak, and nobody listened."""
    monkeypatch.setattr(raytp.transport, "MAX_PAUSE_S", 0.1)
    drivers, _ranks = pairs(kind, 2)
    transport = transport_of(drivers, timeout_s=20, heartbeat_timeout_s=0.4)
    for _ in range(2):
        time.sleep(0.6)
        transport.check()
    with pytest.raises(RankFailedError, match="nothing was heard of rank 0, rank 1"):
        transport.receive()


@pytest.mark.parametrize("what", ["receiving", "idle", "sending"])
def test_a_silent_rank_is_noticed_long_before_the_step_must_end(kind: str, what: str) -> None:
    drivers, ranks = pairs(kind, 2)
    transport = transport_of(drivers, timeout_s=60, heartbeat_timeout_s=0.5)
    is_over = threading.Event()

    def beat() -> None:
        with suppress(OSError):  # the driver has gone
            while not is_over.wait(0.05):
                ranks[0].send_bytes(HEARTBEAT_FRAME)

    def wait() -> None:
        while what == "idle":
            transport.check()
            time.sleep(0.05)
        if what == "sending":  # nobody reads it, and one of the ranks lives
            transport.send(a_step(4 * 2**20))
        transport.receive()

    threading.Thread(target=beat, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"nothing was heard of rank 1 for heartbeat_timeout_s=0\.5"):
        wait()
    is_over.set()
    assert time.monotonic() - start < 3


def test_an_idle_engine_notices_a_rank_that_ends_and_does_not_choke_on_heartbeats(kind: str) -> None:
    drivers, ranks = pairs(kind, 2)
    transport = transport_of(drivers, timeout_s=60)
    for _ in range(2000):
        for rank in ranks:
            rank.send_bytes(HEARTBEAT_FRAME)
        transport.check()
    ranks[1].close()
    with pytest.raises(RankFailedError, match="rank 1 died without a word"):
        transport.check()
