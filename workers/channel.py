"""One authenticated stream connection for each rank: the rank opens it, the driver accepts it.

Python's `multiprocessing.connection` gives the length framing and the HMAC challenge in both directions; the key is
made for one engine and handed over by Ray. The driver listens on a Unix socket for ranks of its own node and on TCP, on
the node's own address, for the others. Until a peer has proved that it has the key, every wait on it is bounded; what
it sends is never unpickled. Called by `raytp.rank_group`, `raytp.transport` and `workers.worker`; knows no frame but
the hello.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from workers.errors import ChannelError, FrameError
from workers.frames import HELLO, Frame, FrameDecoder, encode
from workers.scratch import NAME_LENGTH, ScratchFolder

_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_HANDSHAKES = 64
_SOCKET_NAME = "ranks"
_MAX_SOCKET_PATH = 107
"""Bytes that Linux has room for."""
_WAIT_S = 0.2
"""Between two looks at what else may end a wait for the ranks."""
# Of what is no peer of ours, Python before 3.12 asserts some things that later versions raise AuthenticationError for.
_HANDSHAKE_ERRORS = (OSError, EOFError, AuthenticationError, AssertionError, ValueError, FrameError)


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where the driver listens: a Unix socket's path, or a host and a port."""

    path: str | None = None
    host: str | None = None
    port: int = 0

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def connect(address: ChannelAddress, key: bytes, epoch: int, rank: int, timeout_s: float) -> Connection:
    """The rank's end. Raises ChannelError if the driver cannot be reached or does not have the key."""
    try:
        raw = _connect_raw(address, timeout_s)
    except OSError as error:
        here = socket.gethostname()
        raise ChannelError(f"rank {rank} on {here} cannot reach the driver at {address}: {error}") from error
    connection = _wrap(raw, timeout_s)
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(encode(Frame(epoch, 0, HELLO, rank)))
    except _HANDSHAKE_ERRORS as error:
        connection.close()
        raise ChannelError(f"rank {rank}: handshake with the driver at {address} failed: {error}") from error
    set_timeouts(connection, receive_s=0, send_s=0)
    return connection


def _connect_raw(address: ChannelAddress, timeout_s: float) -> socket.socket:
    if address.path is None:
        return socket.create_connection((address.host, address.port), timeout=timeout_s)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        raw.settimeout(timeout_s)
        raw.connect(address.path)
    except OSError:
        raw.close()
        raise
    return raw


def set_timeouts(connection: Connection, *, receive_s: float, send_s: float) -> None:
    """Bound each wait of a connection, in seconds; 0 waits for ever. A wait that is over raises BlockingIOError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_s))
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))


def receive(connection: Connection) -> bytes:
    """The next message. Raises EOFError or OSError if there is none, FrameError if none can be as long as it claims."""
    try:
        return connection.recv_bytes()
    except (MemoryError, OverflowError) as error:
        raise FrameError("a message is longer than memory can hold: its length must be damaged") from error


def send(connection: Connection, data: bytes, on_wait: Callable[[], None]) -> None:
    """Send a message. `on_wait` is called each time that a wait of `set_timeouts` is over; what it raises ends it.

    Raises OSError. `Connection.send_bytes` would give up in the middle of a message, which ends the connection.
    """
    size = len(data)
    header = struct.pack("!i", size) if size < 1 << 31 else struct.pack("!iQ", -1, size)
    left = memoryview(header + data)
    while left:
        try:
            left = left[os.write(connection.fileno(), left) :]
        except BlockingIOError:
            on_wait()


class Listener:
    """The driver's end: waits until every rank of one epoch has connected and proved itself."""

    def __init__(self, key: bytes, epoch: int, host: str | None) -> None:
        """Listens on a Unix socket, and on TCP at `host` if one is given. Raises ChannelError if it cannot."""
        self._key = key
        self._epoch = epoch
        self._folder = _make_folder()
        self.local_address = ChannelAddress(path=str(self._folder.path / _SOCKET_NAME))
        self._sockets = [_bind_unix(self._folder)]
        self.remote_address: ChannelAddress | None = None
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                tcp = socket.create_server((host, 0), family=family)
            except OSError as error:
                self._sockets[0].close()
                self._folder.close()
                raise ChannelError(f"the driver cannot listen on {host}, its node's address in Ray: {error}") from error
            self._sockets.append(tcp)
            self.remote_address = ChannelAddress(host=host, port=tcp.getsockname()[1])
        self._arrived: dict[int, Connection] = {}
        self._condition = threading.Condition()
        self._closed = False
        self._slots = threading.Semaphore(_MAX_HANDSHAKES)
        for raw in self._sockets:
            raw.listen(128)
            threading.Thread(target=self._accept_loop, args=(raw,), name="raytp-accept", daemon=True).start()

    def accept_ranks(
        self, num_ranks: int, timeout_s: float, on_wait: Callable[[], None] = lambda: None
    ) -> list[Connection]:
        """One connection for each rank, in rank order; stops listening.

        `on_wait` is called while there are ranks to wait for; what it raises ends the wait. Raises ChannelError after
        `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        try:
            with self._condition:
                while missing := sorted(set(range(num_ranks)) - set(self._arrived)):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise ChannelError(
                            f"ranks {missing} did not connect to {self.local_address} or {self.remote_address} "
                            f"within {timeout_s:g} s"
                        )
                    self._condition.wait(min(left, _WAIT_S))
                    on_wait()
                return [self._arrived.pop(rank) for rank in range(num_ranks)]
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening; connections handed out stay open."""
        with self._condition:
            self._closed = True
            for connection in self._arrived.values():
                connection.close()
            self._arrived.clear()
        for raw in self._sockets:
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_RDWR)  # wakes the accept loop, which close alone does not
            raw.close()
        self._folder.close()

    def _accept_loop(self, listening: socket.socket) -> None:
        while True:
            self._slots.acquire()
            try:
                raw, _ = listening.accept()
            except OSError:
                self._slots.release()
                if self._closed:
                    return
                time.sleep(0.05)  # out of file descriptors, say: that passes
                continue
            threading.Thread(target=self._handshake, args=(raw,), name="raytp-handshake", daemon=True).start()

    def _handshake(self, raw: socket.socket) -> None:
        try:
            connection = _wrap(raw, _HANDSHAKE_TIMEOUT_S)
        except OSError:  # out of file descriptors, say
            raw.close()
            self._slots.release()
            return
        try:
            with _hung_up_after(connection, _HANDSHAKE_TIMEOUT_S):
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                hello = FrameDecoder(self._epoch).decode(receive(connection))
            if hello.kind != HELLO or type(hello.body) is not int:
                raise FrameError(f"expected a hello, got {hello.kind}")
        except _HANDSHAKE_ERRORS:
            connection.close()  # a stranger, or a rank of an epoch that is over
            return
        finally:
            self._slots.release()
        with self._condition:
            if self._closed or hello.body in self._arrived:
                connection.close()
                return
            self._arrived[hello.body] = connection
            self._condition.notify_all()


@contextlib.contextmanager
def _hung_up_after(connection: Connection, seconds: float) -> Iterator[None]:
    """Whatever is waited for comes to its end by then, also if it comes byte by byte."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                duplicate.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _make_folder() -> ScratchFolder:
    """With a path that is short enough for a socket in it. Raises ChannelError."""
    longest = _MAX_SOCKET_PATH - NAME_LENGTH - len(f"//{_SOCKET_NAME}")
    try:
        parent = tempfile.gettempdir()
        return ScratchFolder(parent if len(os.fsencode(parent)) <= longest else "/tmp")
    except OSError as error:
        raise ChannelError(f"the driver cannot make a temporary folder ({error}): set TMPDIR to another") from error


def _bind_unix(folder: ScratchFolder) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        raw.bind(str(folder.path / _SOCKET_NAME))
    except OSError as error:  # the disk is full, say
        raw.close()
        folder.close()
        raise ChannelError(
            f"the driver cannot listen in {folder.path} ({error}): set TMPDIR to another folder"
        ) from error
    return raw


def _wrap(raw: socket.socket, timeout_s: float) -> Connection:
    raw.setblocking(True)
    if raw.family != socket.AF_UNIX:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection = Connection(raw.detach())
    set_timeouts(connection, receive_s=timeout_s, send_s=timeout_s)
    return connection


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))
