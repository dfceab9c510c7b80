"""A driver's listener and the ends of real connections. Called by the tests of the channel and of the transport."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from raytp.transport import SocketTransport
from scheduler.step import StepResult
from workers.channel import ChannelAddress, Listener, connect
from workers.frames import RESULT, Frame, encode, result_body

KEY = b"k" * 32
EPOCH = 2
PROMPTLY_S = 3.0
"""Much less than any deadline that would end the wait otherwise, and enough for a busy machine."""


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
