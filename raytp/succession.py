"""From ranks that have died, or are too few, to those that take their place, while the step loop goes on.

Owns the count of deaths in a row, and the thread that waits for new ranks. Used by `raytp.engine` alone, on its thread;
the ranks come from a `RankSource`, which is `raytp.rank_supply`. Knows nothing of sequences.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from typing import Protocol, TypeAlias

from raytp.errors import EngineError
from raytp.outputs import Failure
from raytp.transport import Transport
from scheduler.errors import RaytpError

_MAX_TRIALS = 32
"""Deaths in a row for which one request may be to blame before it is the ranks themselves: of sixteen, tried twice."""
_SETTLED_S = 60.0
"""Ranks that die with nothing to do after so long have not died in a row: an engine may idle for months."""
_LOOK_FOR_ROOM_EVERY_S = 5.0
NewRanks: TypeAlias = tuple[Transport, int]
"""The way to new ranks, and their num_kv_blocks."""


class RankSource(Protocol):
    """Where new ranks come from when the old ones have died."""

    def examine(self, failure: RaytpError) -> Failure:
        """Everything that can be found out about a failure of the present ranks. Takes seconds at most."""
        ...

    def rebuild(self, report: str) -> NewRanks:
        """Kill what is left of the present ranks, and start others.

        Takes as long as it needs. Raises RaytpError with every cause if it cannot be done.
        """
        ...

    def room_for_more(self) -> str | None:
        """That there could be more ranks than there are, as a report; None if not. Does not wait."""
        ...

    def reach(self, point: str) -> None:
        """Let the present ranks have the faults that were asked for at a point that they do not see themselves."""
        ...


class Succession:
    """New ranks, one group at a time."""

    def __init__(self, ranks: RankSource, max_restarts: int) -> None:
        """`max_restarts`: of ranks that have not finished a step, one after another, before there are no others."""
        self._ranks = ranks
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._num_trials = 0
        self._num_accidents = 0
        """All since the last step that was finished."""
        self._ready_at = time.monotonic()
        """When the present ranks came."""
        self._rebuilding: Future[NewRanks] | None = None
        self._looked_for_room_at = time.monotonic()

    @property
    def is_under_way(self) -> bool:
        """Whether new ranks are being built."""
        return self._rebuilding is not None

    def count_step(self) -> None:
        """The present ranks have finished a step: they are of use."""
        self._num_restarts = self._num_trials = self._num_accidents = 0

    def is_excused(self, failure: Failure) -> bool:
        """Whether no request can be to blame: an accident, and the first in a row, since one may exhaust a memory."""
        self._num_accidents += failure.is_accident
        return failure.is_accident and self._num_accidents == 1

    def count_death(self, report: str, *, was_trial: bool, was_excused: bool, was_idle: bool) -> None:
        """`was_trial`: one request alone was there. Raises EngineError when it has been often enough."""
        if was_idle and time.monotonic() - self._ready_at > _SETTLED_S:
            self._num_restarts = self._num_trials = self._num_accidents = 0
        self._num_restarts += not was_trial and not was_excused
        self._num_trials += was_trial
        if self._num_restarts > self._max_restarts or self._num_trials > _MAX_TRIALS:
            raise EngineError(
                f"the ranks died {self._num_restarts + self._num_trials} times in a row before they had finished "
                f"a step (max_restarts={self._max_restarts}), {self._num_trials} of them with one request alone: "
                f"{report}"
            )

    def room_for_more(self) -> str | None:
        """See `RankSource`; asks every few seconds."""
        if time.monotonic() - self._looked_for_room_at < _LOOK_FOR_ROOM_EVERY_S:
            return None
        self._looked_for_room_at = time.monotonic()
        return self._ranks.room_for_more()

    def begin(self, report: str) -> None:
        """Build new ranks, in a thread of its own."""
        self._rebuilding = Future()
        threading.Thread(
            target=self._fulfil, args=(self._rebuilding, report), name="raytp-rebuild", daemon=True
        ).start()

    def take(self) -> NewRanks | None:
        """The new ranks, once they are ready. Raises what has come in between."""
        if self._rebuilding is None or not self._rebuilding.done():
            return None
        rebuilt, self._rebuilding = self._rebuilding, None
        self._ready_at = time.monotonic()
        return rebuilt.result()

    def close(self) -> None:
        """Tell ranks that are ready, and that nobody has taken, to end."""
        with contextlib.suppress(Exception):
            untaken = self.take()
            if untaken is not None:
                untaken[0].close()

    def _fulfil(self, future: Future[NewRanks], report: str) -> None:
        try:
            future.set_result(self._ranks.rebuild(report))
        except BaseException as error:
            future.set_exception(error)
