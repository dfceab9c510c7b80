"""Counts over time of several runs on one axis: their mean, and the least and the most. Called by `pictures`.

A run counts as 0 after its last request has ended and its last tick is past: ticks may go on while idle nodes leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raytp.simulator.results import Results, Tick
from raytp.simulator.step_time import Floats

_NUM_POINTS = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """All (n,)."""

    times_s: Floats
    mean: Floats
    least: Floats
    most: Floats


def time_axis(runs: Sequence[Results]) -> Floats:
    """(n,) seconds, from the beginning to the end of the longest run."""
    return np.linspace(0.0, max(map(_end_s, runs), default=0.0) or 1.0, _NUM_POINTS)


def count_curve(runs: Sequence[Results], field: str, times_s: Floats) -> Curve:
    """Of one of `Tick`'s counts, which hold from their tick to the next."""
    return _over_runs([_held(run, field, times_s) for run in runs], times_s)


def rate_curve(runs: Sequence[Results], times_s: Floats) -> Curve:
    """Of tokens per second, which are those of the time from the tick before to their own."""
    return _over_runs([_leading(run, "tokens_per_s", times_s) for run in runs], times_s)


def arrival_curve(runs: Sequence[Results], times_s: Floats, num_bins: int = 60) -> Curve:
    """Requests that arrive in a second, in bins of equal length."""
    edges = np.linspace(0.0, times_s[-1], num_bins + 1)
    bins = np.clip(np.searchsorted(edges, times_s, side="right") - 1, 0, num_bins - 1)
    counts = [np.histogram([one.arrival_s for one in run.requests], edges)[0] for run in runs]
    return _over_runs([(count / edges[1])[bins] for count in counts], times_s)


def _held(run: Results, field: str, times_s: Floats) -> Floats:
    at_s, values = _ticks(run.ticks, field)
    latest = np.searchsorted(at_s, times_s, side="right")
    return np.where(times_s < _end_s(run), values[latest], 0.0)


def _end_s(run: Results) -> float:
    return max(run.seconds, run.ticks[-1].now_s if run.ticks else 0.0)


def _leading(run: Results, field: str, times_s: Floats) -> Floats:
    at_s, values = _ticks(run.ticks, field)
    following = np.searchsorted(at_s, times_s, side="left")
    return np.append(values[1:], 0.0)[following]


def _ticks(ticks: Sequence[Tick], field: str) -> tuple[Floats, Floats]:
    """(times, 0 and then the values)"""
    values = [0.0, *(float(getattr(tick, field)) for tick in ticks)]
    return np.array([tick.now_s for tick in ticks], dtype=np.float64), np.array(values, dtype=np.float64)


def _over_runs(values: Sequence[Floats], times_s: Floats) -> Curve:
    stacked = np.stack(values)
    return Curve(times_s=times_s, mean=stacked.mean(axis=0), least=stacked.min(axis=0), most=stacked.max(axis=0))
