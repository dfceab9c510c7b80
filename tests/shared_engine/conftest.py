"""The session's Ray as other jobs see it, what is left in it, and one shared engine for those that want it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table

from raytp.shared_engines import list_engines, stop_engine

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
TIMEOUT_S = 60
"""Far more than anything here takes; the machine may be busy."""


class Cluster:
    """The Ray of this test session, seen from other processes: each command is a job of its own."""

    def __init__(self) -> None:
        own = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "NO_COLOR": "1", "COLUMNS": "200"}
        self.env = os.environ | own

    def start(self, *command: object, **options: Any) -> subprocess.Popen[str]:
        """A process in a group of its own."""
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def start_raytp(self, *arguments: object) -> subprocess.Popen[str]:
        """A command on its way."""
        return self.start("-m", "raytp.cli", *arguments)

    def raytp(self, *arguments: object) -> tuple[int, str, str]:
        """A command's exit status, standard output and standard error."""
        process = self.start_raytp(*arguments)
        out, errors = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, errors

    def serve(self, name: str, *arguments: object) -> None:
        """Start a shared engine."""
        status, out, errors = self.raytp("serve-engine", name, *arguments)
        assert (status, f"engine {name} is ready" in out) == (0, True), errors


_others: tuple[set[int], set[str]] = (set(), set())
"""Processes and placement groups of engines that other tests of the session keep."""


def pids() -> set[int]:
    """Processes of these tests' drivers and ranks that Ray knows to be alive."""
    classes = ("Driver", "RankActor")
    alive = {each["Pid"] for each in actors().values() if each["ActorClassName"] in classes and each["State"] != "DEAD"}
    return alive - _others[0]


def groups() -> list[str]:
    """Placement groups that these tests have made."""
    names = [each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
    return [name for name in names if name not in _others[1]]


def runs(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def wait_until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Fails if it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, (pids(), groups())
        time.sleep(0.05)


@pytest.fixture(scope="session")
def cluster(ray_session: None) -> Cluster:
    """The cluster, as a job sees it."""
    global _others
    _others = pids(), set(groups())
    return Cluster()


@pytest.fixture
def nothing_left(cluster: Cluster) -> Iterator[None]:
    """What the test starts is gone at its end: every actor, and every placement group."""
    wait_until(lambda: not pids() and not groups())
    yield
    try:
        wait_until(lambda: not pids() and not groups())
    finally:  # one that fails does not make the others fail
        for engine in list_engines():
            stop_engine(engine.name)


@pytest.fixture(scope="module")
def trivia(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of an engine of two ranks whose model's folder has gone since, as it is on other nodes."""
    wait_until(lambda: not pids() and not groups())
    folder = tmp_path_factory.mktemp("models") / "trivia"
    shutil.copytree(MODEL, folder)
    cluster.serve("trivia", "--model", folder, "-t", 2)
    shutil.rmtree(folder)
    yield "trivia"
    cluster.raytp("stop", "trivia")
    wait_until(lambda: not pids() and not groups())
