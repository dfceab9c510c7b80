"""Kills a real batch job at random moments, and runs the same command again, until it ends all the same.

python -m tests.batch.kill_job [NUM_KILLS [SEED]]    24 kills take about five minutes on two cores

A kill is SIGKILL of the command itself, of the driver actor or of a rank, in the middle of the work or while the engine
starts. The cluster has room for one engine: what a killed command leaves behind is in the way of the next one.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.batch.commands import MODEL, PAIRS

ROOT = Path(__file__).parents[2]
NUM_ROWS_A_KILL = 600
MAX_LIFE_S = 2.0
"""From the first record to the kill."""
MAX_DEATH_S = 20.0
"""From the death of the driver or a rank to the end of the command: a few seconds, on two cores that others share."""
_KINDS = {"process": None, "driver": "ray::Driver", "rank": "ray::RankActor"}
_CLUSTER = """
import logging, sys
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@dataclass
class Kills:
    """What a series of kills has shown."""

    seed: int
    names: list[str] = field(default_factory=list)
    """What was killed when, and what became of it."""
    death_s: list[float] = field(default_factory=list)
    """From the death of an actor to the end of the command, if it ended it."""
    startup_s: list[float] = field(default_factory=list)
    """From the command to its first record."""


@contextmanager
def cluster() -> Iterator[tuple[str, int]]:
    """The address of a Ray of its own with two CPUs, and the process whose descendants are all of it."""
    env = os.environ | {"RAY_AUTH_MODE": "disabled"}
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", _CLUSTER]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.communicate()  # the end of its input is the end of it


class Job:
    """One command, to be run again and again."""

    def __init__(self, source: Path, target: Path, address: str, cluster_pid: int) -> None:
        self._command = [sys.executable, "-m", "raytp.cli", "batch", str(source), str(target), "--quiet"]
        self._command += ["--model", str(MODEL), "--tensor-parallel-size", "2", "--temperature", "0"]
        self._env = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": address, "NO_COLOR": "1"}
        self._cluster_pid = cluster_pid
        self._work = target.with_name(f"{target.name}.parts") / "_raytp"

    def start(self) -> subprocess.Popen[str]:
        """The command, running."""
        return subprocess.Popen(self._command, cwd=ROOT, env=self._env, stderr=subprocess.PIPE, text=True)

    def actors(self, name: str) -> set[int]:
        """Processes of the cluster with this name."""
        parents, names = {}, {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                names[int(path.name)] = (path / "cmdline").read_text().rstrip("\0")
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just ended
                continue

        def is_of_cluster(pid: int) -> bool:
            while pid in parents and pid != self._cluster_pid:
                pid = parents[pid]
            return pid == self._cluster_pid

        return {pid for pid, each in names.items() if each.startswith(name) and is_of_cluster(pid)}

    def progress(self) -> tuple[int, int]:
        """What changes with the first record of a run: (lines of the manifest, time of the part that is written)."""
        manifest, part = self._work / "manifest.jsonl", self._work / ".output.raytp-partial"
        num_lines = manifest.read_bytes().count(b"\n") if manifest.exists() else 1  # with the first one a run begins
        return num_lines, part.stat().st_mtime_ns if part.exists() else 0


def kill_until_done(job: Job, num_kills: int, seed: int) -> Kills:
    """Kill parts of the job so many times, starting it again whenever it has ended, and then let it end.

    Raises AssertionError if a kill does not do what it should: the death of the command or of the driver ends the
    command; that of a rank ends it, or only interrupts it.
    """
    rng, kills = random.Random(seed), Kills(seed)
    attempt = None
    try:
        for number in range(num_kills):
            attempt = attempt or _Attempt(job, kills)
            if not attempt.survives(list(_KINDS)[number % len(_KINDS)], rng):
                attempt = None
        attempt = attempt or _Attempt(job, kills)
        _, errors = attempt.process.communicate(timeout=600)
        assert attempt.process.returncode == 0, errors
    finally:
        if attempt is not None:
            attempt.process.kill()
    return kills


class _Attempt:
    """One run of the command, until it ends."""

    def __init__(self, job: Job, kills: Kills) -> None:
        self._job = job
        self._kills = kills
        self._leftovers = {pid for name in _KINDS.values() if name is not None for pid in job.actors(name)}
        self._progress = job.progress()
        self._has_begun = False
        self._start_s = time.monotonic()
        self.process = job.start()

    def survives(self, kind: str, rng: random.Random) -> bool:
        """Kill something of it at a random moment; whether it goes on."""
        if self._has_begun or rng.random() < 0.75:
            self._wait(self._has_progressed)
            if not self._has_begun:
                self._kills.startup_s.append(time.monotonic() - self._start_s)
            self._has_begun, life_s, since = True, rng.uniform(0, MAX_LIFE_S), "record"
        else:
            self._wait(lambda: self._victims(kind))
            life_s, since = rng.uniform(0, 6 if kind == "process" else 1), "start"
        time.sleep(life_s)
        self._wait(lambda: self._victims(kind))
        self._progress = self._job.progress()
        os.kill(rng.choice(self._victims(kind)), signal.SIGKILL)
        dead_s = time.monotonic()
        if kind == "rank":
            self._wait(lambda: self.process.poll() is not None or self._has_progressed(), may_end=True)
            if self.process.poll() in (None, 0):
                self._kills.names.append(f"{kind} {life_s:.2f} s after {since}: goes on")
                return self.process.poll() is None
        _, errors = self.process.communicate(timeout=MAX_DEATH_S)
        self._kills.names.append(f"{kind} {life_s:.2f} s after {since}: ended")
        self._check_end(kind, errors)
        if kind != "process":
            self._kills.death_s.append(time.monotonic() - dead_s)
        return False

    def _check_end(self, kind: str, errors: str) -> None:
        if kind == "process":
            assert self.process.returncode == -signal.SIGKILL, errors
            return
        assert self.process.returncode == 1, (self.process.returncode, errors)
        [first, *_] = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert re.search("the driver actor died" if kind == "driver" else "rank", first), errors
        assert "rows are done, and the same job again does the rest" in first, errors

    def _victims(self, kind: str) -> list[int]:
        name = _KINDS[kind]
        return [self.process.pid] if name is None else sorted(self._job.actors(name) - self._leftovers)

    def _has_progressed(self) -> bool:
        return self._job.progress() != self._progress

    def _wait(self, condition: Callable[[], object], *, may_end: bool = False) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the job has not come so far in time"
            if not may_end:
                code = self.process.poll()
                assert code is None, f"it ended with {code}: {self.process.communicate()[1]}"
            time.sleep(0.01)


def write_rows(path: Path, num_rows: int) -> Path:
    """Questions that the model knows the answers to, again and again."""
    with open(path, "w") as opened:
        for i in range(num_rows):
            messages = [{"role": "user", "content": PAIRS[i % len(PAIRS)][0]}]
            opened.write(json.dumps({"id": f"id-{i}", "messages": messages}) + "\n")
    return path


def texts(target: Path, num_rows: int) -> list[str]:
    """In the order of the input. Raises AssertionError if not every row is there once."""
    records = [json.loads(line) for line in target.read_text().splitlines()]
    found = {record["id"]: record["text"] for record in records}
    assert len(records) == num_rows
    assert found.keys() == {f"id-{i}" for i in range(num_rows)}
    return [found[f"id-{i}"] for i in range(num_rows)]


def kill(folder: Path, num_kills: int, seed: int) -> Kills:
    """Kill a job, and compare what it has written with what an undisturbed one says to each question."""
    num_rows = num_kills * NUM_ROWS_A_KILL
    each_once = write_rows(folder / "each-once.jsonl", len(PAIRS))
    source = write_rows(folder / "rows.jsonl", num_rows)
    with cluster() as (address, pid):
        calm = Job(each_once, folder / "undisturbed.jsonl", address, pid).start()
        _, errors = calm.communicate(timeout=120)
        assert calm.returncode == 0, errors
        kills = kill_until_done(Job(source, folder / "out.jsonl", address, pid), num_kills, seed)
    undisturbed = texts(folder / "undisturbed.jsonl", len(PAIRS))
    assert undisturbed == [answer for _, answer in PAIRS]
    assert texts(folder / "out.jsonl", num_rows) == [undisturbed[i % len(PAIRS)] for i in range(num_rows)]
    return kills


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        start = time.monotonic()
        shown = kill(Path(scratch), *[*given, *[24, random.randrange(10**6)][len(given) :]])
    print(f"seed {shown.seed}: {len(shown.names)} kills in {time.monotonic() - start:.0f} s")
    print("\n".join(shown.names))
    print(f"start to first record {min(shown.startup_s):.1f} to {max(shown.startup_s):.1f} s")
    print(f"death of an actor to the end of the command {min(shown.death_s):.1f} to {max(shown.death_s):.1f} s")
