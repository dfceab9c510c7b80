"""What a simulation found: times of requests, counts over time, GPU time. Made by `raytp.simulator.cluster`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

Json: TypeAlias = dict[str, Any]
_PERCENTILES = (50, 90, 99)
_SECONDS_PER_HOUR = 3600.0


@dataclass(slots=True)
class RequestTimes:
    """One request's life, in seconds of the simulation."""

    arrival_s: float
    output_tokens: int
    first_token_s: float | None = None
    finish_s: float | None = None
    error: str | None = None
    """Why it could not be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The cluster after one decision of the policy."""

    now_s: float
    wanted: int
    """Replicas that the policy asked for."""
    pending: int
    """Replicas that wait for a place, or start."""
    ready: int
    nodes: int
    rows_waiting: int
    """Rows that no replica has taken."""
    rows_running: int
    """Rows that replicas have taken."""
    tokens_per_s: float
    """Output tokens, since the tick before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Of one run."""

    requests: Sequence[RequestTimes]
    """In the order of the input."""
    ticks: Sequence[Tick]
    seconds: float
    """Until the last request had ended."""
    gpu_seconds: float
    """Of all nodes, while they were there: what is paid for."""
    busy_gpu_seconds: float
    """In which a step ran."""
    num_steps: int
    """Of all schedulers."""

    @property
    def output_tokens_per_s(self) -> float:
        """Of requests that were served, from the beginning to the end."""
        tokens = sum(one.output_tokens for one in self.requests if one.error is None)
        return tokens / self.seconds if self.seconds else 0.0

    def refusal(self) -> str | None:
        """How many requests could not be served, and why the first of them could not, if there are any."""
        refused = [one for one in self.requests if one.error is not None]
        if not refused:
            return None
        whose = "" if len(refused) == 1 else f"; the first, which arrives after {refused[0].arrival_s:g} s"
        return f"refused {len(refused):,} of {len(self.requests):,} requests{whose}: {refused[0].error}"

    def latencies(self) -> dict[str, dict[str, float]]:
        """Percentiles in seconds: `ttft` to the first token, `per_token` between tokens, `end_to_end`."""
        served = [one for one in self.requests if one.error is None]
        first = [(one.first_token_s or 0.0) - one.arrival_s for one in served]
        whole = [(one.finish_s or 0.0) - one.arrival_s for one in served]
        between = [
            (end - start) / (one.output_tokens - 1)
            for one, start, end in zip(served, first, whole, strict=True)
            if one.output_tokens > 1
        ]
        return {"ttft": _percentiles(first), "per_token": _percentiles(between), "end_to_end": _percentiles(whole)}

    def summary(self, gpu_hour_price: float | None = None) -> Json:
        """Everything but the lists, as JSON has it."""
        hours = self.gpu_seconds / _SECONDS_PER_HOUR
        return {
            "seconds": self.seconds,
            "num_requests": len(self.requests),
            "num_failed": sum(one.error is not None for one in self.requests),
            "output_tokens_per_s": self.output_tokens_per_s,
            "latency_s": self.latencies(),
            "peak_replicas": max((tick.ready for tick in self.ticks), default=0),
            "gpu_seconds": self.gpu_seconds,
            "busy_gpu_seconds": self.busy_gpu_seconds,
            "wasted_gpu_seconds": self.gpu_seconds - self.busy_gpu_seconds,
            "num_steps": self.num_steps,
            "cost": None if gpu_hour_price is None else hours * gpu_hour_price,
        }

    def series(self) -> list[Json]:
        """The ticks, as JSON has them."""
        return [asdict(tick) for tick in self.ticks]


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in _PERCENTILES}
