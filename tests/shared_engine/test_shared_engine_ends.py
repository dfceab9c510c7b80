"""How a shared engine ends, or never begins: whoever waits hears of it at once, and nothing stays."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table, remove_placement_group

from raytp import LLM, SamplingParams
from raytp.config import make_engine_config
from raytp.connection import start_engine
from raytp.errors import EngineError, EngineNotFoundError
from raytp.placement import group_name, remove_group
from raytp.shared_engines import list_engines, stop_engine
from tests.held_cpus import held_cpus
from tests.shared_engine.conftest import MODEL, TIMEOUT_S, Cluster, groups, pids, runs, wait_until

pytestmark = pytest.mark.usefixtures("nothing_left")

_ENDLESS = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)
_PROMPTLY_S = 15.0


class Waiter:
    """A caller that generates until it is told of an error."""

    def __init__(self, name: str) -> None:
        self._llm = LLM.connect(name)
        self._thread = threading.Thread(target=self._generate, daemon=True)
        self._thread.start()
        wait_until(lambda: self._llm.stats().num_running)

    def _generate(self) -> None:
        try:
            while True:
                self._llm.generate([[5 + i] for i in range(64)], _ENDLESS)
        except BaseException as error:
            self._error = error

    def error(self) -> BaseException:
        """What it was told."""
        self._thread.join(_PROMPTLY_S)
        assert not self._thread.is_alive()
        self._llm.shutdown()
        return self._error


def driver_pid() -> int:
    """Of the one driver that there is."""
    (pid,) = (each["Pid"] for each in actors().values() if each["Name"] and each["State"] == "ALIVE")
    return int(pid)


def serve_here(tensor_parallel_size: int, **options: int) -> None:
    """As serve-engine does, without a process for it."""
    start_engine(MODEL, make_engine_config(tensor_parallel_size, options), lambda *_: None, "brief")


def test_stop_while_a_caller_waits(cluster: Cluster) -> None:
    cluster.serve("brief", "--model", MODEL, "-t", 2)
    waiter = Waiter("brief")
    before = pids()
    assert (len(before), len(groups())) == (3, 1)
    status, _, errors = cluster.raytp("stop", "brief")
    assert (status, errors) == (0, "engine brief has ended\n")
    assert not pids()
    assert not groups()
    wait_until(lambda: not any(map(runs, before)), 2)
    error = waiter.error()
    assert isinstance(error, EngineError)
    assert "has been shut down" in str(error) or "was stopped or died" in str(error)
    status, out, errors = cluster.raytp("engines")
    assert (status, out) == (0, "")
    assert "there are no engines in this cluster" in errors


def test_an_engine_that_fails(cluster: Cluster) -> None:
    serve_here(2, max_restarts=0)
    waiter = Waiter("brief")
    victim = max(pids() - {driver_pid()})
    os.kill(victim, signal.SIGKILL)
    assert f"pid {victim}" in str(waiter.error())
    with pytest.raises(EngineError, match=rf"(?s)brief has failed, and raytp stop brief removes it: .*pid {victim}"):
        LLM.connect("brief")
    assert re.search(rf"failed: .*pid {victim}", cluster.raytp("engines")[1])
    wait_until(lambda: not groups() and pids() == {driver_pid()})
    stop_engine("brief")


def test_a_driver_that_dies() -> None:
    serve_here(1)
    waiter = Waiter("brief")
    os.kill(driver_pid(), signal.SIGKILL)
    assert "engine brief was stopped or died" in str(waiter.error())
    wait_until(lambda: not pids() and not groups())
    with pytest.raises(EngineNotFoundError, match="there is none; raytp serve-engine NAME starts one"):
        stop_engine("brief")


@contextmanager
def no_free_cpu() -> Iterator[Callable[[], None]]:
    """An engine waits for resources; what is given lets it go on."""
    held = sum(
        bundle.get("CPU", 0.0)
        for group in placement_group_table().values()
        if group["state"] != "REMOVED"
        for bundle in group["bundles"].values()
    )
    # Ray's own count of what is free lags behind.
    with held_cpus(int(ray.cluster_resources()["CPU"] - held), "others") as others:
        yield lambda: remove_placement_group(others)


def wait_for_stage(process: subprocess.Popen[str], stage: str) -> None:
    """Until serve-engine says that it has come so far; it may add how far, or what is missing."""
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith(stage):
        lines.append(process.stderr.readline())
        assert lines[-1], f"{stage} never came: {''.join(lines)}"


@pytest.mark.parametrize(
    ("number", "stage", "expected"),
    [(signal.SIGTERM, "waiting for resources", 143), (signal.SIGINT, "starting ranks", 130)],
)
def test_serve_engine_interrupted(cluster: Cluster, number: signal.Signals, stage: str, expected: int) -> None:
    """Ctrl-C, or the end of the Ray job that it is; it leaves nothing."""
    with no_free_cpu() as free:
        if stage != "waiting for resources":
            free()
        process = cluster.start_raytp("serve-engine", "brief", "--model", MODEL, "-t", 2)
        wait_for_stage(process, stage)
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == expected
        assert "Traceback" not in errors
        wait_until(lambda: not pids() and groups() in ([], ["others"]))
    assert not list_engines()


def test_serve_engine_killed(cluster: Cluster) -> None:
    """Its engine goes on starting, is seen, and can be stopped; or it becomes ready."""
    with no_free_cpu() as free:
        process = cluster.start_raytp("serve-engine", "brief", "--model", MODEL)
        wait_for_stage(process, "waiting for resources")
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert [engine.stage for engine in list_engines()] == ["waiting for resources"]
        with pytest.raises(EngineError, match=r"brief is not ready yet \(waiting for resources\)"):
            LLM.connect("brief")
        stop_engine("brief")
        assert (pids(), groups()) == (set(), ["others"])

        process = cluster.start_raytp("serve-engine", "brief", "--model", MODEL)
        wait_for_stage(process, "waiting for resources")
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        free()
    wait_until(lambda: [engine.stage for engine in list_engines()] == ["ready"], TIMEOUT_S)
    with LLM.connect("brief") as llm:
        assert llm.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True))[0].error is None
    stop_engine("brief")


def test_an_engine_stopped_while_it_starts(cluster: Cluster) -> None:
    with no_free_cpu():
        process = cluster.start_raytp("serve-engine", "brief", "--model", MODEL)
        wait_for_stage(process, "waiting for resources")
        stop_engine("brief")
        _, errors = process.communicate(timeout=_PROMPTLY_S)
        assert process.returncode == 1
        assert "Traceback" not in errors
        assert errors.startswith("error: ")


_LEAVES_A_GROUP = """
import sys, ray
from ray.util.placement_group import placement_group
ray.init(log_to_driver=False)
assert placement_group([{"CPU": 1}], name=sys.argv[1], lifetime="detached").wait(30)
"""


def test_a_placement_group_of_another_job_is_removed(cluster: Cluster) -> None:
    """An engine is stopped by other jobs than the one that has started it."""
    left, stays = (group_name(letter * 32) for letter in "ab")
    with held_cpus(1, stays):
        process = cluster.start("-c", _LEAVES_A_GROUP, left)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
        assert sorted(groups()) == [left, stays]
        remove_group(left)
        wait_until(lambda: groups() == [stays])


def test_a_model_that_cannot_be_loaded(cluster: Cluster, tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"cut off")
    status, out, errors = cluster.raytp("serve-engine", "brief", "--model", tmp_path / "model")
    assert (status, out) == (1, "")
    assert "model.safetensors cannot be read" in errors
    assert not list_engines()
