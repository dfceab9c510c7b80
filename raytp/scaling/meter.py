"""Estimates of what rows cost and what replicas can do, for `Observation`. Fed by whoever owns the replicas."""

from __future__ import annotations

_WEIGHT = 0.3
"""Of the newest interval."""


class RateMeter:
    """Running estimates, from one interval between two decisions to the next."""

    def __init__(self) -> None:
        self.tokens_per_s_per_replica: float | None = None
        self.arrival_rows_per_s = 0.0

    def record(self, *, tokens_per_s: float, was_saturated: bool, arrivals: int, interval_s: float) -> None:
        """What happened in an interval.

        `tokens_per_s`: mean of the replicas that were ready all through it. `was_saturated`: rows waited all the while,
        so that the replicas did what they can; otherwise they did at least that much, and the estimate never falls.
        """
        old = self.tokens_per_s_per_replica
        if tokens_per_s > 0:
            if old is None:
                self.tokens_per_s_per_replica = tokens_per_s
            elif was_saturated:
                self.tokens_per_s_per_replica = old + _WEIGHT * (tokens_per_s - old)
            else:
                self.tokens_per_s_per_replica = max(old, tokens_per_s)
        self.arrival_rows_per_s += _WEIGHT * (arrivals / interval_s - self.arrival_rows_per_s)


def mean_tokens_per_row(num_tokens: int, num_finished: int) -> float | None:
    """Tokens of all rows, unfinished ones too, over the finished: short rows finish first and mislead otherwise.

    It is the estimate of greatest likelihood for lengths that are exponentially distributed. None before a row is done.
    """
    return num_tokens / num_finished if num_finished else None
