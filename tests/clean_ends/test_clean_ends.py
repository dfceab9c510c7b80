"""However an engine ends, nothing of it stays: processes, placement groups, ports and sockets, files in shared memory.

Each ending is that of a real script, with a Ray of its own or as a job of a cluster that goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table

from raytp import LLM, SamplingParams
from tests.clean_ends.traces import Traces, marked, take_traces, title_of

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
MARK = "RAYTP_TEST_ENDING"
GONE_WITHIN_S = 15.0
READY_WITHIN_S = 120.0
"""Far more than it takes; the machine may be busy."""
STOP_GRACE_S = 3.0
"""Between the two signals of `ray job stop`."""

SCRIPT = """
import sys
from raytp import LLM, SamplingParams
model, ending = sys.argv[1:]
print("starting", flush=True)
llm = LLM(model, 2, device="cpu")
print("ready", flush=True)
sys.stdin.readline()
if ending == "exception":
    with llm:
        raise ValueError("the user's own")
elif ending != "exit":
    endless = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)
    while True:
        llm.generate([[5 + i] for i in range(64)], endless)
"""


class Script:
    """A user's script, in a process group of its own. `end` whatever happens."""

    def __init__(self, ending: str, address: str | None, log: Path) -> None:
        """`address`: of the cluster to use; None lets it start one."""
        name, value = MARK, f"{os.getpid()}-{time.monotonic_ns()}"
        self.mark = f"{name}={value}"
        self._log = log
        env = {key: text for key, text in os.environ.items() if key != "RAY_ADDRESS"}
        env |= {name: value, "RAY_AUTH_MODE": "disabled"} | ({} if address is None else {"RAY_ADDRESS": address})
        command = [sys.executable, "-c", SCRIPT, str(MODEL), ending]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env, start_new_session=True
            )

    def wait_for(self, what: str) -> None:
        """Until it says so."""
        deadline = time.monotonic() + READY_WITHIN_S
        while what not in (said := self.said()):
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.02)

    def said(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def go_on(self) -> None:
        """Past the point where it waits to be told."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def engine_pids() -> set[int]:
    """Of the drivers and ranks that the session's Ray knows to be alive."""
    alive = (each for each in actors().values() if each["State"] != "DEAD")
    return {each["Pid"] for each in alive if each["ActorClassName"] in ("Driver", "RankActor")} - {0}


def groups() -> set[str]:
    return {group_id for group_id, group in placement_group_table().items() if group["state"] != "REMOVED"}


def measure(nothing_is_left: Callable[[], list[str]]) -> float:
    """Seconds until nothing is left; fails if something stays."""
    start = time.monotonic()
    while left := nothing_is_left():
        assert time.monotonic() - start < GONE_WITHIN_S, left
        time.sleep(0.05)
    return time.monotonic() - start


def stop_job(pid: int) -> None:
    """As Ray stops the process of a job."""
    os.killpg(pid, signal.SIGTERM)
    time.sleep(STOP_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end(ending: str, script: Script, traces: Traces) -> None:
    """Let a script that is at work come to its end."""
    script.go_on()
    if ending in NO_SIGNAL:
        return
    time.sleep(0.5)
    if ending == "driver killed":
        os.kill(next(pid for pid, title in traces.titles.items() if title.startswith("ray::Driver")), signal.SIGKILL)
    else:
        SIGNALS[ending](script.process.pid)


NO_SIGNAL = ("exit", "exception")
SIGNALS: dict[str, Callable[[int], None]] = {
    "SIGINT": lambda pid: os.kill(pid, signal.SIGINT),
    "SIGTERM": lambda pid: os.kill(pid, signal.SIGTERM),
    "SIGTERM to the group": lambda pid: os.killpg(pid, signal.SIGTERM),
    "SIGKILL": lambda pid: os.kill(pid, signal.SIGKILL),
    "job stopped": stop_job,
}


@pytest.fixture
def script_of(tmp_path: Path) -> Iterator[Callable[[str, str | None], Script]]:
    """Makes scripts, and ends them."""
    scripts: list[Script] = []

    def make(ending: str, address: str | None) -> Script:
        scripts.append(Script(ending, address, tmp_path / "said"))
        return scripts[-1]

    yield make
    for script in scripts:
        script.end()


@pytest.mark.parametrize("ending", ["exception", "SIGINT", "SIGKILL", "driver killed", "job stopped"])
def test_an_ending_in_a_cluster_that_goes_on(
    ending: str, ray_session: None, script_of: Callable[[str, str | None], Script]
) -> None:
    pids, groups_before = engine_pids(), groups()
    script = script_of(ending, ray.get_runtime_context().gcs_address)
    script.wait_for("ready")
    traces = take_traces({script.process.pid} | (engine_pids() - pids))
    assert len(traces.titles) == 4
    assert traces.listening
    assert len(groups() - groups_before) == 1
    end(ending, script, traces)
    took_s = measure(lambda: _ended(script, traces) + sorted(groups() - groups_before))
    print(f"{ending}, in a cluster: all gone after {took_s:.1f} s")


@pytest.mark.parametrize("ending", ["exit", "SIGTERM to the group", "SIGKILL"])
def test_an_ending_with_a_ray_of_its_own(ending: str, script_of: Callable[[str, str | None], Script]) -> None:
    """Ray goes too; only after SIGKILL some processes of its own stay for a minute."""
    script = script_of(ending, None)
    script.wait_for("ready")
    everything = take_traces(marked(script.mark))
    engine = {pid for pid, title in everything.titles.items() if title.startswith(("ray::RankActor", "ray::Driver"))}
    assert len(engine) == 3
    traces = take_traces(engine) if ending == "SIGKILL" else everything
    end(ending, script, traces)
    took_s = measure(traces.left if ending == "SIGKILL" else lambda: _ended(script, traces))
    print(f"{ending}, with a Ray of its own: all gone after {took_s:.1f} s")


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGTERM to the group"])
def test_an_ending_while_it_starts(ending: str, script_of: Callable[[str, str | None], Script]) -> None:
    script = script_of(ending, None)
    deadline = time.monotonic() + READY_WITHIN_S
    while not any(title_of(pid).startswith("ray::RankActor") for pid in marked(script.mark)):
        assert script.process.poll() is None, script.said()
        assert time.monotonic() < deadline, script.said()
        time.sleep(0.1)
    traces = take_traces(marked(script.mark))
    SIGNALS[ending](script.process.pid)
    took_s = measure(lambda: _ended(script, traces))
    print(f"{ending} while the ranks start: all gone after {took_s:.1f} s")


def _ended(script: Script, traces: Traces) -> list[str]:
    script.process.poll()  # else it stays as a zombie
    return traces.left() + [title_of(pid) for pid in marked(script.mark)]


def test_three_starts_over_leak_nothing(ray_session: None) -> None:
    """The caller's process keeps its threads and files, and the machine its processes, groups and files."""
    pids, groups_before = engine_pids(), groups()
    counts = []
    for _ in range(3):  # the first one imports and opens what stays
        with LLM(MODEL, 2, device="cpu") as llm:
            assert llm.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True))[0].error is None
            traces = take_traces(engine_pids() - pids)
        took_s = measure(lambda traces=traces: traces.left() + sorted(groups() - groups_before))  # type: ignore[misc]
        print(f"shutdown: all gone after {took_s:.1f} s")
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    _, second, third = counts
    assert all(later <= earlier for earlier, later in zip(second, third, strict=True)), counts
