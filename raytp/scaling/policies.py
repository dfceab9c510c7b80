"""The policies that come with raytp. Each is a value that can be called with an observation, and holds no state.

Hysteresis is part of a policy: growth happens at once, since rows wait, but a replica is given up only if the others
could do `_SLACK` times the present work without it, and not soon after a change, since giving up and starting again
costs a start-up. Called by `Scaler`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from raytp.errors import ConfigError
from raytp.scaling.observation import Observation

_SLACK = 1.25
"""How much more work the smaller number of replicas must be able to do before it is chosen."""
_MIN_HOLD_S = 30.0
"""How long a target stays at least before it shrinks; if starting a replica takes longer, so long."""
_SAFETY = 1.15
"""How much more work a deadline policy reckons with than it sees: rates and lengths are estimates."""
_ROUNDING = 1e-4
"""Of a replica: less is nothing, so that an arrival rate that fades is 0 after some minutes."""
_PLENTY = 1e9
"""Replicas: more than any limit. Rows over very few seconds are infinitely many."""


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Always the same number; None is as many as are allowed."""

    num_replicas: int | None = None

    def __call__(self, seen: Observation) -> int:
        """The number, whatever is seen."""
        return seen.max_replicas if self.num_replicas is None else self.num_replicas


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Keep up with what arrives, and have the rows that wait started within `drain_s`:

    replicas = (arrivals per second + rows waiting / drain_s) / rows per second of a replica
    """

    drain_s: float

    def __post_init__(self) -> None:
        _check_positive("drain_s", self.drain_s)

    def __call__(self, seen: Observation) -> int:
        """The number that the formula gives, with hysteresis; before rates are known one, if there is a row."""
        rate = seen.rows_per_s_per_replica
        if rate is None:
            return _first(seen)
        load = (seen.arrival_rows_per_s + seen.rows_waiting / self.drain_s) / rate
        at_least = 1 if seen.rows_waiting else 0
        return _with_hysteresis(seen, max(at_least, _ceil(load)), max(at_least, _ceil(load * _SLACK)))


@dataclass(frozen=True, slots=True)
class DeadlinePolicy:
    """Finish by `finish_by_s`, in seconds since the job began, with as few replicas as can do it.

    Work takes the same GPU time on few replicas as on many, but each start-up and each tail of half-empty steps costs
    more. So the number is the least n with

        rows waiting * safety <= rows per second of a replica * (ready * left + (n - ready) * (left - start-up))

    where `left` ends one row's time before the deadline, for the last rows to finish. More than the rows that wait can
    fill are never asked for, however late it is. While rows run or arrive, one replica stays.
    """

    finish_by_s: float

    def __post_init__(self) -> None:
        _check_positive("finish_by_s", self.finish_by_s)

    def __call__(self, seen: Observation) -> int:
        """The least number that is in time, with hysteresis; before rates are known one, if there is a row."""
        rate = seen.rows_per_s_per_replica
        if rate is None:
            return _first(seen)
        if seen.rows_waiting == 0:
            at_least = 1 if seen.rows_running or _ceil(seen.arrival_rows_per_s / rate) else 0
            return _with_hysteresis(seen, at_least, at_least)
        return _with_hysteresis(seen, self._least(seen, rate, _SAFETY), self._least(seen, rate, _SAFETY * _SLACK))

    def _least(self, seen: Observation, rate: float, safety: float) -> int:
        rows = seen.rows_waiting * safety
        left_s = self.finish_by_s - seen.now_s - seen.rows_per_replica / rate
        rows_of_ready = rate * max(0.0, left_s) * seen.num_ready
        if rows <= rows_of_ready:
            return max(1, _ceil(rows / (rate * left_s)))
        num_filled = -(-seen.rows_waiting // seen.rows_per_replica)
        rows_of_each_new = rate * max(0.0, left_s - seen.startup_s)
        if rows - rows_of_ready > num_filled * rows_of_each_new:
            return seen.num_ready + num_filled
        return max(1, seen.num_ready + _ceil((rows - rows_of_ready) / rows_of_each_new))


def _first(seen: Observation) -> int:
    """One replica, to learn from, and no fewer than there are while there are rows.

    It stays so for a job with fewer rows than a replica runs at once, for which one is enough.
    """
    if seen.rows_waiting or seen.rows_running:
        return max(seen.target, 1)
    at_least = min(seen.target, 1 if _ceil(seen.arrival_rows_per_s) else 0)
    return _with_hysteresis(seen, at_least, at_least)


def _with_hysteresis(seen: Observation, wanted: int, wanted_with_slack: int) -> int:
    if wanted >= seen.target:
        return wanted
    if seen.seconds_since_change < max(_MIN_HOLD_S, seen.startup_s):
        return seen.target
    return min(seen.target, wanted_with_slack)


def _ceil(value: float) -> int:
    return math.ceil(min(value, _PLENTY) - _ROUNDING)


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value:g} must be a number of seconds above 0")
