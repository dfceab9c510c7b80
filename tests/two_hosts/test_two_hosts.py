"""Two ranks on two hosts: links that are cut, hosts that are lost, interfaces that lead nowhere."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.two_hosts.hosts import Hosts, obstacle

JOB = Path(__file__).parent / "job.py"
SHORT_CUT_S, LIMIT_S, LONG_CUT_S = 3.0, 8.0, 10.0
"""TCP tries again ever more seldom: what is lost in a cut may arrive as long after its end as the cut has lasted."""
TIMEOUT_S = 60.0
JOINS_AFTER_S = 4.0
PATIENT = {"RAY_health_check_failure_threshold": "20"}
"""Ray bears cuts that raytp does not."""
STRICT = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray gives a host up after some two seconds."""


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    """Skips where hosts cannot be made."""
    why = obstacle()
    if why is not None:
        pytest.skip(why)


class Job:
    """A job on the head, with an engine."""

    def __init__(self, hosts: Hosts, **settings: object) -> None:
        self._process = hosts.run_job(JOB)
        self._write(json.dumps(settings))
        self.start = self.read()

    def ask(self, what: str) -> None:
        """Returns when the engine is at work."""
        self._write(what)
        assert self.read() == {"started": True}

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("{"):  # Ray tells of dead workers there
            assert line, self._process.communicate(timeout=20)[1]
        found: dict[str, Any] = json.loads(line)
        return found

    def result(self, what: str) -> dict[str, Any]:
        """An answer that nothing disturbs."""
        self.ask(what)
        return self.read()

    def end(self) -> None:
        _, errors = self._process.communicate(timeout=20)
        assert self._process.returncode == 0, errors

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


@contextmanager
def two_hosts(settings: Mapping[str, str]) -> Iterator[Hosts]:
    hosts = Hosts(settings)
    try:
        hosts.add("head")
        wait_until(lambda: "raylet" in " ".join(hosts.processes("head").values()))
        hosts.add("other")
        yield hosts
    finally:
        hosts.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ranks_of(hosts: Hosts, name: str) -> set[int]:
    return {pid for pid, title in hosts.processes(name).items() if title.startswith("ray::RankActor")}


@pytest.fixture(scope="module")
def patient_hosts() -> Iterator[Hosts]:
    with two_hosts(PATIENT) as hosts:
        yield hosts


def test_a_link_that_is_cut_and_mended(patient_hosts: Hosts) -> None:
    """For less than the engine's limit: a pause. For more: other ranks, and the same tokens."""
    job = Job(patient_hosts, heartbeat_timeout_s=LIMIT_S)
    assert sorted(job.start["hostnames"]) == ["head", "other"], job.start
    assert job.result("facts")["is_right"]
    undisturbed = job.result("ids")
    for cut_s, num_recoveries in ((SHORT_CUT_S, 0), (LONG_CUT_S, 1)):
        before = ranks_of(patient_hosts, "other")
        job.ask("ids")
        time.sleep(undisturbed["took_s"] / 3)
        patient_hosts.cut("other")
        time.sleep(cut_s)
        patient_hosts.mend("other")
        answer = job.read()
        print(f"cut for {cut_s:g} s: answered in {answer['took_s']:.1f} s, undisturbed {undisturbed['took_s']:.1f} s")
        print(answer["recoveries"])
        assert answer["errors"] == []
        assert answer["ids"] == undisturbed["ids"]
        assert len(answer["recoveries"]) == num_recoveries
        assert len(ranks_of(patient_hosts, "other")) == 1
        assert (ranks_of(patient_hosts, "other") == before) == (num_recoveries == 0)
    (report, _) = answer["recoveries"][0]
    assert "on other" in report
    assert "cut off from the network" in report
    job.end()
    wait_until(lambda: not ranks_of(patient_hosts, "other"), 15)


def test_a_named_interface_that_leads_nowhere(patient_hosts: Hosts) -> None:
    """It ends the start by its deadline; unnamed, as in the other tests, it is not used though it is the first."""
    deadline_s = 12.0
    job = Job(patient_hosts, interface="eth0", startup_timeout_s=deadline_s)
    print(job.start)
    assert job.start["kind"] == "RendezvousTimeoutError"
    assert job.start["took_s"] < TIMEOUT_S, "once, and not once more for each of max_restarts"
    assert re.search(r"rank \d on 10\.67\.0\.\d did not meet rank 0 at 10\.67\.0\.\d:\d+", job.start["error"])
    assert "over the interface eth0" in job.start["error"]
    job.end()
    wait_until(lambda: not ranks_of(patient_hosts, "head") | ranks_of(patient_hosts, "other"), 15)


def test_a_lost_host_and_another_that_joins() -> None:
    """The engine waits for it."""
    with two_hosts(STRICT) as hosts:
        job = Job(hosts, heartbeat_timeout_s=3.0)
        undisturbed = job.result("ids")
        job.ask("ids")
        time.sleep(undisturbed["took_s"] / 3)
        hosts.lose("other")
        lost_at = time.monotonic()
        time.sleep(JOINS_AFTER_S)
        hosts.add("third")
        answer = job.read()
        print(f"answered {time.monotonic() - lost_at:.1f} s after the loss: {answer['recoveries']}")
        assert answer["errors"] == []
        assert answer["ids"] == undisturbed["ids"]
        assert len(ranks_of(hosts, "head")) == len(ranks_of(hosts, "third")) == 1
        assert "on other" in answer["recoveries"][0][0]
        job.end()
