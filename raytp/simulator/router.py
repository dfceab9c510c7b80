"""Which replica takes the next row: one that has its prefix, if that is not overloaded, else the emptiest with room.

Called by `raytp.simulator.cluster` and `raytp.simulator.waiting`. Its counts follow `changed`, which every change of a
replica's rows must reach.
"""

from __future__ import annotations

import heapq
import itertools

from raytp.simulator.fleet import Member, ReplicaState

_OVERLOAD = 1.5
"""How many times the rows of the emptiest replica one may have and still be preferred for its prefix."""
_FEW_ROWS = 8
"""So many more rows never count as overload."""


class Router:
    """Finds room in O(log replicas)."""

    def __init__(self, rows_per_replica: int) -> None:
        """`rows_per_replica`: those that a replica may have at once, waiting in it and running."""
        self._rows_per_replica = rows_per_replica
        self._heap: list[tuple[int, int, int, Member]] = []
        """(rows, id, serial number, replica); entries of another count than the replica's present one are outdated."""
        self._serial = itertools.count()
        self._holders: dict[str, dict[int, Member]] = {}
        """By prefix: replicas that have computed it."""

    def changed(self, member: Member) -> None:
        """A replica is ready, or has another number of rows than before."""
        if member.state is ReplicaState.READY and member.num_rows < self._rows_per_replica:
            heapq.heappush(self._heap, (member.num_rows, member.member_id, next(self._serial), member))

    def choose(self, prefix_id: str | None) -> Member | None:
        """A replica with room; None if none has any."""
        emptiest = self._emptiest()
        if emptiest is None or prefix_id is None:
            return emptiest
        holders = self._holders.get(prefix_id, {})
        limit = min(self._rows_per_replica - 1, max(emptiest.num_rows * _OVERLOAD, emptiest.num_rows + _FEW_ROWS))
        fitting = [one for one in holders.values() if one.state is ReplicaState.READY and one.num_rows <= limit]
        chosen = min(fitting, key=lambda one: (one.num_rows, one.member_id), default=emptiest)
        self.settle(chosen, prefix_id)
        return chosen

    def has(self, member: Member, prefix_id: str | None) -> bool:
        """Whether this replica has computed the prefix."""
        return prefix_id is not None and member.member_id in self._holders.get(prefix_id, ())

    def is_held(self, prefix_id: str | None) -> bool:
        """Whether a replica that takes rows has computed the prefix."""
        holders = self._holders.get(prefix_id, {}) if prefix_id is not None else {}
        return any(member.state is ReplicaState.READY for member in holders.values())

    def settle(self, member: Member, prefix_id: str | None) -> None:
        """This replica computes the prefix."""
        if prefix_id is not None:
            self._holders.setdefault(prefix_id, {})[member.member_id] = member

    def _emptiest(self) -> Member | None:
        while self._heap:
            num_rows, _, _, member = self._heap[0]
            if member.state is ReplicaState.READY and member.num_rows == num_rows:
                return member
            heapq.heappop(self._heap)
        return None
