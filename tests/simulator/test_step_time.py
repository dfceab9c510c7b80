"""The step-time model, fitted on other workloads, against what was measured on H200s."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytp.bench.workloads import make_cases
from raytp.simulator.capacity import fixed_cluster
from raytp.simulator.cluster import simulate
from raytp.simulator.fit import FITTED_WORKLOADS, fit, scheduler_config
from raytp.simulator.fleet import ReplicaConfig
from raytp.simulator.hardware import shard_sizes
from raytp.simulator.least_squares import solve_nonnegative
from raytp.simulator.measured import find_gpu
from raytp.simulator.requests import SimulatedRequest
from raytp.simulator.setup import load_model
from raytp.simulator.step_time import Coefficients, StepTimes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDS = json.loads((RESULTS / "2026-12-01-h200-prefill-graphs.json").read_text())
OTHER_HOST = "2026-11-30-h200-skinny.json"
"""To which nothing is fitted."""
MEASURED = [
    record
    for record in [*RECORDS, *json.loads((RESULTS / OTHER_HOST).read_text())]
    if record["workload"] == "throughput"
]
MODELS = {name: load_model(name) for name in ("qwen3-0.6b", "qwen3-8b")}


@pytest.fixture(scope="module")
def fitted() -> Coefficients:
    assert "throughput" not in FITTED_WORKLOADS
    return fit(RECORDS, MODELS, find_gpu("h200").rates)


def test_the_coefficients_that_come_with_raytp_are_those_of_the_records(fitted: Coefficients) -> None:
    known = find_gpu("h200").coefficients
    for field in fields(Coefficients):
        assert getattr(known, field.name) == pytest.approx(getattr(fitted, field.name), rel=2e-3, abs=1e-18), field.name


@pytest.mark.parametrize("record", MEASURED, ids=lambda record: f"{record['model']}-{record['tensor_parallel_size']}")
def test_throughput_is_predicted_within_a_tenth(record: dict[str, Any], fitted: Coefficients) -> None:
    (case,) = make_cases("throughput", None, 10_001)
    requests = [
        SimulatedRequest(arrival_s=0.0, prompt_tokens=len(prompt), output_tokens=length)
        for prompt, length in zip(case.prompts, case.output_lens, strict=True)
    ]
    num_ranks = record["tensor_parallel_size"]
    times = StepTimes(fitted, shard_sizes(MODELS[record["model"]], num_ranks), record["engine"]["block_size"])
    replica = ReplicaConfig(scheduler=scheduler_config(record), times=times, num_gpus=num_ranks)
    results = simulate(fixed_cluster(replica, 1), requests)
    assert results.num_steps == record["num_scheduler_steps"]
    assert results.output_tokens_per_s == pytest.approx(record["output_tokens_per_s"], rel=0.1)


def test_least_squares_are_least_among_values_that_are_not_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        matrix, target = rng.normal(size=(12, 4)), rng.normal(size=12)
        found = solve_nonnegative(matrix, target)
        assert (found >= 0).all()
        # The conditions of Karush, Kuhn and Tucker, which hold at the least squares and nowhere else.
        gradient = matrix.T @ (matrix @ found - target)
        assert (gradient >= -1e-8).all()
        assert gradient @ found == pytest.approx(0, abs=1e-8)
