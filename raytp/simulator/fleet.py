"""The simulated replicas: asked for, placed on nodes, started, drained, lost. Called by `raytp.simulator.cluster`."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raytp.errors import ConfigError
from raytp.simulator.delays import Delays
from raytp.simulator.nodes import Node, NodeConfig, Nodes
from raytp.simulator.replica import SimulatedReplica
from raytp.simulator.seconds import check_seconds
from raytp.simulator.step_time import StepTimes
from scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Every replica is made alike; `Delays` has the exceptions."""

    scheduler: SchedulerConfig
    times: StepTimes
    num_gpus: int
    startup_s: float = 0.0
    """From being placed until it takes rows."""
    takes_plain_steps: bool = True
    """See `SimulatedReplica`."""

    def __post_init__(self) -> None:
        check_seconds("startup_s", self.startup_s)


class ReplicaState(enum.Enum):
    """Where a replica is in its life."""

    PENDING = enum.auto()
    """It waits for a node with room."""
    STARTING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()
    """It takes no rows, and ends with the last that it has."""
    GONE = enum.auto()


class Member:
    """A replica's life, and its engine once it has started."""

    def __init__(self, member_id: int) -> None:
        self.member_id = member_id
        self.state = ReplicaState.PENDING
        self.node: Node | None = None
        self.engine: SimulatedReplica | None = None
        self.ready_s = 0.0
        self.tokens_at_tick = 0
        """Output tokens up to the last decision, for its rate since."""

    @property
    def num_rows(self) -> int:
        """Taken and not finished."""
        return self.engine.num_rows if self.engine is not None else 0


class Fleet:
    """All replicas that are asked for, and the nodes below them."""

    def __init__(
        self,
        replica: ReplicaConfig,
        nodes: NodeConfig,
        delays: Delays,
        call_at: Callable[[float, Callable[[float], None]], None],
    ) -> None:
        """`call_at(time, function)` is the clock. Raises ConfigError if a replica is larger than a node."""
        if replica.num_gpus > nodes.gpus_per_node:
            raise ConfigError(
                f"a replica takes {replica.num_gpus} GPUs of one node, and a node has {nodes.gpus_per_node}: lower the "
                f"tensor-parallel size or raise the GPUs of a node"
            )
        self.nodes = Nodes(nodes)
        self.members: dict[int, Member] = {}
        """Those not gone, by id, oldest first."""
        self._busy_of_gone_s = 0.0
        self._steps_of_gone = self._tokens_of_gone = 0
        self.on_ready: Callable[[Member, float], None] = lambda member, now_s: None
        self.on_nodes: Callable[[float], None] = lambda now_s: None
        """Called when nodes have come, and replicas have been placed on them."""
        self._replica = replica
        self._delays = delays
        self._call_at = call_at
        self._ids = itertools.count()

    @property
    def startup_s(self) -> float:
        """From asking for a replica until it is ready, if it needs a new node whenever none may have room."""
        config = self.nodes.config
        has_room = self.nodes.find(self._replica.num_gpus) is not None or config.min_nodes == config.max_nodes
        startup_s = self._replica.startup_s + self._delays.start_s(None)
        return startup_s + (0.0 if has_room else config.provisioning_s)

    def count(self, *states: ReplicaState) -> int:
        """Replicas in one of these states."""
        return sum(member.state in states for member in self.members.values())

    def ready(self) -> Iterator[Member]:
        """Those that take rows, oldest first."""
        return (member for member in self.members.values() if member.state is ReplicaState.READY)

    def set_target(self, target: int, now_s: float) -> None:
        """Ask for replicas, or give up those that cost least to lose: not placed, then starting, then emptiest."""
        wanted = (ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.READY)
        present = [member for member in self.members.values() if member.state in wanted]
        for _ in range(target - len(present)):
            member = Member(next(self._ids))
            self.members[member.member_id] = member
        present.sort(key=lambda member: (member.state.value, member.num_rows, -member.member_id))
        for member in present[: max(0, len(present) - target)]:
            self._give_up(member, now_s)
        self.place(now_s)

    def place(self, now_s: float) -> None:
        """Put pending replicas on nodes, and ask for nodes for the others."""
        num_gpus = self._replica.num_gpus
        pending = [member for member in self.members.values() if member.state is ReplicaState.PENDING]
        while pending and (node := self.nodes.find(num_gpus)) is not None:
            self._start(pending.pop(0), node, now_s)
        per_node = self.nodes.config.gpus_per_node // num_gpus
        for at_s in self.nodes.ask_for(-(-len(pending) // per_node), now_s):
            self._call_at(at_s, self._take_nodes)

    def end_if_drained(self, member: Member, now_s: float) -> None:
        """A draining replica whose last row is done goes."""
        if member.state is ReplicaState.DRAINING and member.num_rows == 0:
            self._end(member, now_s)
            self.place(now_s)

    def lose_node(self, node_id: int, now_s: float) -> list[Member]:
        """The replicas that were on it; none if there is no such node. Each is asked for again."""
        node = self.nodes.live.get(node_id)
        if node is None:
            return []
        lost = [member for member in self.members.values() if member.node is node]
        for member in lost:
            self._retire(member, now_s)
        self.nodes.remove(node, now_s)
        return lost

    def busy_s(self, now_s: float) -> float:
        """GPU-seconds of steps that are over."""
        busy_s = self._busy_of_gone_s + sum(engine.busy_s_by(now_s) for engine in self._engines())
        return self._replica.num_gpus * busy_s

    def num_steps(self) -> int:
        """Steps that all schedulers have sent."""
        return self._steps_of_gone + sum(engine.scheduler.stats().num_steps for engine in self._engines())

    def num_output_tokens(self, now_s: float) -> int:
        """Tokens that have been sampled, those of lost rows included."""
        return self._tokens_of_gone + sum(engine.output_tokens_by(now_s) for engine in self._engines())

    def _engines(self) -> Iterator[SimulatedReplica]:
        return (member.engine for member in self.members.values() if member.engine is not None)

    def _take_nodes(self, now_s: float) -> None:
        self.nodes.arrive(now_s)
        self.place(now_s)
        self.on_nodes(now_s)

    def _start(self, member: Member, node: Node, now_s: float) -> None:
        member.state, member.node = ReplicaState.STARTING, node
        self.nodes.use(node, self._replica.num_gpus)
        member.ready_s = now_s + self._replica.startup_s + self._delays.start_s(member.member_id)
        self._call_at(member.ready_s, lambda at_s: self._be_ready(member, at_s))

    def _be_ready(self, member: Member, now_s: float) -> None:
        if member.state is not ReplicaState.STARTING:
            return
        config = self._replica
        member.state = ReplicaState.READY
        times = config.times.slowed(self._delays.step_s(member.member_id))
        member.engine = SimulatedReplica(config.scheduler, times, now_s, takes_plain_steps=config.takes_plain_steps)
        self.on_ready(member, now_s)

    def _give_up(self, member: Member, now_s: float) -> None:
        if member.num_rows:
            member.state = ReplicaState.DRAINING
        else:
            self._end(member, now_s)

    def _end(self, member: Member, now_s: float) -> None:
        if member.node is not None:
            self.nodes.free(member.node, self._replica.num_gpus, now_s)
        self._retire(member, now_s)

    def _retire(self, member: Member, now_s: float) -> None:
        if member.engine is not None:
            self._busy_of_gone_s += member.engine.busy_s_by(now_s)
            self._tokens_of_gone += member.engine.output_tokens_by(now_s)
            self._steps_of_gone += member.engine.scheduler.stats().num_steps
        member.state = ReplicaState.GONE
        del self.members[member.member_id]
