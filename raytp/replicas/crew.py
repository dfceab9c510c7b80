"""How many replicas there are, and how far those are that take no rows yet. Made by `raytp.replicas.pool`.

Read by `raytp.batch_job.progress` and `raytp.experiment.real`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytp.replicas.replica import Replica, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The replicas at one moment."""

    num_ready: int
    """They take rows."""
    num_starting: int
    """They have a place, or have lost their ranks and get others."""
    num_waiting: int
    """There is no room for them yet."""
    num_leaving: int
    """They finish what they have."""
    num_nodes: int
    """On which there are ranks of those that are ready. As Ray counts them: fake nodes share a host."""

    @property
    def num_pending(self) -> int:
        """Asked for, and not ready."""
        return self.num_starting + self.num_waiting

    def as_text(self) -> str:
        """Such as "2 replicas on 2 nodes, 1 starting, 1 waiting for room"."""
        parts = [count_text(self.num_ready, self.num_nodes)]
        others = (
            (self.num_starting, "starting"),
            (self.num_waiting, "waiting for room"),
            (self.num_leaving, "leaving"),
        )
        return ", ".join(parts + [f"{count} {name}" for count, name in others if count])


def count_text(num_replicas: int, num_nodes: int) -> str:
    """Such as "1 replica on 2 nodes"."""
    text = f"{num_replicas:,} replica{'' if num_replicas == 1 else 's'}"
    return f"{text} on {num_nodes:,} node{'' if num_nodes == 1 else 's'}" if num_nodes else text


def crew_of(replicas: Sequence[Replica]) -> Crew:
    """Those that have not ended."""
    ready = [replica for replica in replicas if replica.takes_rows]
    leaving = [replica for replica in replicas if replica.state is State.LEAVING]
    waiting = [replica for replica in replicas if replica.state is State.STARTING and replica.placed_s is None]
    nodes = {node for replica in ready if replica.engine is not None for node in replica.engine.info.node_ids}
    return Crew(
        num_ready=len(ready),
        num_starting=len(replicas) - len(ready) - len(leaving) - len(waiting),
        num_waiting=len(waiting),
        num_leaving=len(leaving),
        num_nodes=len(nodes),
    )
