"""Replicas that are slower than others, to start or at every step. Read by `raytp.simulator.fleet`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytp.errors import ConfigError
from raytp.simulator.seconds import check_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """So many seconds more. Raises ConfigError for values out of range."""

    seconds: float
    replica: int | None = None
    """Counted from 0 in the order in which replicas are asked for; None is every replica."""

    def __post_init__(self) -> None:
        check_seconds("delay", self.seconds)
        if self.replica is not None and self.replica < 0:
            raise ConfigError(f"replica={self.replica} must be at least 0, the first that is asked for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """All of a cluster's."""

    start: Sequence[Delay] = ()
    """Of becoming ready, once a replica has its GPUs."""
    step: Sequence[Delay] = ()
    """Of every step."""

    def start_s(self, replica: int | None) -> float:
        """By how much this replica starts later; None: any replica."""
        return _total(self.start, replica)

    def step_s(self, replica: int) -> float:
        """By how much each of this replica's steps is longer."""
        return _total(self.step, replica)


def _total(delays: Sequence[Delay], replica: int | None) -> float:
    return sum(delay.seconds for delay in delays if delay.replica in (None, replica))
