"""What arrives: as many as are asked for, as often as is asked for, the same for the same seed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raytp.experiment.spec import WorkloadSpec
from raytp.experiment.workloads import make_requests
from raytp.simulator.requests import read_trace

BURSTS = WorkloadSpec(num_requests=20_000, rate=2.0, burst_rate=30.0, burst_s=60.0, burst_every_s=300.0)


def test_bursts_have_their_rate_and_the_rest_has_the_other() -> None:
    arrivals = np.array([one.arrival_s for one in make_requests(BURSTS, 0)])
    assert (np.diff(arrivals) >= 0).all()
    arrivals = arrivals[arrivals < arrivals[-1] // 300 * 300]  # whole periods
    num_periods = arrivals[-1] // 300 + 1
    is_burst = arrivals % 300 >= 240
    assert is_burst.sum() / (num_periods * 60) == pytest.approx(30, rel=0.03)
    assert (~is_burst).sum() / (num_periods * 240) == pytest.approx(2, rel=0.06)


def test_between_bursts_there_may_be_nothing() -> None:
    arrivals = [one.arrival_s for one in make_requests(replace(BURSTS, num_requests=3000, rate=0.0), 1)]
    assert all(240 <= at_s % 300 <= 300 for at_s in arrivals)
    assert arrivals[-1] > 300


def test_bursts_all_the_time_are_a_plain_process() -> None:
    gaps = np.diff([one.arrival_s for one in make_requests(replace(BURSTS, burst_every_s=60.0), 2)])
    assert gaps.mean() == pytest.approx(1 / 30, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 30, rel=0.03)


@pytest.mark.parametrize("workload", [BURSTS, replace(BURSTS, burst_rate=None), WorkloadSpec()])
def test_a_seed_decides_everything(workload: WorkloadSpec) -> None:
    workload = replace(workload, num_requests=50)
    assert make_requests(workload, 1) == make_requests(workload, 1) != make_requests(workload, 2)
    assert len(make_requests(workload, 1)) == 50


def test_a_trace_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": at, "prompt_tokens": 3, "output_tokens": 2} for at in (4, 2)]
    file.write_text("\n".join(map(json.dumps, lines)))
    workload = WorkloadSpec(trace=file)
    assert make_requests(workload, 0) == make_requests(workload, 9) == tuple(read_trace(file))
