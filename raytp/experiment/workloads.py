"""The requests of a run: from a trace, all at once, at random, or at random with bursts. Called by `running`."""

from __future__ import annotations

import random
from collections.abc import Iterator

from raytp.experiment.spec import WorkloadSpec
from raytp.simulator.requests import SimulatedRequest, batch, draw_length, poisson, read_trace


def make_requests(workload: WorkloadSpec, seed: int) -> tuple[SimulatedRequest, ...]:
    """By arrival; a function of its arguments, and of a trace not of the seed. Raises ConfigError."""
    if workload.trace is not None:
        return tuple(read_trace(workload.trace))
    lengths = workload.prompt_tokens, workload.output_tokens
    if workload.rate is None:
        return tuple(batch(workload.num_requests, *lengths, seed))
    if workload.burst_rate is None:
        return tuple(poisson(workload.num_requests, workload.rate, *lengths, seed))
    rng = random.Random(seed)
    return tuple(
        SimulatedRequest(
            arrival_s=arrival_s,
            prompt_tokens=draw_length(rng, workload.prompt_tokens),
            output_tokens=draw_length(rng, workload.output_tokens),
        )
        for arrival_s in _arrivals(rng, workload)
    )


def _arrivals(rng: random.Random, workload: WorkloadSpec) -> Iterator[float]:
    """A Poisson process whose rate changes: one of rate 1, with its time stretched.

    Between two arrivals, the integral of the rate is distributed exponentially with mean 1. Cinlar: Introduction to
    Stochastic Processes, 1975, chapter 4.7.
    """
    assert workload.rate is not None
    assert workload.burst_rate is not None
    phases = ((workload.burst_every_s - workload.burst_s, workload.rate), (workload.burst_s, workload.burst_rate))
    now_s, phase, left_s = 0.0, 0, phases[0][0]
    for _ in range(workload.num_requests):
        expected = rng.expovariate(1.0)
        while expected > left_s * phases[phase][1]:
            expected -= left_s * phases[phase][1]
            now_s += left_s
            phase = 1 - phase
            left_s = phases[phase][0]
        step_s = expected / phases[phase][1]
        now_s += step_s
        left_s -= step_s
        yield now_s
