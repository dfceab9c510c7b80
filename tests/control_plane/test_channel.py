"""How ranks connect to the driver, over real sockets: who is let in, who is not, and how long that takes."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.control_plane.connections import EPOCH, KEY, PROMPTLY_S, address_of, connect_raw, listening
from workers import channel
from workers.channel import ChannelAddress, Listener, connect, set_timeouts
from workers.errors import ChannelError


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
