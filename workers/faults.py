"""Faults on purpose, for tests and for those who want to see what happens: the setting `faults`.

A rank that reaches a named point kills or stops itself, raises, is late, or damages what it received. Called by
`workers.worker`; costs nothing where no fault was asked for.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass

from scheduler.errors import ConfigError

POINTS = ("rendezvous", "loading", "warm-up", "prefill", "decode", "frame", "abort", "shutdown")
"""Joining the others; reading weights; after that; before a step with a prompt's tokens; before another step; on
receiving a frame; between the abort of a request and the next step; on being told to end."""
KINDS = ("kill", "stop", "exit", "raise", "delay", "corrupt")
"""SIGKILL; SIGSTOP; exit code 3; an exception; `seconds` of sleep; one bit of a received frame."""
_EXIT_CODE = 3


class InjectedFaultError(Exception):
    """Raised on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Happens once, if not `always`: in this epoch, when this rank reaches the point for the `nth` time.

    Raises ConfigError.
    """

    kind: str
    rank: int
    point: str
    nth: int = 1
    epoch: int = 0
    seconds: float = 1.0
    """Of a delay."""
    always: bool = False
    """A delay may happen each time that the rank reaches the point, in all epochs."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r} is no kind of fault: choose one of {', '.join(KINDS)}")
        if self.point not in POINTS:
            raise ConfigError(f"point={self.point!r} is no point to have a fault at: choose one of {', '.join(POINTS)}")
        if self.rank < 0 or self.nth < 1:
            raise ConfigError(f"rank={self.rank} must be at least 0, and nth={self.nth} at least 1")
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"seconds={self.seconds} must be at least 0 and finite")
        if self.always and (self.kind != "delay" or (self.nth, self.epoch) != (1, 0)):
            raise ConfigError("always is for a delay, and leaves nothing to nth and epoch: leave them out")
        if (self.kind == "corrupt") != (self.point == "frame"):
            raise ConfigError(
                f"a fault of kind {self.kind} cannot happen at {self.point}: corrupt and frame go together"
            )
        if self.kind == "raise" and self.point == "abort":
            raise ConfigError("a rank does nothing at an abort that could raise: choose another kind of fault")


class FaultInjector:
    """The faults of one rank in one epoch."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, epoch: int) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank and (fault.always or fault.epoch == epoch)]
        self._num_reached: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        """Let happen what was asked for here."""
        for fault in self._due(point):
            if self._num_reached[point] == fault.nth:  # what happens always is told once
                _announce(fault)
            if fault.kind == "delay":
                time.sleep(fault.seconds)
            elif fault.kind == "raise":
                raise InjectedFaultError(f"at {point}, as was asked for")
            elif fault.kind == "exit":
                os._exit(_EXIT_CODE)
            else:
                os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)

    def damage(self, data: bytes) -> bytes:
        """A received frame, with a wrong bit if that was asked for."""
        due = self._due("frame")
        if not due:
            return data
        _announce(due[0])
        return data[:-1] + bytes([data[-1] ^ 1])

    def _due(self, point: str) -> list[Fault]:
        if not self._faults:
            return []
        self._num_reached[point] += 1
        num_reached = self._num_reached[point]
        return [fault for fault in self._faults if fault.point == point and (fault.always or fault.nth == num_reached)]


def _announce(fault: Fault) -> None:
    """In the rank's log: when it was, for whoever measures, and that it was on purpose."""
    when = "always" if fault.always else f"in epoch {fault.epoch}"
    what = f"{fault.kind} of rank {fault.rank} {when} at {fault.point}"
    print(f"fault: {what}, as was asked for, {time.time():.3f}", file=sys.stderr, flush=True)
