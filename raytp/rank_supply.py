"""Keeps an engine in ranks: one rank group at a time, and another one when it has died.

Owns the epoch, which tells the groups apart, and the present group. Called by `raytp.driver`, and by `raytp.engine`
when ranks fail. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from raytp.config import EngineConfig
from raytp.errors import (
    ChannelError,
    EngineClosedError,
    KVCacheMemoryError,
    RankDiedError,
    RankFailedError,
    RaytpError,
    RendezvousError,
)
from raytp.outputs import Failure, Recovery
from raytp.rank_group import RankGroup
from raytp.transport import Transport
from workers.config import LoadReport, WorkerConfig

logger = logging.getLogger(__name__)

StatusCallback = Callable[[str, float], None]

_PASSING = (RankDiedError, RendezvousError)
"""What ends a start and may go better another time."""
_PASSING_AFTER_RUNNING = (RankFailedError, RendezvousError, ChannelError, KVCacheMemoryError)
"""The same, of ranks whose like have run before: the memory of those may not have been free yet."""


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
        self.recoveries: list[Recovery] = []
        self.group = RankGroup(config, worker_config, epoch=0)

    def start(self) -> tuple[Transport, list[LoadReport]]:
        """Build the rank group; ranks that die on the way are built again, up to max_restarts times.

        Raises RaytpError: what a rank raised, or every cause if all attempts have failed.
        """
        return self._start(_PASSING)

    def _start(self, passing: tuple[type[RaytpError], ...]) -> tuple[Transport, list[LoadReport]]:
        causes: list[str] = []
        while True:
            try:
                return self.group.start(self._on_status)
            except passing as error:
                causes.append(str(error))
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
        self._replace_group()
        transport, reports = self._start(_PASSING_AFTER_RUNNING)
        rebuild_s = time.time() - self._noticed_at
        self.recoveries.append(
            Recovery(epoch=self._epoch, report=report, noticed_at=self._noticed_at, rebuild_s=rebuild_s)
        )
        self._on_status("ready", 1.0)
        return transport, min(each.num_kv_blocks for each in reports)

    def close(self) -> None:
        """Kill the ranks and give their resources back. May be called twice."""
        with self._lock:
            self._is_closed = True
        self.group.close()

    def _replace_group(self) -> None:
        """Kill the present ranks; the next group takes over their placement group."""
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine has been shut down")
            self.group.kill_ranks()
            self._epoch += 1
            placement_group = self.group.give_away_placement()
            self.group = RankGroup(self._config, self._worker_config, self._epoch, placement_group)
