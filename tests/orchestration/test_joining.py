"""Which Ray is joined where several are to be had, or none."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import services
from ray._private.utils import get_ray_address_file

from raytp import ray_runtime
from raytp.ray_runtime import _find_on_this_machine, _wait_for_listener, _why_deaf

GONE = "127.0.0.1:1"
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


@pytest.fixture
def listener() -> Iterator[str]:
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.usefixtures("ray_session")
def test_a_cluster_that_has_ended_is_passed_over_for_one_that_runs(noted: Path) -> None:
    noted.write_text(GONE)
    found = _find_on_this_machine()
    assert found != GONE
    assert _why_deaf(found) is None


@pytest.mark.usefixtures("ray_session")
def test_the_latest_cluster_comes_first(noted: Path, listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: {listener, other, GONE})
        for latest in (listener, other):
            noted.write_text(latest)
            assert _find_on_this_machine() == latest


def test_a_cluster_that_runs_comes_before_a_port_that_somebody_else_has_taken(
    noted: Path, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        noted.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: {listener})
        assert _find_on_this_machine() == listener


def test_why_no_cluster_can_be_had_is_said_of_each(noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"127.0.0.1:2"})
    noted.write_text(GONE)
    with pytest.raises(ConnectionError, match=r"127.0.0.1:2 does not answer: .*refused, and the one at 127.0.0.1:1 "):
        _find_on_this_machine()


def test_who_waits_for_a_cluster_is_told(monkeypatch: pytest.MonkeyPatch, listener: str) -> None:
    monkeypatch.setattr(ray_runtime, "_JOIN_TIMEOUT_S", 0.2)
    told: list[str] = []
    with pytest.raises(ConnectionRefusedError):
        _wait_for_listener(GONE, lambda stage, _: told.append(stage))
    assert told == [f"waiting for the cluster: nothing listens at {GONE} yet"]
    _wait_for_listener(listener, None)


def test_threads_that_want_ray_at_once_get_one() -> None:
    done = subprocess.run([sys.executable, "-c", THREE_AT_ONCE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
