"""What the policy sees of the simulated cluster, and a record of it over time. Called by `raytp.simulator.cluster`."""

from __future__ import annotations

from raytp.scaling import ArrivalMeter, Observation, RateMeter, Scaler
from raytp.scaling.meter import mean_tokens_per_row
from raytp.simulator.fleet import Fleet, ReplicaState
from raytp.simulator.results import Tick


class Watch:
    """Looks at the fleet every few seconds."""

    def __init__(self, fleet: Fleet, scaler: Scaler, rows_per_replica: int, interval_s: float) -> None:
        self.num_arrivals = 0
        """Since the last look."""
        self.num_finished = 0
        self.ticks: list[Tick] = []
        self._fleet = fleet
        self._scaler = scaler
        self._rows_per_replica = rows_per_replica
        self._interval_s = interval_s
        self._meter, self._arrivals = RateMeter(), ArrivalMeter()
        self._was_saturated = False
        self._noted_s = 0.0
        self._num_tokens = 0
        self.target = 0
        """Replicas that there should be."""

    def decide(self, now_s: float, num_waiting: int) -> int:
        """Ask the policy. Whatever it says, there should be a replica while rows wait, as with real ones."""
        if now_s > 0:
            self._measure(now_s, num_waiting)
        self._was_saturated, self.num_arrivals = num_waiting > 0, 0
        self.target = max(self._scaler.decide(self._observe(now_s, num_waiting)), 1 if num_waiting else 0)
        return self.target

    def note(self, now_s: float, num_waiting: int) -> None:
        """Record the moment, once the decision has been followed, or all is done."""
        fleet, num_tokens = self._fleet, self._fleet.num_output_tokens(now_s)
        tick = Tick(
            now_s=now_s,
            wanted=self._scaler.target,
            pending=fleet.count(ReplicaState.PENDING, ReplicaState.STARTING),
            ready=fleet.count(ReplicaState.READY),
            nodes=len(fleet.nodes.live),
            rows_waiting=num_waiting,
            rows_running=self._num_taken(),
            tokens_per_s=(num_tokens - self._num_tokens) / (now_s - self._noted_s) if now_s > self._noted_s else 0.0,
        )
        self._noted_s, self._num_tokens = now_s, num_tokens
        self.ticks.append(tick)

    def _measure(self, now_s: float, num_waiting: int) -> None:
        rates = []
        for member in self._fleet.ready():
            assert member.engine is not None
            num_tokens = member.engine.output_tokens_by(now_s)
            if member.ready_s <= now_s - self._interval_s:
                rates.append((num_tokens - member.tokens_at_tick) / self._interval_s)
            member.tokens_at_tick = num_tokens
        self._meter.record(
            tokens_per_s=sum(rates) / len(rates) if rates else 0.0,
            was_saturated=self._was_saturated and num_waiting > 0,
            interval_s=self._interval_s,
        )
        self._arrivals.record(self.num_arrivals, self._interval_s)

    def _observe(self, now_s: float, num_waiting: int) -> Observation:
        fleet, scaler = self._fleet, self._scaler
        num_taken = self._num_taken()
        num_running = sum(min(member.num_rows, self._rows_per_replica) for member in fleet.members.values())
        return Observation(
            now_s=now_s,
            rows_waiting=num_waiting + num_taken - num_running,
            rows_running=num_running,
            arrival_rows_per_s=self._arrivals.rows_per_s,
            tokens_per_row=self._tokens_per_row(now_s),
            tokens_per_s_per_replica=self._meter.tokens_per_s_per_replica,
            rows_per_replica=self._rows_per_replica,
            startup_s=fleet.startup_s,
            num_ready=fleet.count(ReplicaState.READY),
            num_pending=fleet.count(ReplicaState.PENDING, ReplicaState.STARTING),
            num_nodes_pending=len(fleet.nodes.coming_s),
            target=scaler.target,
            seconds_since_change=scaler.seconds_since_change(now_s),
            min_replicas=scaler.min_replicas,
            max_replicas=scaler.max_replicas,
        )

    def _tokens_per_row(self, now_s: float) -> float | None:
        """None until as many rows are done as run at once: all tokens over one row would be far too many."""
        if self.num_finished < self._rows_per_replica:
            return None
        return mean_tokens_per_row(self._fleet.num_output_tokens(now_s), self.num_finished)

    def _num_taken(self) -> int:
        return sum(member.num_rows for member in self._fleet.members.values())
