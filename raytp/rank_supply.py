"""Keeps an engine in ranks: one rank group at a time, and another one when it has died.

Owns the epoch, which tells the groups apart, the present group, and its size: where the cluster has no room for
tensor_parallel_size ranks in time, it is smaller, down to min_tensor_parallel_size. Called by `raytp.driver`, and by
`raytp.succession` when ranks fail. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from raytp.config import EngineConfig
from raytp.errors import (
    ChannelError,
    EngineClosedError,
    KVCacheMemoryError,
    PlacementError,
    RankDiedError,
    RankFailedError,
    RaytpError,
    RendezvousError,
)
from raytp.outputs import Failure, Recovery
from raytp.placement import has_room
from raytp.rank_group import RankGroup, resource_of
from raytp.transport import Transport
from workers.config import LoadReport, WorkerConfig

logger = logging.getLogger(__name__)

StatusCallback = Callable[[str, float], None]

_PASSING = (RankDiedError, RendezvousError)
"""What ends a start and may go better another time."""
_PASSING_AFTER_RUNNING = (RankFailedError, RendezvousError, ChannelError, KVCacheMemoryError)
"""The same, of ranks whose like have run before: the memory of those may not have been free yet."""
_SHORT_TIMEOUT_S = 10.0
"""For room that should be there: for fewer ranks than the cluster had no room for, or for more, where it was seen."""


class RankSupply:
    """The `raytp.engine.RankSource` of a driver. `start` comes first, `close` last; `close` may come at any time."""

    def __init__(self, config: EngineConfig, worker_config: WorkerConfig, on_status: StatusCallback) -> None:
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
        self._failures: list[tuple[float, str]] = []
        self._failed_starts: list[tuple[float, str]] = []
        """Since there were ranks last."""
        self.recoveries: list[Recovery] = []
        self._min_ranks = config.min_tensor_parallel_size or config.tensor_parallel_size
        self.num_ranks = config.tensor_parallel_size
        """Of the present group."""
        self.group = RankGroup(config, worker_config, epoch=0)

    def start(self) -> tuple[Transport, list[LoadReport]]:
        """Build the rank group; ranks that die on the way are built again, up to max_restarts times.

        Raises RaytpError: what a rank raised, or every cause if all attempts have failed.
        """
        return self._start(_PASSING)

    def _start(self, passing: tuple[type[RaytpError], ...]) -> tuple[Transport, list[LoadReport]]:
        causes: list[str] = []
        self._failed_starts = []
        while True:
            began_at = time.monotonic()
            try:
                return self.group.start(self._on_status)
            except PlacementError as error:
                if self.num_ranks == self._min_ranks:
                    raise
                logger.warning("%s\nThe ranks are started as %d, not %d.", error, self.num_ranks - 1, self.num_ranks)
                self._replace_group(num_ranks=self.num_ranks - 1)
            except passing as error:
                took_s = time.monotonic() - began_at
                if isinstance(error, RendezvousError) and took_s >= self._config.startup_timeout_s:
                    self.group.close()
                    raise  # ranks that do not reach one another would not another time either
                causes.append(str(error))
                self._failed_starts.append((time.time(), str(error)))
                if len(causes) > self._config.max_restarts:
                    self.group.close()
                    listed = "\n".join(f"attempt {number}: {cause}" for number, cause in enumerate(causes, start=1))
                    raise RankDiedError(
                        f"the ranks died {len(causes)} times while they started (max_restarts="
                        f"{self._config.max_restarts}):\n{listed}"
                    ) from error
                logger.warning("the ranks are started again: %s", error)
                self._replace_group()

    def examine(self, failure: RaytpError) -> Failure:
        """See `raytp.engine.RankSource`."""
        self._noticed_at = time.time()
        found = self.group.examine(failure)
        self._failures.append((self._noticed_at, found.report))
        return found

    def failures(self, max_age_s: float) -> list[str]:
        """The reports of the last `max_age_s`, oldest first; the ranks may not have been replaced yet."""
        since = time.time() - max_age_s
        return [report for noticed_at, report in self._failures if noticed_at >= since]

    def rebuild(self, report: str) -> tuple[Transport, int]:
        """See `raytp.engine.RankSource`."""
        before = self.num_ranks
        self._replace_group(num_ranks=self._most_with_room())
        transport, reports = self._start(_PASSING_AFTER_RUNNING)
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
        resource, strategy = resource_of(self._worker_config), self._config.placement_strategy
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

    def _replace_group(self, num_ranks: int | None = None) -> None:
        """Kill the present ranks; the next group, if it is to have as many, takes over their placement group."""
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine has been shut down")
            config = self._config
            if num_ranks in (None, self.num_ranks):
                self.group.kill_ranks()
                placement_group = self.group.give_away_placement()
            else:
                self.group.close()
                placement_group = None
                self.num_ranks = num_ranks
                if num_ranks > self._min_ranks:
                    timeout_s = min(config.placement_timeout_s, _SHORT_TIMEOUT_S)
                    config = replace(config, placement_timeout_s=timeout_s)
            self._epoch += 1
            worker_config = replace(self._worker_config, world_size=self.num_ranks)
            self.group = RankGroup(config, worker_config, self._epoch, placement_group)
