"""Estimates of what rows cost and what replicas can do, for `Observation`. Fed by whoever owns the replicas.

Estimates of rates decay with time, whatever the intervals are: n intervals of t seconds weigh as much as one of n * t.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_TAU_S = -5.0 / math.log(0.7)
"""How long ago a moment's weight has fallen to 1/e: the last 5 seconds weigh 0.3."""
_FORGOTTEN_S = 60.0
"""After so long without a row none is expected. The last hundredth of a rate would keep a replica for minutes."""
_NUM_STARTS = 5
"""So many of the latest count."""
_MAX_WAIT_S = 300.0
"""A new node comes in less. Who waits for room longer waits for others to go, and the next may wait for nobody."""
_FIRST_START_S = 60.0
"""A guess, until a replica has been started."""


class RateMeter:
    """What a replica can do, from one interval to the next."""

    def __init__(self) -> None:
        self.tokens_per_s_per_replica: float | None = None

    def record(self, *, tokens_per_s: float, was_saturated: bool, interval_s: float) -> None:
        """What happened in an interval.

        `tokens_per_s`: mean of the replicas that were ready all through it. `was_saturated`: rows waited all the while,
        so that the replicas did what they can; otherwise they did at least that much, and the estimate never falls.
        """
        old = self.tokens_per_s_per_replica
        if tokens_per_s <= 0:
            return
        if old is None:
            self.tokens_per_s_per_replica = tokens_per_s
        elif was_saturated:
            self.tokens_per_s_per_replica = old + _weight(interval_s) * (tokens_per_s - old)
        else:
            self.tokens_per_s_per_replica = max(old, tokens_per_s)


class ArrivalMeter:
    """How many rows come, from one interval to the next."""

    def __init__(self) -> None:
        self.rows_per_s = 0.0
        self._silent_s = 0.0

    def record(self, num_rows: int, interval_s: float) -> None:
        """So many came in an interval."""
        self.rows_per_s += _weight(interval_s) * (num_rows / interval_s - self.rows_per_s)
        self._silent_s = 0.0 if num_rows else self._silent_s + interval_s
        if self._silent_s >= _FORGOTTEN_S:
            self.rows_per_s = 0.0


class StartMeter:
    """How long it takes until a replica that is asked for is ready: what was typical of the latest."""

    def __init__(self) -> None:
        self._starting_s: deque[float] = deque(maxlen=_NUM_STARTS)
        self._waiting_s: deque[float] = deque(maxlen=_NUM_STARTS)

    def record(self, *, starting_s: float, waiting_s: float) -> None:
        """A replica has become ready: it waited for room so long, and took so long besides."""
        self._starting_s.append(starting_s)
        self._waiting_s.append(min(waiting_s, _MAX_WAIT_S))

    @property
    def startup_s(self) -> float:
        """The median start-up and the median wait; 60 s while none is known."""
        return median(self._starting_s) + median(self._waiting_s) if self._starting_s else _FIRST_START_S


def mean_tokens_per_row(num_tokens: int, num_finished: int) -> float | None:
    """Tokens of all rows, unfinished ones too, over the finished: short rows finish first and mislead otherwise.

    It is the estimate of greatest likelihood for lengths that are exponentially distributed. None before a row is done.
    """
    return num_tokens / num_finished if num_finished else None


def _weight(interval_s: float) -> float:
    """Of the newest interval."""
    return -math.expm1(-interval_s / _TAU_S)
