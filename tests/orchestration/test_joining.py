"""Which Ray is joined where several are to be had, or none."""

from __future__ import annotations

import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray._private import services
from ray._private.utils import get_ray_address_file

from raytp import ray_runtime
from raytp.config import EngineConfig
from raytp.errors import EngineError
from raytp.ray_runtime import _find_on_this_machine, _wait_for_listener, _why_deaf
from raytp.replicas.starting import prepare_start

GONE = "127.0.0.1:1"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a server of gRPC begins."""
THREE_AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
import ray
from raytp.ray_runtime import ensure_ray

with ThreadPoolExecutor(3) as threads:
    for started in [threads.submit(ensure_ray, 1) for _ in range(3)]:
        started.result()
print(ray.cluster_resources()["CPU"] > 0)
"""


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ray start notes the address of the latest cluster."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    file = Path(get_ray_address_file(None))
    assert tmp_path in file.parents
    file.parent.mkdir(exist_ok=True)
    return file


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """The address of somebody who answers so to whatever is said first."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(100)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.mark.usefixtures("ray_session")
def test_a_cluster_that_has_ended_is_passed_over_for_one_that_runs(noted: Path) -> None:
    noted.write_text(GONE)
    found = _find_on_this_machine()
    assert found != GONE
    assert _why_deaf(found) is None


def test_the_latest_cluster_comes_first(noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(SETTINGS) as one, listening(SETTINGS) as other:
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: {one, other, GONE})
        for latest in (one, other):
            noted.write_text(latest)
            assert _find_on_this_machine() == latest


def test_a_cluster_that_runs_comes_before_one_that_was_noted(noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(SETTINGS) as one, listening(SETTINGS) as other:
        noted.write_text(other)
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: {one})
        assert _find_on_this_machine() == one


@pytest.mark.parametrize("answer", [b"", b"-ERR unknown command\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_is_no_ray_is_not_joined(answer: bytes, noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would try for minutes."""
    with listening(answer) as stranger:
        noted.write_text(stranger)
        monkeypatch.setattr(services, "find_gcs_addresses", set)
        with pytest.raises(ConnectionError, match=r"what listens there is no Ray; the port of its GCS is 6379"):
            _find_on_this_machine()


def test_what_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "_PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert isinstance(_why_deaf(f"127.0.0.1:{silent.getsockname()[1]}"), TimeoutError)


def test_why_no_cluster_can_be_had_is_said_of_each(noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"127.0.0.1:2"})
    noted.write_text(GONE)
    with pytest.raises(ConnectionError, match=r"127.0.0.1:2 does not answer: .*refused, and the one at 127.0.0.1:1 "):
        _find_on_this_machine()


def test_who_waits_for_a_cluster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "_JOIN_TIMEOUT_S", 1.0)
    told: list[str] = []
    with pytest.raises(ConnectionRefusedError):
        _wait_for_listener(GONE, lambda stage, _: told.append(stage))
    assert set(told) == {f"waiting for the cluster: {GONE} does not answer yet"}
    with listening(SETTINGS) as cluster:
        _wait_for_listener(cluster, None)


def test_replicas_that_wait_for_a_cluster_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "_JOIN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", GONE)
    told: list[str] = []
    with pytest.raises(EngineError, match=f"RAY_ADDRESS={GONE} cannot be joined"):
        prepare_start(None, EngineConfig(), 2, on_progress=lambda stage, _: told.append(stage))
    assert set(told) == {f"waiting for the cluster: {GONE} does not answer yet"}


def test_threads_that_want_ray_at_once_get_one() -> None:
    done = subprocess.run([sys.executable, "-c", THREE_AT_ONCE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
