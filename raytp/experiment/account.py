"""What a run on Ray has cost, and how its counts went over time. Kept by `raytp.experiment.real`; knows no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytp.replicas.pool import ReplicaPool
from raytp.simulator.results import Tick


class Account:
    """Looks at a pool and its nodes as often as it is told to. Times are in seconds since the run began."""

    def __init__(self, pool: ReplicaPool, *, gpus_per_node: int, gpus_per_replica: int, tick_every_s: float) -> None:
        self.node_seconds = 0.0
        self.busy_replica_seconds = 0.0
        """Of replicas that had rows, and ranks to do them."""
        self._pool = pool
        self._gpus_per_node = gpus_per_node
        self._gpus_per_replica = gpus_per_replica
        self._tick_every_s = tick_every_s
        self._ticks: list[Tick] = []
        self._looked_s = 0.0
        self._num_nodes = self._num_busy = 0

    @property
    def gpu_seconds(self) -> float:
        """Of nodes, until the last look: what is paid for."""
        return self._gpus_per_node * self.node_seconds

    @property
    def busy_gpu_seconds(self) -> float:
        """Of ranks that had something to do."""
        return self._gpus_per_replica * self.busy_replica_seconds

    def look(self, now_s: float, num_nodes: int) -> None:
        """What was there at the last look is taken to have been there until now."""
        elapsed_s = now_s - self._looked_s
        self.node_seconds += elapsed_s * self._num_nodes
        self.busy_replica_seconds += elapsed_s * self._num_busy
        self._looked_s, self._num_nodes = now_s, num_nodes
        self._num_busy = sum(replica.is_busy for replica in self._pool.replicas)
        self.note(now_s, num_nodes)

    def note(self, now_s: float, num_nodes: int, *, is_last: bool = False) -> None:
        """Keep the counts, if it is time for that; the last ones in any case."""
        if self._ticks and now_s - self._ticks[-1].now_s < self._tick_every_s and not is_last:
            return
        pool, crew = self._pool, self._pool.crew()
        self._ticks.append(
            Tick(
                now_s=now_s,
                wanted=0 if pool.is_closed else pool.scaler.target,
                pending=crew.num_pending,
                ready=crew.num_ready,
                nodes=num_nodes,
                rows_waiting=pool.num_waiting,
                rows_running=sum(replica.load for replica in pool.replicas),
                tokens_per_s=0.0,
            )
        )

    def ticks(self, tokens_by: Sequence[float]) -> list[Tick]:
        """With the rate of tokens, of which so many had been made by each of `moments`."""
        moments = self.moments
        found = []
        for index, tick in enumerate(self._ticks):
            seconds = moments[index] - moments[index - 1] if index else 0.0
            rate = (tokens_by[index] - tokens_by[index - 1]) / seconds if seconds else 0.0
            found.append(replace(tick, tokens_per_s=rate))
        return found

    @property
    def moments(self) -> list[float]:
        """When the counts were kept."""
        return [tick.now_s for tick in self._ticks]
