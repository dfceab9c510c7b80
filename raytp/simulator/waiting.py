"""Rows that no simulated replica has, oldest first, and which of them a replica with room takes.

As with real replicas, a row whose beginning one of them has seen is for that one, unless another finds nothing else.
Called by `raytp.simulator.cluster`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from raytp.simulator.fleet import Member
from raytp.simulator.router import Router

_LOOK_AHEAD = 256
"""Among so many rows, the oldest ones, a replica looks for one that suits it."""


class WaitingRows:
    """Indices into `prefix_ids`, the prefixes of all rows."""

    def __init__(self, prefix_ids: Sequence[str | None], router: Router) -> None:
        self._prefix_ids = prefix_ids
        self._num_to_look_at = _LOOK_AHEAD if any(each is not None for each in prefix_ids) else 1
        self._router = router
        self._rows: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def oldest(self) -> int:
        """There must be one."""
        return self._rows[0]

    def add(self, index: int) -> None:
        """A row has arrived."""
        self._rows.append(index)

    def give_back(self, indices: Sequence[int]) -> None:
        """Rows of a replica that was lost, oldest first, come before all others."""
        self._rows.extendleft(reversed(indices))

    def pop(self) -> int:
        """Take the oldest."""
        return self._rows.popleft()

    def take(self, member: Member) -> int:
        """Take the oldest whose prefix this replica has, or no other; else the oldest of all."""
        for position, index in enumerate(itertools.islice(self._rows, self._num_to_look_at)):
            prefix_id = self._prefix_ids[index]
            if self._router.has(member, prefix_id) or not self._router.is_held(prefix_id):
                del self._rows[position]
                break
        else:
            index = self.pop()
        self._router.settle(member, self._prefix_ids[index])
        return index
