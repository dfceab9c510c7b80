"""Keeps an engine in ranks: one rank group at a time, and another one when it has died.

Owns the epoch, which tells the groups apart, the present group, and its size: where the cluster has no room for
tensor_parallel_size ranks in time, it is smaller, down to min_tensor_parallel_size. Called by `raytp.driver`, and by
`raytp.succession` when ranks fail. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace

from raytp.config import EngineConfig
from raytp.errors import (
    EngineClosedError,
    PlacementError,
    RankDiedError,
    RaytpError,
    RendezvousError,
    RendezvousTimeoutError,
)
from raytp.outputs import Failure, ProgressCallback, Recovery
from raytp.placement import has_room, resource_of
from raytp.rank_group import RankGroup
from raytp.transport import Transport
from workers.config import LoadReport, WorkerConfig

logger = logging.getLogger(__name__)

_SHORT_TIMEOUT_S = 10.0
"""For room that should be there: for fewer ranks than the cluster had no room for, or for more, where it was seen."""
_GROW_AGAIN_S = 300.0
"""After more ranks could not be started although there was room: each attempt costs those that are at work."""
_MAX_REMEMBERED = 1000
"""Reports of what has happened: an engine may live for months."""


class RankSupply:
    """A driver's `raytp.succession.RankSource`. `start` comes first, `close` last; `close` may come at any time."""

    def __init__(self, config: EngineConfig, worker_config: WorkerConfig, on_status: ProgressCallback) -> None:
        """`on_status` is told how far a start has come, each time that ranks are built."""
        self._config = config
        self._worker_config = worker_config
        self._on_status = on_status
        self._lock = threading.Lock()
        """Nobody puts a group in place of one that is being closed."""
        self._is_closed = False
        self._epoch = 0
        self._noticed_at = 0.0
        """When the latest failure was."""
        self._failures: deque[tuple[int, float, str]] = deque(maxlen=_MAX_REMEMBERED)
        """Number, time and report of each."""
        self._num_failures = 0
        self._failed_starts: list[tuple[float, str]] = []
        """Since there were ranks last."""
        self.recoveries: deque[Recovery] = deque(maxlen=_MAX_REMEMBERED)
        """The latest ones."""
        self._min_ranks = config.min_tensor_parallel_size or config.tensor_parallel_size
        self.num_ranks = config.tensor_parallel_size
        """Of the present group."""
        self._proven_ranks = config.tensor_parallel_size
        """Of the latest group that was ready; at first, what was asked for."""
        self._has_run = False
        self._grow_not_before = 0.0
        self.group = RankGroup(config, worker_config, epoch=0)

    def start(self) -> tuple[Transport, list[LoadReport]]:
        """Build the rank group; what may go better another time is tried again, up to max_restarts times.

        Raises RaytpError: what a rank raised, or every cause if all attempts have failed.
        """
        causes: list[str] = []
        self._failed_starts = []
        while True:
            try:
                started = self.group.start(self._on_status)
            except RaytpError as error:
                if isinstance(error, EngineClosedError):
                    raise
                if self._reduce(error):
                    continue
                if not self._may_pass(error):
                    self.group.close()
                    raise
                causes.append(str(error))
                self._failed_starts.append((time.time(), str(error)))
                self._check_attempts(causes, error)
                logger.warning("the ranks are started again: %s", error)
                self._replace_group(self.num_ranks)
            else:
                self._has_run, self._proven_ranks = True, self.num_ranks
                return started

    def _reduce(self, error: RaytpError) -> bool:
        """Whether fewer ranks are to be started than could not be: they need less room, or have run before."""
        if isinstance(error, PlacementError) and self.num_ranks > self._min_ranks:
            num_ranks = self.num_ranks - 1
        elif self.num_ranks > self._proven_ranks:
            num_ranks = self._proven_ranks
            self._grow_not_before = time.monotonic() + _GROW_AGAIN_S
        else:
            return False
        logger.warning("%s\nThe ranks are started as %d, not %d.", error, num_ranks, self.num_ranks)
        self._replace_group(num_ranks)
        return True

    def _may_pass(self, error: RaytpError) -> bool:
        """Whether a start that has failed may go better another time: after a group like it has run, whatever failed.

        The memory of the ranks before may not have been free yet, or a node's disk away for a moment. At first only
        deaths count, and not ranks that have waited for one another in vain: they do not reach each other.
        """
        if isinstance(error, PlacementError):
            return False  # it has waited as long as the user allows
        if self._has_run:
            return True
        return isinstance(error, RankDiedError | RendezvousError) and not isinstance(error, RendezvousTimeoutError)

    def _check_attempts(self, causes: list[str], error: RaytpError) -> None:
        max_restarts = self._config.max_restarts
        if len(causes) <= max_restarts:
            return
        self.group.close()
        listed = "\n".join(f"attempt {number}: {cause}" for number, cause in enumerate(causes, start=1))
        raise RankDiedError(
            f"the ranks could not be started, {len(causes)} times in a row (max_restarts={max_restarts}):\n{listed}"
        ) from error

    def examine(self, failure: RaytpError) -> Failure:
        """See `raytp.succession.RankSource`."""
        self._noticed_at = time.time()
        found = self.group.examine(failure)
        self._failures.append((self._num_failures, self._noticed_at, found.report))
        self._num_failures += 1
        return found

    def failures(self, max_age_s: float, after: int) -> list[tuple[int, str]]:
        """Number and report of those later than number `after` in the last `max_age_s`, oldest first.

        The ranks may not have been replaced yet.
        """
        since = time.time() - max_age_s
        return [(number, report) for number, at, report in self._failures if number > after and at >= since]

    def rebuild(self, report: str) -> tuple[Transport, int]:
        """See `raytp.succession.RankSource`."""
        before = self.num_ranks
        self._replace_group(self._most_with_room())
        transport, reports = self.start()
        if self.num_ranks != before:
            logger.warning("the ranks are %d now, where %d were", self.num_ranks, before)
        self.recoveries.append(
            Recovery(
                epoch=self._epoch,
                report=report,
                noticed_at=self._noticed_at,
                rebuild_s=time.time() - self._noticed_at,
                num_ranks=self.num_ranks,
                failed_starts=tuple(self._failed_starts),
            )
        )
        self._on_status("ready", 1.0)
        return transport, min(each.num_kv_blocks for each in reports)

    def room_for_more(self) -> str | None:
        """See `raytp.succession.RankSource`."""
        most = self._most_with_room()
        if most == self.num_ranks:
            return None
        self._noticed_at = time.time()
        return f"there is room for {most} ranks, where {self.num_ranks} are at work: they are built again"

    def _most_with_room(self) -> int:
        """As many ranks as there are, or more, where some are missing and the cluster has room for them now."""
        if time.monotonic() < self._grow_not_before:
            return self.num_ranks
        resource, strategy = resource_of(self._worker_config.device), self._config.placement_strategy
        for num_ranks in range(self._config.tensor_parallel_size, self.num_ranks, -1):
            if has_room(num_ranks, resource, strategy, self.group.placement_group):
                return num_ranks
        return self.num_ranks

    def reach(self, point: str) -> None:
        """See `raytp.succession.RankSource`."""
        if any(fault.point == point for fault in self._config.faults):
            self.group.reach(point)

    def close(self) -> None:
        """Kill the ranks and give their resources back. May be called twice."""
        with self._lock:
            self._is_closed = True
        self.group.close()

    def _replace_group(self, num_ranks: int) -> None:
        """Kill the present ranks; the next group, if it is to have as many, takes over their placement group."""
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine has been shut down")
            if num_ranks == self.num_ranks:
                self.group.kill_ranks()
                placement_group = self.group.give_away_placement()
            else:
                self.group.close()
                placement_group = None
                self.num_ranks = num_ranks
            config = replace(self._config, placement_timeout_s=self._placement_timeout_s())
            self._epoch += 1
            worker_config = replace(self._worker_config, world_size=self.num_ranks)
            self.group = RankGroup(config, worker_config, self._epoch, placement_group)

    def _placement_timeout_s(self) -> float:
        """As many ranks as there were wait for the autoscaler, and so do the fewest: there is nothing else to do."""
        timeout_s = self._config.placement_timeout_s
        is_last_resort = self.num_ranks in (self._proven_ranks, self._min_ranks)
        return timeout_s if is_last_resort else min(timeout_s, _SHORT_TIMEOUT_S)
