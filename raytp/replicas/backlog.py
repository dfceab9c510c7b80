"""Rows that have been read and that no replica has: who is to have which. Called by `raytp.replicas.pool`.

A row whose beginning a replica has seen waits for that one, while it is not overloaded; others wait for whoever has
room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from raytp.batch_job.rows import Job
from raytp.replicas.homes import Homes, beginnings
from raytp.replicas.replica import Replica


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A row, and the hashes of its beginnings."""

    job: Job
    hashes: Sequence[int]
    is_bound: bool
    """It waits for one replica."""


class Backlog:
    """A queue for each replica. A row in one's queue is another's if it is not bound, or the one is overloaded."""

    def __init__(self, homes: Homes[Replica]) -> None:
        self._homes = homes
        self._queues: dict[Replica, deque[_Waiting]] = {}
        self._returned: deque[Job] = deque()
        """Rows that replicas could not finish, and those that nobody is there for: they come first."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, job: Job, replicas: Sequence[Replica]) -> None:
        """A row that was read; `replicas` are those that take rows."""
        self._size += 1
        if not replicas:
            self._returned.append(job)
            return
        hashes, num_bytes = beginnings(job[1])
        seen = self._homes.find(hashes, num_bytes)
        is_bound = seen is not None and seen in replicas
        home = seen if seen is not None and is_bound else min(replicas, key=self._load)
        self._homes.settle(hashes, home)
        self._queues.setdefault(home, deque()).append(_Waiting(job, hashes, is_bound))

    def give_back(self, jobs: Iterable[Job]) -> None:
        """Rows that a replica had and has not finished."""
        for job in jobs:
            self._returned.append(job)
            self._size += 1

    def leave(self, replica: Replica) -> None:
        """`replica` takes no rows any more: what waits for it is anybody's."""
        self._returned.extend(waiting.job for waiting in self._queues.pop(replica, ()))

    def take(self, replica: Replica) -> Job | None:
        """The next row for `replica`; None if all that wait are for others."""
        if self._returned:
            self._size -= 1
            return self._returned.popleft()
        queue = self._queue_for(replica)
        if queue is None:
            return None
        self._size -= 1
        is_own = queue is self._queues.get(replica)
        waiting = queue.popleft() if is_own else queue.pop()
        if not is_own:
            self._homes.settle(waiting.hashes, replica)
        return waiting.job

    def _queue_for(self, replica: Replica) -> deque[_Waiting] | None:
        """Its own, or else the longest of those whose last row it may have."""
        own = self._queues.get(replica)
        if own:
            return own
        may_have: Callable[[Replica], bool] = lambda other: (  # noqa: E731
            not self._queues[other][-1].is_bound or other.is_overloaded_beside(replica)
        )
        others = [other for other, queue in self._queues.items() if queue and may_have(other)]
        return self._queues[max(others, key=lambda other: len(self._queues[other]))] if others else None

    def _load(self, replica: Replica) -> int:
        return replica.load + len(self._queues.get(replica, ()))
