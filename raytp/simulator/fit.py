"""Fits the step-time model's coefficients to what `raytp bench` has measured.

The workloads latency, prefill and shared-prefix are used, so that throughput, which is nano-vLLM's benchmark, can be
predicted and compared. The real scheduler says which steps each workload takes; the time of a workload is then the sum
of their terms, linear in all coefficients but the two rates of the roofline, which are tried on a grid. The squares of
the relative errors are least, and no coefficient is negative.

Called by `raytp.cli.simulate`; `benchmarks/simulation.py` prints what is entered in `raytp.simulator.measured`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from raytp.bench.workloads import Case, make_cases
from raytp.errors import ConfigError
from raytp.simulator.bench_steps import BenchSteps, steps_of
from raytp.simulator.hardware import ShardSizes, shard_sizes
from raytp.simulator.least_squares import solve_nonnegative
from raytp.simulator.step_time import Coefficients, Floats, StepTimes
from scheduler.config import SchedulerConfig
from workers.model_config import ModelConfig

Record: TypeAlias = Mapping[str, Any]

FITTED_WORKLOADS = ("latency", "prefill", "shared-prefix")
_SHARES_OF_BYTES = np.linspace(0.7, 1.0, 16)
_SHARES_OF_FLOP = np.linspace(0.6, 1.0, 21)
"""Shares of the rates that a copy and a large product alone reach."""
_LINEAR = (
    "layer_s",
    "eager_layer_s",
    "eager_parallel_layer_s",
    "shared_byte_s",
    "pair_flop_s",
    "all_reduce_layer_s",
    "all_reduce_byte_s",
    "request_s",
)
_DRIVER = ("driver_step_s", "driver_row_s", "driver_prompt_token_s")
_NOTHING = Coefficients(
    bytes_per_s=math.inf, flop_per_s=math.inf, memory_bytes=0.0, **dict.fromkeys((*_LINEAR, *_DRIVER), 0.0)
)
"""A GPU for which every step is free."""
_UNLIMITED_VOCABULARY = 2**31 - 1
_TOKENS_OUT = {"latency": 129, "prefill": 1}
"""By which `raytp bench` divides the time of these workloads for `step_ms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured case: the steps that it took, and the seconds."""

    seconds: float
    num_requests: int
    sizes: ShardSizes
    block_size: int
    steps: BenchSteps


def fit(records: Sequence[Record], models: Mapping[str, ModelConfig], rates: tuple[float, float]) -> Coefficients:
    """The coefficients for the GPU that all records are of.

    `models`: by the records' names. `rates`: bytes and operations a second that the GPU reaches at best. Raises
    ConfigError if the records hold too little.
    """
    records = [record for record in records if record["workload"] in FITTED_WORKLOADS]
    if {record["workload"] for record in records} != set(FITTED_WORKLOADS):
        raise ConfigError(f"a fit needs records of the workloads {', '.join(FITTED_WORKLOADS)}: run raytp bench -w all")
    samples = [samples_of(record, models[record["model"]]) for record in records]
    costs = _fit_driver(records, samples)
    costs["memory_bytes"] = min(_memory_bytes(record, models[record["model"]]) for record in records)
    return _fit_gpu(list(itertools.chain(*samples)), replace(_NOTHING, **costs), rates)


def samples_of(record: Record, model: ModelConfig) -> list[Sample]:
    """The cases of one record, each with its measured seconds."""
    return [
        Sample(
            seconds=seconds,
            num_requests=len(case.prompts),
            sizes=shard_sizes(model, record["tensor_parallel_size"]),
            block_size=record["engine"]["block_size"],
            steps=steps_of(case, scheduler_config(record)),
        )
        for case, seconds in zip(_cases(record, model), _seconds(record), strict=True)
    ]


def predicted_s(sample: Sample, coefficients: Coefficients) -> float:
    """What the model says that a case takes if the GPU never waits for the driver."""
    times = StepTimes(coefficients, sample.sizes, sample.block_size)
    gpu_s = float(np.sum(times.gpu_s(sample.steps.load, sample.steps.num_used_blocks)))
    return gpu_s + coefficients.request_s * sample.num_requests


def scheduler_config(record: Record) -> SchedulerConfig:
    """The limits that a record's engine worked within."""
    names = ("num_kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    return SchedulerConfig(**{name: record["engine"][name] for name in names}, vocab_size=_UNLIMITED_VOCABULARY)


def _cases(record: Record, model: ModelConfig) -> list[Case]:
    num_prompts = None if record["workload"] == "latency" else record["num_prompts"]
    cases = make_cases(record["workload"], num_prompts, model.vocab_size)
    return [case for case in cases if str(len(case.prompts)) in record["step_ms"]]


def _seconds(record: Record) -> list[float]:
    num_tokens = _TOKENS_OUT.get(record["workload"])
    if num_tokens is None:
        return [record["seconds"]]
    return [step_ms * num_tokens / 1e3 for step_ms in record["step_ms"].values()]


def _memory_bytes(record: Record, model: ModelConfig) -> float:
    sizes, engine = shard_sizes(model, record["tensor_parallel_size"]), record["engine"]
    return sizes.resident_bytes + float(engine["num_kv_blocks"] * engine["block_size"] * sizes.kv_bytes_per_token)


def _fit_driver(records: Sequence[Record], samples: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """CPU time of the driver's step loop: for each step, row and prompt token."""
    quantities = []
    for record, cases in zip(records, samples, strict=True):
        num_steps = sum(case.steps.num_steps for case in cases)
        num_rows = sum(np.sum(case.steps.load.num_rows) for case in cases)
        num_prompt_tokens = sum(np.sum(case.steps.load.num_prompt_tokens) for case in cases)
        seconds = record["driver_us_per_step"] * 1e-6 * num_steps
        quantities.append(np.array([num_steps, num_rows, num_prompt_tokens]) / seconds)
    return dict(zip(_DRIVER, solve_nonnegative(np.array(quantities), np.ones(len(records))).tolist(), strict=True))


def _fit_gpu(samples: Sequence[Sample], known: Coefficients, rates: tuple[float, float]) -> Coefficients:
    """All that is still zero or infinite in `known`."""
    seconds = np.array([sample.seconds for sample in samples])
    unit = np.array([[predicted_s(sample, replace(known, **{name: 1.0})) for name in _LINEAR] for sample in samples])
    best_error, best = math.inf, known
    for share_of_bytes, share_of_flop in itertools.product(_SHARES_OF_BYTES, _SHARES_OF_FLOP):
        roofline = replace(
            known, bytes_per_s=float(rates[0] * share_of_bytes), flop_per_s=float(rates[1] * share_of_flop)
        )
        rest = seconds - np.array([predicted_s(sample, roofline) for sample in samples])
        values = solve_nonnegative(unit / seconds[:, None], rest / seconds)
        error = _squares((unit @ values - rest) / seconds)
        if error < best_error:
            best_error, best = error, replace(roofline, **dict(zip(_LINEAR, values.tolist(), strict=True)))
    return best


def _squares(errors: Floats) -> float:
    return float((errors**2).sum())
