"""The simulated cluster's nodes: they come some time after they are asked for, and go when nothing is on them.

Called by `raytp.simulator.fleet`. Knows nothing of what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raytp.errors import ConfigError
from raytp.simulator.seconds import check_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Raises ConfigError for values that contradict each other."""

    gpus_per_node: int = 8
    min_nodes: int = 0
    """There from the beginning, and never given back."""
    max_nodes: int = 1
    provisioning_s: float = 0.0
    """From asking for a node until it is there."""
    idle_timeout_s: float = 60.0
    """How long a node stays with nothing on it."""

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ConfigError(f"gpus_per_node={self.gpus_per_node} must be at least 1")
        if not 0 <= self.min_nodes <= self.max_nodes or self.max_nodes < 1:
            raise ConfigError(
                f"min_nodes={self.min_nodes} must be from 0 to max_nodes={self.max_nodes}, which must be at least 1"
            )
        check_seconds("provisioning_s", self.provisioning_s)
        check_seconds("idle_timeout_s", self.idle_timeout_s)


class Node:
    """A node that is there."""

    def __init__(self, node_id: int, num_gpus: int, now_s: float) -> None:
        self.node_id = node_id
        self.num_free = num_gpus
        self.since_s = now_s
        self.idle_since_s = now_s


class Nodes:
    """Those there, those on their way, and what all of them have cost."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.live: dict[int, Node] = {}
        """By node_id, which counts nodes in the order of their coming."""
        self.coming_s: list[float] = []
        """When each node on its way will be there."""
        self._paid_s = 0.0
        self._next_id = 0
        for _ in range(config.min_nodes):
            self._add(0.0)

    @property
    def num_come(self) -> int:
        """Nodes that are or have been there."""
        return self._next_id

    def gpu_seconds(self, now_s: float) -> float:
        """Of all nodes until now."""
        return self.config.gpus_per_node * (self._paid_s + sum(now_s - node.since_s for node in self.live.values()))

    def find(self, num_gpus: int) -> Node | None:
        """The fullest node with so many GPUs free, so that others can become idle."""
        fitting = [node for node in self.live.values() if node.num_free >= num_gpus]
        return min(fitting, key=lambda node: (node.num_free, node.node_id), default=None)

    def ask_for(self, num_nodes: int, now_s: float) -> list[float]:
        """Have so many nodes on their way, if there may be so many; returns when the new ones will be there."""
        room = self.config.max_nodes - len(self.live)
        num_new = max(0, min(num_nodes, room) - len(self.coming_s))
        new_s = [now_s + self.config.provisioning_s] * num_new
        self.coming_s += new_s
        return new_s

    def arrive(self, now_s: float) -> None:
        """Take in the nodes that are due."""
        due = sum(at_s <= now_s for at_s in self.coming_s)
        self.coming_s = [at_s for at_s in self.coming_s if at_s > now_s]
        for _ in range(due):
            self._add(now_s)

    def use(self, node: Node, num_gpus: int) -> None:
        """Occupy GPUs."""
        assert node.num_free >= num_gpus
        node.num_free -= num_gpus

    def free(self, node: Node, num_gpus: int, now_s: float) -> None:
        """Give GPUs back."""
        node.num_free += num_gpus
        if node.num_free == self.config.gpus_per_node:
            node.idle_since_s = now_s

    def release_idle(self, now_s: float) -> None:
        """Let nodes go that have been idle for long enough."""
        for node in list(self._idle(now_s)):
            if len(self.live) > self.config.min_nodes:
                self.remove(node, now_s)

    def remove(self, node: Node, now_s: float) -> None:
        """A node goes, or is lost."""
        del self.live[node.node_id]
        self._paid_s += now_s - node.since_s

    def _idle(self, now_s: float) -> Iterator[Node]:
        for node in reversed(self.live.values()):
            is_idle = node.num_free == self.config.gpus_per_node
            if is_idle and now_s - node.idle_since_s >= self.config.idle_timeout_s:
                yield node

    def _add(self, now_s: float) -> None:
        self.live[self._next_id] = Node(self._next_id, self.config.gpus_per_node, now_s)
        self._next_id += 1
