"""What engines that have ended must not leave in the tests' Ray."""

from __future__ import annotations

import time

from ray._private.state import actors
from ray.util.placement_group import placement_group_table


def ours(*classes: str) -> tuple[set[int], set[str]]:
    """Processes of drivers and ranks that Ray knows to be alive, and placement groups of engines that are there."""
    classes = classes or ("Driver", "RankActor")
    alive = {each["Pid"] for each in actors().values() if each["ActorClassName"] in classes and each["State"] != "DEAD"}
    groups = {each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED"}
    return alive, groups


def wait_until_nothing_is_left(before: tuple[set[int], set[str]] = (set(), set()), timeout_s: float = 30.0) -> None:
    """But what was there `before`."""
    deadline = time.monotonic() + timeout_s
    while any(now - then for now, then in zip(ours(), before, strict=True)):
        assert time.monotonic() < deadline, ours()
        time.sleep(0.1)
