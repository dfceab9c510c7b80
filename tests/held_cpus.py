"""CPUs of the tests' Ray that are taken, so that engines have to wait or find too few."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

_TIMEOUT_S = 60.0
"""Ray gives what has just been freed late, and the machine may be busy."""


@contextmanager
def held_cpus(number: int, name: str) -> Iterator[PlacementGroup]:
    """A placement group of so many; it is gone at the end of the block, which may have removed it already.

    Whatever happens in the block: the engines of all later tests would wait for these CPUs.
    """
    group = placement_group([{"CPU": 1}] * number, name=name)
    try:
        assert group.wait(_TIMEOUT_S), placement_group_table()
        yield group
    finally:
        remove_placement_group(group)
        deadline = time.monotonic() + _TIMEOUT_S
        while placement_group_table(group)["state"] != "REMOVED":
            assert time.monotonic() < deadline, placement_group_table(group)
            time.sleep(0.05)
