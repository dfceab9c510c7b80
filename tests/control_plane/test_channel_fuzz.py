"""At least 10,000 times something comes through the channel that should not: an error of the channel's own each time,
by the deadline, and whoever has the key is served as if nothing had been.

Cases are drawn by a seed, which each test prints; RAYTP_FUZZ_SEED sets another.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import random
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

from raytp.errors import ChannelError, FrameError, RankFailedError, StepTimeoutError
from raytp.transport import SocketTransport
from scheduler.step import Step, StepResult
from tests.control_plane.connections import EPOCH, KEY, address_of, connect_raw, listening, result_frame
from tests.control_plane.damage import FRAMES, HUGE, broken_stream, mutated, prefixed, strange_payload
from tests.control_plane.example_frames import a_step
from workers import channel
from workers.channel import ChannelAddress, connect, set_timeouts
from workers.frames import (
    ERROR,
    HEARTBEAT,
    HELLO,
    RESULT,
    STEP,
    Frame,
    FrameDecoder,
    encode,
    read_error,
    read_result,
    read_step,
    step_body,
)
from workers.worker import Worker

SEED = int(os.environ.get("RAYTP_FUZZ_SEED", "20261130"))
NUM_FRAMES, NUM_SESSIONS, NUM_STRANGERS = 10_000, 1200, 3000
NUM_CASES = NUM_FRAMES + 2 * NUM_SESSIONS + 2 * NUM_STRANGERS
PROMPTLY_S = 3.0
MEMORY_SLACK = 2**28
"""Bytes that the test process may grow by; what strangers claim is more by far."""

READERS: dict[str, Callable[[Frame], Any]] = {STEP: read_step, RESULT: read_result, ERROR: read_error}


def test_enough_is_tried() -> None:
    assert NUM_CASES >= 10_000


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    print(f"RAYTP_FUZZ_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(autouse=True)
def memory_stays_small() -> Iterator[None]:
    """The most that the process has ever held, before and after."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MEMORY_SLACK, f"{grown} bytes more were held at a time"


def test_frames_of_any_bytes_are_read_or_refused(rng: random.Random) -> None:
    num_refused = longest = 0
    for case in range(NUM_FRAMES):
        make = (lambda: mutated(rng.choice(FRAMES), rng), lambda: rng.randbytes(rng.randint(0, 200)))
        data = strange_payload(rng) if case % 2 else make[case // 2 % 2]()
        try:
            frame = FrameDecoder(EPOCH).decode(data)
            for read in READERS.values():
                with contextlib.suppress(FrameError):
                    read(frame)
        except FrameError as error:
            num_refused += 1
            longest = max(longest, len(str(error)))
    assert num_refused > 0.7 * NUM_FRAMES
    assert longest < 2000, "a message as long as what it is about"


def receive_all(transport: SocketTransport) -> None:
    while True:
        transport.receive()


def test_a_session_with_a_rank_that_goes_wrong_ends_by_an_error_of_the_engine(rng: random.Random) -> None:
    """Rank to driver."""
    for _ in range(NUM_SESSIONS):
        ours, theirs = socket.socketpair()
        driver = Connection(ours.detach())
        transport = SocketTransport([driver], ["rank 0"], EPOCH, timeout_s=2.0, heartbeat_timeout_s=2.0)
        theirs.sendall(broken_stream([result_frame(step_id) for step_id in range(4)], rng))
        theirs.close()
        start = time.monotonic()
        with pytest.raises((ChannelError, RankFailedError, StepTimeoutError)):
            receive_all(transport)
        assert time.monotonic() - start < PROMPTLY_S
        transport.close()


class EchoRunner:
    """A model that answers each row with its first token."""

    def execute(self, step: Step) -> Any:
        result = StepResult(step_id=step.step_id, token_ids=step.token_ids[:1])
        return type("Outcome", (), {"wait": lambda self: result})()


def rank_worker() -> Worker:
    config: Any = type("Config", (), {"faults": (), "timeout_s": 5.0, "world_size": 1})()
    worker = Worker(config, rank=0, epoch=EPOCH)
    worker._runner = EchoRunner()  # type: ignore[assignment]
    return worker


def _session_of_rank(seed: int) -> None:
    """Driver to rank: its run loop ends, and by itself."""
    rng = random.Random(seed)
    with listening() as listener:
        address = address_of(listener, "unix")
        rank = threading.Thread(target=rank_worker().run, args=(address, KEY), daemon=True)
        rank.start()
        (driver,) = listener.accept_ranks(1, timeout_s=5)
    steps = [encode(Frame(EPOCH, index, STEP, step_body(a_step()))) for index in range(4)]
    with socket.socket(fileno=os.dup(driver.fileno())) as raw, contextlib.suppress(OSError):
        raw.sendall(broken_stream(steps, rng))
        raw.shutdown(socket.SHUT_WR)
    rank.join(PROMPTLY_S)
    assert not rank.is_alive(), f"case {seed} hangs"
    answers = FrameDecoder(EPOCH)
    with contextlib.suppress(EOFError, OSError):
        while True:
            assert answers.decode(driver.recv_bytes()).kind in (RESULT, ERROR, HEARTBEAT)
    driver.close()


def test_a_session_with_a_driver_that_goes_wrong_ends_the_rank_s_loop(rng: random.Random) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_session_of_rank, (rng.randrange(2**32) for _ in range(NUM_SESSIONS))))


def record_handshake(address: ChannelAddress) -> list[bytes]:
    """What a rank with the key once said to its driver, for a stranger to say again."""
    said: list[bytes] = []
    with Connection(connect_raw(address).detach()) as connection:

        def say(data: bytes) -> None:
            said.append(prefixed(data))
            connection.send_bytes(data)

        set_timeouts(connection, receive_s=5, send_s=5)
        say(answer_to(connection.recv_bytes()))
        assert connection.recv_bytes() == b"#WELCOME#"
        say(b"#CHALLENGE#" + bytes(20))
        connection.recv_bytes()
        say(b"#WELCOME#")
    return said


def answer_to(challenge: bytes, key: bytes = KEY) -> bytes:
    """What Python's `answer_challenge` sends: the digest, since 3.12 with the name of the hash before it."""
    message = challenge.removeprefix(b"#CHALLENGE#")
    named = re.match(rb"\{(\w+)\}", message)
    if named is None:
        return hmac.new(key, message, "md5").digest()
    return named[0] + hmac.new(key, message, named[1].decode()).digest()


def _be_strange(raw: socket.socket, replay: list[bytes], rng: random.Random) -> None:
    """One visit without the key, or with it and a hello that is none."""
    kind = rng.randrange(8)
    if kind == 0:
        raw.sendall(rng.randbytes(rng.randint(1, 2000)))
    elif kind == 1:
        raw.sendall(prefixed(rng.randbytes(rng.randint(0, 30)), rng.choice(HUGE)))
    elif kind == 2:
        raw.sendall(struct.pack("!i", -rng.randint(1, 2**31)) + rng.randbytes(rng.randint(0, 9)))
    elif kind == 3:
        raw.sendall(b"".join(replay[: rng.randint(1, len(replay))]))
    elif kind == 4:
        raw.sendall(mutated(b"".join(replay), rng))
    elif kind == 5:
        raw.recv(64)
        raw.sendall(prefixed(rng.randbytes(16)) + b"".join(replay[1:]))
    elif kind == 6:  # the right answer, and then no hello
        challenge = raw.recv(4 + 256)[4:]
        frames = [mutated(FRAMES[3], rng), *FRAMES[:3], strange_payload(rng), encode(Frame(EPOCH, 0, HELLO, True))]
        hello = prefixed(rng.choice(frames), rng.choice([None, None, *HUGE]))
        raw.sendall(prefixed(answer_to(challenge)) + b"".join(replay[1:]) + hello)
    else:
        raw.shutdown(rng.choice([socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]))


def test_strangers_get_nothing_from_the_driver_and_the_rank_gets_in(rng: random.Random) -> None:
    """Stranger to driver: some hang up, some stay; and the rank that comes after them is the one that is let in."""
    num_at_once = 60
    for batch in range(NUM_STRANGERS // num_at_once):
        with listening() as listener:
            address = address_of(listener, "tcp" if batch % 2 else "unix")
            replay = record_handshake(address)
            visitors = [connect_raw(address) for _ in range(num_at_once)]
            for raw in visitors:
                with contextlib.suppress(OSError):
                    _be_strange(raw, replay, rng)
                if rng.random() < 0.7:
                    raw.close()
            start = time.monotonic()
            rank = connect(address, KEY, EPOCH, 0, timeout_s=10)
            (driver,) = listener.accept_ranks(1, timeout_s=10)
            assert time.monotonic() - start < PROMPTLY_S
            driver.send_bytes(b"welcome")
            assert rank.recv_bytes() == b"welcome"
            for raw in visitors:
                raw.close()


def _greet(raw: socket.socket, replay: list[bytes], rng: random.Random) -> None:
    """What claims to be a driver."""
    challenge = prefixed(b"#CHALLENGE#" + rng.randbytes(rng.choice([20, 20, 0, 300])))
    welcome = prefixed(b"#WELCOME#")
    kind = rng.randrange(6)
    if kind == 0:
        raw.sendall(rng.randbytes(rng.randint(0, 500)))
    elif kind == 1:
        raw.sendall(prefixed(rng.randbytes(rng.randint(0, 30)), rng.choice(HUGE)))
    elif kind == 2:
        raw.sendall(mutated(challenge + welcome, rng))
    elif kind == 3:
        raw.sendall(challenge + welcome + b"".join(replay))
    elif kind == 4:
        raw.sendall(challenge + welcome)
        with contextlib.suppress(OSError):
            told = raw.recv(1024)
            raw.sendall(told[-40:] + welcome)  # its own question, as the answer
    else:
        raw.sendall(challenge + welcome + prefixed(answer_to(b"#CHALLENGE#" + bytes(20), b"x" * 32)) + welcome)


def test_a_rank_does_not_take_a_stranger_for_its_driver(rng: random.Random) -> None:
    """Stranger to rank."""
    with listening() as listener:
        replay = record_handshake(address_of(listener, "tcp"))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        address = ChannelAddress(host="127.0.0.1", port=server.getsockname()[1])

        def serve() -> None:
            for _ in range(NUM_STRANGERS):
                raw, _ = server.accept()
                with raw, contextlib.suppress(OSError):
                    _greet(raw, replay, rng)
                    raw.shutdown(socket.SHUT_WR)

        threading.Thread(target=serve, daemon=True).start()
        for _ in range(NUM_STRANGERS):
            start = time.monotonic()
            with pytest.raises(ChannelError, match=r"rank 0: handshake with the driver at .* failed"):
                connect(address, KEY, EPOCH, 0, timeout_s=1)
            assert time.monotonic() - start < PROMPTLY_S


def test_strangers_that_speak_slowly_only_delay_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take every place for handshakes, and each byte comes long before a wait for it would end."""
    monkeypatch.setattr(channel, "_MAX_HANDSHAKES", 2)
    monkeypatch.setattr(channel, "_HANDSHAKE_TIMEOUT_S", 0.5)
    is_over = threading.Event()
    with listening() as listener:
        address = address_of(listener, "tcp")
        strangers = [connect_raw(address) for _ in range(2)]

        def drip() -> None:
            for byte in prefixed(bytes(200)):
                for raw in strangers:
                    with contextlib.suppress(OSError):
                        raw.send(bytes([byte]))
                if is_over.wait(0.1):
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        time.sleep(0.2)
        start = time.monotonic()
        connect(address, KEY, EPOCH, 0, timeout_s=10)
        assert len(listener.accept_ranks(1, timeout_s=10)) == 1
        assert time.monotonic() - start < PROMPTLY_S
        is_over.set()
        dripping.join()
        for raw in strangers:
            raw.close()
