"""What a policy is told, and what it is. Made by whoever owns the replicas; read by `raytp.scaling.policies`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The job and its replicas at one moment. Times in seconds, since the job began."""

    now_s: float
    rows_waiting: int
    """Rows that have come and that no replica works on: a replica may hold some of them, beyond `rows_per_replica`."""
    rows_running: int
    """Rows that replicas work on."""
    arrival_rows_per_s: float
    """Of late; 0 for a job whose rows were all there from the beginning."""
    tokens_per_row: float | None
    """Output tokens that a row takes, by what has been seen; None until then."""
    tokens_per_s_per_replica: float | None
    """Output tokens that a replica with enough to do makes in a second (see `RateMeter`); None until that is known."""
    rows_per_replica: int
    """Rows that a replica works on at once."""
    startup_s: float
    """From asking for a replica until it is ready.

    A simulation knows it, and includes a new node if one is needed. Otherwise it is what was typical of the latest that
    have started, their wait for room included up to five minutes.
    """
    num_ready: int
    """Replicas that take rows."""
    num_pending: int
    """Replicas asked for that do not take rows yet: they wait for a place, or start."""
    num_nodes_pending: int
    """Nodes that the cluster has been asked for and has not got yet.

    Only a simulation knows them. Otherwise it is the replicas that wait for a place, for each of which a node may be on
    its way, or none: Ray's autoscaler does not say, and several may fit on one node.
    """
    target: int
    """Replicas asked for by the last decision."""
    seconds_since_change: float
    """Since the last decision that changed the target."""
    min_replicas: int
    max_replicas: int

    @property
    def rows_per_s_per_replica(self) -> float | None:
        """Rows that a replica with enough to do finishes in a second; None until both factors are known."""
        if not self.tokens_per_s_per_replica or not self.tokens_per_row:
            return None
        return self.tokens_per_s_per_replica / self.tokens_per_row


Policy: TypeAlias = Callable[[Observation], int]
"""How many replicas there should be now. A pure function; `Scaler` keeps its answer within the limits."""
