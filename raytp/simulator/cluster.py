"""The simulation: requests arrive, replicas take them and compute, a policy decides how many replicas there are.

Events are handled in the order of their time, and of those at one time the earlier made one first, so that a simulation
is a function of its input alone. Called by `raytp.cli.simulate` and `raytp.simulator.capacity`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raytp.errors import ConfigError
from raytp.scaling import Policy, Scaler
from raytp.scaling.window import rows_window
from raytp.simulator.delays import Delays
from raytp.simulator.fleet import Fleet, Member, ReplicaConfig, ReplicaState
from raytp.simulator.nodes import NodeConfig
from raytp.simulator.replica import Ending, News
from raytp.simulator.requests import SequenceMaker, SimulatedRequest
from raytp.simulator.results import RequestTimes, Results
from raytp.simulator.router import Router
from raytp.simulator.seconds import check_seconds
from raytp.simulator.waiting import WaitingRows
from raytp.simulator.watch import Watch
from scheduler.errors import RequestError

_MAX_DECISIONS = 10**6
"""Of the policy, in one run: half a minute's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where the simulated job runs, and how it scales."""

    replica: ReplicaConfig
    nodes: NodeConfig
    policy: Policy
    min_replicas: int
    max_replicas: int
    decide_every_s: float = 5.0
    """How often the policy is asked."""
    lost_nodes: tuple[tuple[float, int], ...] = ()
    """(when, which): nodes that are lost, counted from 0 in the order of their coming; if they come later, then."""
    delays: Delays = field(default_factory=Delays)

    def __post_init__(self) -> None:
        check_seconds("decide_every_s", self.decide_every_s, may_be_zero=False)
        for at_s, _ in self.lost_nodes:
            check_seconds("when a node is lost", at_s)


class Simulation:
    """One run. Use `simulate`."""

    def __init__(self, config: ClusterConfig, requests: Sequence[SimulatedRequest]) -> None:
        limits = config.replica.scheduler
        self._config = config
        self._requests = requests
        self._times = [RequestTimes(arrival_s=one.arrival_s, output_tokens=0) for one in requests]
        self._num_left = len(requests)
        self._rows_of: dict[int, set[int]] = {}
        """By replica: the requests that it has taken and not finished."""
        self._maker = SequenceMaker(limits.vocab_size)
        self._rows_per_replica = rows_window(limits.max_num_seqs)
        self._router = Router(self._rows_per_replica)
        self._waiting = WaitingRows([one.prefix_id for one in requests], self._router)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = itertools.count()
        self._fleet = Fleet(config.replica, config.nodes, config.delays, self._call_at)
        self._fleet.on_ready = self._welcome
        self._fleet.on_nodes = self._lose_late_nodes
        self._doomed: set[int] = set()
        """Nodes that are lost as soon as they come."""
        scaler = Scaler(config.policy, config.min_replicas, config.max_replicas)
        self._watch = Watch(self._fleet, scaler, limits.max_num_seqs, config.decide_every_s)
        self._end_s = 0.0

    def run(self, on_progress: Callable[[float], None]) -> Results:
        """Until every request has ended; `on_progress` is told the share of them that has."""
        if self._requests:
            self._check_length(self._requests[-1].arrival_s)
            self._call_at(self._requests[0].arrival_s, lambda now_s: self._arrive(0, now_s))
        self._call_at(0.0, self._decide)
        for at_s, node_id in self._config.lost_nodes:
            self._call_at(at_s, lambda now_s, node_id=node_id: self._lose_node(node_id, now_s))  # type: ignore[misc]
        for count in itertools.count():
            if not self._num_left:
                break
            now_s, _, function = heapq.heappop(self._events)
            function(now_s)
            if count % 1000 == 0:
                on_progress(1 - self._num_left / len(self._requests))
        self._watch.note(self._end_s, len(self._waiting))
        return Results(
            requests=self._times,
            ticks=self._watch.ticks,
            seconds=self._end_s,
            gpu_seconds=self._fleet.nodes.gpu_seconds(self._end_s),
            busy_gpu_seconds=self._fleet.busy_s(self._end_s),
            num_steps=self._fleet.num_steps(),
        )

    def _call_at(self, at_s: float, function: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._serial), function))

    def _arrive(self, index: int, now_s: float) -> None:
        """All requests that arrive now; they are in order."""
        while index < len(self._requests) and self._requests[index].arrival_s <= now_s:
            self._waiting.add(index)
            self._watch.num_arrivals += now_s > 0  # what is there from the beginning tells nothing of a rate
            index += 1
        self._dispatch(now_s)
        if index < len(self._requests):
            self._call_at(self._requests[index].arrival_s, lambda at_s: self._arrive(index, at_s))

    def _dispatch(self, now_s: float) -> None:
        """Give rows to replicas while there are both."""
        touched: dict[int, Member] = {}
        while self._waiting:
            index = self._waiting.oldest
            member = self._router.choose(self._requests[index].prefix_id)
            if member is None:
                break
            self._give(self._waiting.pop(), member, now_s)
            touched[member.member_id] = member
        for member in touched.values():
            self._follow(member)

    def _give(self, index: int, member: Member, now_s: float) -> None:
        assert member.engine is not None
        try:
            member.engine.add(self._maker.make(index, self._requests[index]), now_s)
        except RequestError as error:
            self._finish(Ending(index, 0, str(error)), now_s)
            return
        self._rows_of[member.member_id].add(index)
        self._router.changed(member)

    def _follow(self, member: Member) -> None:
        """Handle the replica's next event when it is due, unless something else has changed it by then."""
        engine = member.engine
        assert engine is not None
        if engine.next_s == math.inf and engine.num_rows:
            engine.go_on()
        if engine.next_s < math.inf:
            due_s = engine.next_s
            self._call_at(due_s, lambda now_s: self._advance(member, due_s, now_s))

    def _advance(self, member: Member, due_s: float, now_s: float) -> None:
        engine = member.engine
        if engine is None or member.member_id not in self._fleet.members or engine.next_s != due_s:
            return
        news = engine.complete()
        if news.first_tokens or news.finished:
            self._take_in(member, news, now_s)
        if member.member_id in self._fleet.members:
            engine.go_on()
            self._follow(member)

    def _take_in(self, member: Member, news: News, now_s: float) -> None:
        for index in news.first_tokens:
            if self._times[index].first_token_s is None:
                self._times[index].first_token_s = now_s
        for ending in news.finished:
            self._rows_of[member.member_id].discard(ending.seq_id)
            self._finish(ending, now_s)
        if news.finished:
            self._router.changed(member)
            self._fleet.end_if_drained(member, now_s)
            self._dispatch_from(member, now_s)

    def _dispatch_from(self, member: Member, now_s: float) -> None:
        """A replica has room again: rows that wait are its own, before it goes on."""
        while self._waiting and member.state is ReplicaState.READY and member.num_rows < self._rows_per_replica:
            self._give(self._waiting.take(member), member, now_s)

    def _finish(self, ending: Ending, now_s: float) -> None:
        times = self._times[ending.seq_id]
        times.finish_s, times.output_tokens, times.error = now_s, ending.num_output_tokens, ending.error
        self._num_left -= 1
        self._end_s = now_s
        self._watch.num_finished += 1

    def _welcome(self, member: Member, now_s: float) -> None:
        self._rows_of[member.member_id] = set()
        self._router.changed(member)
        self._call_at(now_s, self._dispatch)  # once all that are ready at this moment are, so that they share the rows

    def _lose_node(self, node_id: int, now_s: float) -> None:
        """Rows of its replicas go back to the head of the queue, oldest first, to be computed from the beginning."""
        if node_id >= self._fleet.nodes.num_come:
            self._doomed.add(node_id)
            return
        lost = self._fleet.lose_node(node_id, now_s)
        rows = sorted(index for member in lost for index in self._rows_of.pop(member.member_id, set()))
        self._waiting.give_back(rows)
        self._fleet.set_target(self._watch.target, now_s)
        self._dispatch(now_s)

    def _lose_late_nodes(self, now_s: float) -> None:
        for node_id in sorted(self._doomed):
            if node_id < self._fleet.nodes.num_come:
                self._doomed.discard(node_id)
                self._lose_node(node_id, now_s)

    def _decide(self, now_s: float) -> None:
        self._check_length(now_s)
        self._fleet.set_target(self._watch.decide(now_s, len(self._waiting)), now_s)
        self._fleet.nodes.release_idle(now_s)
        self._watch.note(now_s, len(self._waiting))
        self._call_at(now_s + self._config.decide_every_s, self._decide)

    def _check_length(self, seconds: float) -> None:
        """Raises ConfigError if a run that lasts so long takes too many decisions."""
        every_s = self._config.decide_every_s
        if seconds / every_s > _MAX_DECISIONS:
            raise ConfigError(
                f"the run lasts over {seconds:g} s, and the policy would be asked every {every_s:g} s, more than "
                f"{_MAX_DECISIONS:,} times: ask less often, or check that times count in seconds from the beginning"
            )


def simulate(
    config: ClusterConfig,
    requests: Sequence[SimulatedRequest],
    on_progress: Callable[[float], None] = lambda share: None,
) -> Results:
    """What becomes of requests, which must be in the order of their arrival, on a cluster.

    Raises ConfigError for a policy that raises or does not answer with an integer, and for a run that does not end in
    as much time as can be simulated.
    """
    return Simulation(config, requests).run(on_progress)
