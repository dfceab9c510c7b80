"""The control channel over real sockets, with real processes at the other end where one has to die or to stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raytp.transport
from raytp.errors import RankFailedError, StepTimeoutError
from raytp.transport import SocketTransport
from scheduler.step import StepResult
from tests.control_plane.test_frames import a_step, assert_same
from workers import channel
from workers.channel import ChannelAddress, Listener, connect, set_timeouts
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
    result_body,
)

KEY = b"k" * 32
EPOCH = 2
PROMPTLY_S = 3.0
"""Much less than any deadline that would end the wait otherwise, and enough for a busy machine."""


@pytest.fixture(params=["unix", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener(KEY, EPOCH, "127.0.0.1")
    try:
        yield listener
    finally:
        listener.close()


def address_of(listener: Listener, kind: str) -> ChannelAddress:
    address = listener.local_address if kind == "unix" else listener.remote_address
    assert address is not None
    return address


def connect_raw(address: ChannelAddress) -> socket.socket:
    if address.path is None:
        return socket.create_connection((address.host, address.port))
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect(address.path)
    return raw


def pairs(kind: str, num_ranks: int = 1) -> tuple[list[Connection], list[Connection]]:
    """(the driver's ends, the ranks' ends)"""
    with listening() as listener:
        address = address_of(listener, kind)
        ranks = [connect(address, KEY, EPOCH, rank, timeout_s=5) for rank in range(num_ranks)]
        return listener.accept_ranks(num_ranks, timeout_s=5), ranks


def transport_of(connections: list[Connection], timeout_s: float, heartbeat_timeout_s: float = 60.0) -> SocketTransport:
    names = [f"rank {rank}" for rank in range(len(connections))]
    return SocketTransport(connections, names, EPOCH, timeout_s, heartbeat_timeout_s)


def result_frame(step_id: int, token_id: int = 5) -> bytes:
    result = StepResult(step_id=step_id, token_ids=np.array([token_id], dtype=np.int32))
    return encode(Frame(EPOCH, step_id, RESULT, result_body(result)))


def test_ranks_are_accepted_in_rank_order(kind: str) -> None:
    with listening() as listener:
        address = address_of(listener, kind)
        ranks = {rank: connect(address, KEY, EPOCH, rank, timeout_s=5) for rank in (2, 0, 1)}
        for rank, connection in enumerate(listener.accept_ranks(3, timeout_s=5)):
            connection.send_bytes(b"you are %d" % rank)
            assert ranks[rank].recv_bytes() == b"you are %d" % rank


def test_unix_and_tcp_ranks_may_be_mixed() -> None:
    with listening() as listener:
        connect(address_of(listener, "unix"), KEY, EPOCH, 0, timeout_s=5)
        connect(address_of(listener, "tcp"), KEY, EPOCH, 1, timeout_s=5)
        assert len(listener.accept_ranks(2, timeout_s=5)) == 2


def test_a_wrong_key_is_refused_at_both_ends(kind: str) -> None:
    with listening() as listener:
        with pytest.raises(ChannelError, match=r"rank 0: handshake with the driver at .* failed"):
            connect(address_of(listener, kind), b"x" * 32, EPOCH, 0, timeout_s=5)
        with pytest.raises(ChannelError, match=r"ranks \[0\] did not connect"):
            listener.accept_ranks(1, timeout_s=0.2)


def test_a_rank_of_another_epoch_is_not_accepted(kind: str) -> None:
    with listening() as listener:
        late = connect(address_of(listener, kind), KEY, EPOCH - 1, 0, timeout_s=5)
        with pytest.raises(ChannelError, match=r"ranks \[0\] did not connect"):
            listener.accept_ranks(1, timeout_s=0.3)
        with pytest.raises((EOFError, OSError)):
            late.recv_bytes()


def _says_nothing(raw: socket.socket) -> None:
    pass


def _sends_garbage(raw: socket.socket) -> None:
    raw.sendall(b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n" * 100)


def _claims_two_gigabytes(raw: socket.socket) -> None:
    raw.sendall(b"\x7f\xff\xff\xff")


def _hangs_up(raw: socket.socket) -> None:
    raw.close()


def _hangs_up_in_the_middle(raw: socket.socket) -> None:
    raw.recv(8)
    raw.sendall(b"\0\0\0\x20half")
    raw.close()


@pytest.mark.parametrize(
    "stranger", [_says_nothing, _sends_garbage, _claims_two_gigabytes, _hangs_up, _hangs_up_in_the_middle]
)
def test_strangers_do_not_delay_the_rank(kind: str, stranger: Any) -> None:
    with listening() as listener:
        address = address_of(listener, kind)
        strangers = [connect_raw(address) for _ in range(20)]
        for raw in strangers:
            stranger(raw)
        start = time.monotonic()
        connect(address, KEY, EPOCH, 0, timeout_s=10)
        assert len(listener.accept_ranks(1, timeout_s=10)) == 1
        assert time.monotonic() - start < PROMPTLY_S
        for raw in strangers:
            raw.close()


def test_more_silent_strangers_than_handshakes_only_delay_the_rank(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MAX_HANDSHAKES", 2)
    monkeypatch.setattr(channel, "_HANDSHAKE_TIMEOUT_S", 0.3)
    with listening() as listener:
        address = address_of(listener, kind)
        strangers = [connect_raw(address) for _ in range(5)]
        connect(address, KEY, EPOCH, 0, timeout_s=10)
        assert len(listener.accept_ranks(1, timeout_s=10)) == 1
        for raw in strangers:
            raw.close()


def test_the_second_of_two_equal_ranks_is_turned_away(kind: str) -> None:
    with listening() as listener:
        address = address_of(listener, kind)
        first = connect(address, KEY, EPOCH, 0, timeout_s=5)
        time.sleep(0.1)  # its hello is on the way
        second = connect(address, KEY, EPOCH, 0, timeout_s=5)
        set_timeouts(second, receive_s=PROMPTLY_S, send_s=PROMPTLY_S)
        with pytest.raises((EOFError, ConnectionResetError)):
            second.recv_bytes()
        (driver,) = listener.accept_ranks(1, timeout_s=5)
        driver.send_bytes(b"you are the one")
        assert first.recv_bytes() == b"you are the one"


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_rank_outside_the_group_does_not_stand_for_one(kind: str, rank: int) -> None:
    with listening() as listener:
        address = address_of(listener, kind)
        for each in (0, rank):
            connect(address, KEY, EPOCH, each, timeout_s=5)
        with pytest.raises(ChannelError, match=r"ranks \[1\] did not connect"):
            listener.accept_ranks(2, timeout_s=0.3)


def test_missing_ranks_are_named_by_the_deadline(kind: str) -> None:
    with listening() as listener:
        connect(address_of(listener, kind), KEY, EPOCH, 1, timeout_s=5)
        start = time.monotonic()
        with pytest.raises(ChannelError, match=r"ranks \[0, 2, 3\] did not connect to .* within 0.5 s"):
            listener.accept_ranks(4, timeout_s=0.5)
        assert 0.4 < time.monotonic() - start < PROMPTLY_S


def test_a_dead_address_is_an_error_that_names_it(kind: str) -> None:
    with listening() as listener:
        address = address_of(listener, kind)
    with pytest.raises(ChannelError, match=f"rank 3 on .* cannot reach the driver at {address}"):
        connect(address, KEY, EPOCH, 3, timeout_s=5)


@pytest.mark.parametrize(
    "greeting", [b"", b"\0\0\0\x05hello", b"\0\0\x40\0" + b"x" * 2**14, b"HTTP/1.1 400 Bad Request"]
)
def test_what_is_no_driver_is_an_error(greeting: bytes) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            raw, _ = server.accept()
            raw.sendall(greeting)
            raw.close()

        threading.Thread(target=answer).start()
        address = ChannelAddress(host="127.0.0.1", port=server.getsockname()[1])
        with pytest.raises(ChannelError, match=r"handshake with the driver at 127.0.0.1:.* failed"):
            connect(address, KEY, EPOCH, 0, timeout_s=5)


def test_a_driver_that_says_nothing_is_an_error_by_the_deadline() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = ChannelAddress(host="127.0.0.1", port=server.getsockname()[1])
        start = time.monotonic()
        with pytest.raises(ChannelError, match="handshake"):
            connect(address, KEY, EPOCH, 0, timeout_s=0.3)
        assert time.monotonic() - start < PROMPTLY_S


def test_no_file_is_left_behind() -> None:
    listener = Listener(KEY, EPOCH, None)
    assert listener.remote_address is None
    folder = Path(str(listener.local_address)).parent
    assert folder.stat().st_mode & 0o077 == 0, "other users could connect"
    rank = connect(listener.local_address, KEY, EPOCH, 0, timeout_s=5)
    (driver,) = listener.accept_ranks(1, timeout_s=5)
    assert not folder.exists(), "nobody else is to come"
    rank.send_bytes(b"still here")
    assert driver.recv_bytes() == b"still here"
    with pytest.raises(ChannelError):
        Listener(KEY, EPOCH, None).accept_ranks(1, timeout_s=0.05)
    assert not list(folder.parent.glob(f"{folder.name}*"))


def test_the_accepting_threads_end_with_the_listener() -> None:
    with listening() as listener:
        threads = [thread for thread in threading.enumerate() if thread.name == "raytp-accept"]
        assert len(threads) >= 2
        del listener
    for thread in threads:
        thread.join(PROMPTLY_S)
        assert not thread.is_alive()


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


def test_what_on_wait_raises_ends_the_wait() -> None:
    """As when a rank has died that will never connect."""

    def notice() -> None:
        raise ConnectionError("a rank has died")

    listener = Listener(KEY, EPOCH, None)
    started = time.monotonic()
    with pytest.raises(ConnectionError, match="a rank has died"):
        listener.accept_ranks(1, timeout_s=60, on_wait=notice)
    assert time.monotonic() - started < 10
    with pytest.raises(ChannelError, match="cannot reach"):
        connect(listener.local_address, KEY, EPOCH, 0, timeout_s=1)


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
