"""What a job's replicas have shown they can do, as policies are told. Called by `raytp.replicas.pool`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from raytp.outputs import RequestOutput
from raytp.replicas.replica import Replica, State
from raytp.scaling import ArrivalMeter, Observation, RateMeter, Scaler, StartMeter

_INTERVAL_S = 5.0
"""Rows come in clumps; a rate is taken over so long."""


class Gauge:
    """Counts rows and tokens, and makes observations of them."""

    def __init__(self) -> None:
        self._began_s = self._interval_s = time.monotonic()
        self._observed_s: float | None = None
        self._tokens, self._arrivals, self._starts = RateMeter(), ArrivalMeter(), StartMeter()
        self._num_arrived = 0
        self._num_rows = 0
        self._num_tokens = 0
        self._seen: Counter[Replica] = Counter()
        """Tokens of rows that were done in the present interval, by who did them."""
        self._fresh: Counter[Replica] = Counter()
        """Those among them that were made in it, too."""
        self._was_saturated = True
        self._had_ready = False
        """Whether a replica took rows when the policy was asked last."""

    def count_row(self, replica: Replica, output: RequestOutput) -> None:
        """A row is done."""
        num_tokens = sum(len(each.token_ids) for each in output.outputs)
        took_s = max(1e-9, output.timings.finished_s - output.timings.first_token_s)
        self._num_rows += 1
        self._num_tokens += num_tokens
        self._seen[replica] += num_tokens
        self._fresh[replica] += round(num_tokens * min(1.0, (time.monotonic() - self._interval_s) / took_s))

    def count_start(self, replica: Replica) -> None:
        """A replica has just become ready."""
        waited_s = replica.waited_s
        self._starts.record(starting_s=time.monotonic() - replica.began_s - waited_s, waiting_s=waited_s)

    def observe(self, replicas: Sequence[Replica], num_waiting: int, num_arrived: int, scaler: Scaler) -> Observation:
        """The job at this moment.

        `num_waiting` rows have no replica yet, and those that a replica has and does not run wait, too. `num_arrived`
        rows have come since the job began.
        """
        now = time.monotonic()
        self._count_arrivals(now, num_arrived)
        ready = [replica for replica in replicas if replica.takes_rows]
        pending = [replica for replica in replicas if not replica.takes_rows and replica.state is not State.LEAVING]
        rows_at_once = max((replica.rows_at_once for replica in ready), default=1)
        if not self._had_ready:
            self._begin_interval(now)
        self._had_ready = bool(ready)
        self._was_saturated &= all(replica.load >= replica.rows_at_once for replica in ready)
        num_running = sum(min(replica.load, replica.rows_at_once) for replica in replicas)
        self._measure(now, [replica for replica in ready if replica.since_s < self._interval_s], rows_at_once)
        return Observation(
            now_s=now - self._began_s,
            rows_waiting=num_waiting + sum(replica.load for replica in replicas) - num_running,
            rows_running=num_running,
            arrival_rows_per_s=self._arrivals.rows_per_s,
            tokens_per_row=self._num_tokens / self._num_rows if self._num_rows else None,
            tokens_per_s_per_replica=self._tokens.tokens_per_s_per_replica,
            rows_per_replica=rows_at_once,
            startup_s=self._starts.startup_s,
            num_ready=len(ready),
            num_pending=len(pending),
            num_nodes_pending=sum(replica.waits_for_room for replica in pending),
            target=scaler.target,
            seconds_since_change=scaler.seconds_since_change(now - self._began_s),
            min_replicas=scaler.min_replicas,
            max_replicas=scaler.max_replicas,
        )

    def _count_arrivals(self, now: float, num_arrived: int) -> None:
        """Each time that a policy is asked but the first, as the simulator does."""
        before_s, arrivals = self._observed_s, num_arrived - self._num_arrived
        self._observed_s, self._num_arrived = now, num_arrived
        if before_s is not None:
            self._arrivals.record(arrivals, interval_s=max(1e-3, now - before_s))

    def _measure(self, now: float, replicas: Sequence[Replica], rows_at_once: int) -> None:
        """Tokens are seen when their row is done: before as many rows are done as run at once, rates would mislead.

        While replicas have all the rows that they can run, as many tokens of earlier intervals are seen late as of this
        one will be. Otherwise only those count that were made in it: an estimate that never falls must not be too high.
        """
        seconds = now - self._interval_s
        if seconds < _INTERVAL_S:
            return
        if replicas and self._num_rows >= rows_at_once:
            counts = self._seen if self._was_saturated else self._fresh
            rate = sum(counts[replica] for replica in replicas) / seconds / len(replicas)
            self._tokens.record(tokens_per_s=rate, was_saturated=self._was_saturated, interval_s=seconds)
        self._begin_interval(now)

    def _begin_interval(self, now: float) -> None:
        self._interval_s, self._was_saturated = now, True
        self._seen.clear()
        self._fresh.clear()
