"""What should not come through the channel: frames and streams that are damaged, strange or lie about their length.

Drawn by the caller's generator. Called by `test_channel_fuzz`.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgpack

from tests.control_plane.connections import EPOCH, result_frame
from tests.control_plane.example_frames import a_step, sealed
from workers.frames import (
    ERROR,
    HEARTBEAT,
    HELLO,
    RESULT,
    SHUTDOWN,
    STEP,
    ErrorReport,
    Frame,
    encode,
    error_body,
    step_body,
)

HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
REPORT = ErrorReport(rank=0, node="n", pid=1, type="ValueError", message="m", traceback="t")
FRAMES = [
    encode(Frame(EPOCH, 0, STEP, step_body(a_step()))),
    result_frame(0),
    encode(Frame(EPOCH, 0, ERROR, error_body(REPORT))),
    encode(Frame(EPOCH, 0, HELLO, 0)),
    encode(Frame(EPOCH, 0, HEARTBEAT, None)),
    encode(Frame(EPOCH, 0, SHUTDOWN, None)),
]


def prefixed(data: bytes, length: int | None = None) -> bytes:
    """With the length before it that `multiprocessing.connection` puts there, or another."""
    length = len(data) if length is None else length
    return (struct.pack("!i", length) if length < 2**31 else struct.pack("!iQ", -1, length)) + data


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Other bytes than these: flipped, cut, repeated, moved or inserted."""
    while True:
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
            kind = rng.randrange(5)
            if kind == 0 and damaged:
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del damaged[start:end]
            elif kind == 2:
                damaged[start:start] = damaged[start:end]
            elif kind == 3:
                damaged[start:start] = rng.randbytes(rng.randint(1, 9))
            else:
                damaged = damaged[end:] + damaged[:end]
        if damaged != data:
            return bytes(damaged)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that msgpack can carry."""
    leaves: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.choice([True, False, 0, 1, -1, 2**63, -(2**63), 2**64 - 1, EPOCH]),
        lambda: rng.choice([float("nan"), float("inf"), 0.5]),
        lambda: rng.randbytes(rng.choice([0, 3, 4, 8, 400])),
        lambda: rng.choice(["", "step", "result", "x" * 300]),
        lambda: msgpack.ExtType(rng.randint(0, 127), rng.randbytes(4)),
    ]
    if depth < 4 and rng.random() < 0.4:
        inner = [random_value(rng, depth + 1) for _ in range(rng.randint(0, 10))]
        return inner if rng.random() < 0.7 else {str(index): value for index, value in enumerate(inner)}
    return rng.choice(leaves)()


def strange_payload(rng: random.Random) -> bytes:
    """A frame whose digest is right, and whose inside is not."""
    kind = rng.randrange(4)
    if kind == 0:
        return sealed(mutated(rng.choice(FRAMES)[8:], rng), bytes)
    if kind == 1:
        return sealed([1, EPOCH, 0, rng.choice([STEP, RESULT, ERROR]), random_value(rng)])
    if kind == 2:
        fields = [1, EPOCH, 0, STEP, step_body(a_step())]
        fields[rng.randrange(5)] = random_value(rng)
        return sealed(fields)
    claims = rng.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"]) + rng.randbytes(4)  # lengths of 32 bits
    return sealed(b"\x91" * rng.choice([0, 5, 5000]) + claims + rng.randbytes(3), bytes)


def broken_stream(frames: list[bytes], rng: random.Random) -> bytes:
    """What one end of a session sends, with something wrong in it."""
    good = [prefixed(frame) for frame in frames]
    which = rng.randrange(len(frames))
    kind = rng.randrange(6)
    if kind == 0:
        good[which] = prefixed(mutated(frames[which], rng))
    elif kind == 1:
        good[which] = prefixed(frames[which], rng.choice([*HUGE, 0, rng.randrange(2**31)]))
    elif kind == 2:
        good[which] = struct.pack("!i", -rng.randint(2, 2**31)) + frames[which]
    elif kind == 3:
        good.insert(rng.randrange(len(good)), good[-1])  # out of turn
        good.append(good[-1])  # replayed
    elif kind == 4:
        good[which] = prefixed(strange_payload(rng))
    else:
        return rng.randbytes(rng.randint(1, 300))
    return b"".join(good)
