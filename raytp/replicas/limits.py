"""How many replicas there may be, as users write it. Called by `raytp.batch_job`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from raytp.errors import ConfigError
from scheduler.errors import shown

_TEXT = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")
_MAX = 10**6


@dataclass(frozen=True, slots=True)
class Limits:
    """At least `least` replicas are asked for, at most `most`. Raises ConfigError."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= _MAX:
            raise ConfigError(f"replicas {self.least}:{self.most}: MIN must be at least 1, and MAX at least MIN")


def read_limits(replicas: Any) -> Limits:
    """N, "N", "MIN:MAX" or (MIN, MAX); N alone is N:N. Raises ConfigError."""
    if isinstance(replicas, str) and (match := _TEXT.fullmatch(replicas.strip())):
        return Limits(int(match[1]), int(match[2] or match[1]))
    both = replicas if isinstance(replicas, (tuple, list)) else (replicas, replicas)
    if len(both) != 2 or not all(isinstance(each, int) and not isinstance(each, bool) for each in both):
        raise ConfigError(f'replicas={shown(replicas)} must be a number, or "MIN:MAX"')
    return Limits(*both)
