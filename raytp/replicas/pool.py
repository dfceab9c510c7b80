"""Several engines in the place of one: rows go to whoever has room, and a replica that is lost gives its rows back.

Made by `raytp.batch_job.engine_choice`; `raytp.batch_job.job` uses it as it uses an `LLM`. All that is decided here, of
rows and of replicas, is decided on the caller's thread, so that each row is answered once. Next hop of a row:
`raytp.replicas.replica`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from raytp.batch_job.rows import Job
from raytp.errors import PlacementError
from raytp.outputs import RequestOutput
from raytp.progress import ProgressBar
from raytp.replicas.backlog import Backlog
from raytp.replicas.crew import Crew, crew_of
from raytp.replicas.failures import Failures
from raytp.replicas.gauge import Gauge
from raytp.replicas.homes import Homes
from raytp.replicas.replica import Ended, Event, Finished, Ready, Recovering, Replica, ReplicaEngine, Start, State
from raytp.scaling import Scaler

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_ASK_AGAIN_S = 0.02
"""The same, where the source of rows has none just now."""
_TICK_S = 1.0
"""How often it is asked how many replicas there should be, and whether rows should move."""
_PATIENCE_S = 5.0
"""How long a replica may be without ranks before others do its rows."""
_MAX_UNPLACED = 32
"""Replicas that look for a place at once: each takes a process."""
_CLOSE_TIMEOUT_S = 20.0


class ReplicaPool:
    """A `raytp.batch_job.rows.Engine`. Use it as a context manager; entered, it has a replica that is ready."""

    def __init__(
        self,
        start: Start,
        scaler: Scaler,
        *,
        num_unread: Callable[[], int] = lambda: 0,
        num_arrived: Callable[[], int] = lambda: 0,
        decide_every_s: float = 0.0,
        homes: Homes[Replica] | None = None,
        show_progress: bool | None = None,
    ) -> None:
        """For the policy: `num_unread` estimates the rows that are there and `complete` has not read yet, and
        `num_arrived` says how many have come since the job began. It is asked every `decide_every_s`, or second.
        """
        self._start = start
        self.scaler = scaler
        self._num_unread = num_unread
        self._num_arrived = num_arrived
        self._decide_every_s = decide_every_s
        self._backlog = Backlog(Homes() if homes is None else homes)
        self._gauge = Gauge()
        self._show_progress = show_progress
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.replicas: list[Replica] = []
        """Those that have not ended."""
        self._ending: list[Replica] = []
        """Those of which something may be left."""
        self.is_closed = False
        self._num_started = 0
        self._failures = Failures()
        self._ticked_s = self._decided_s = 0.0
        self._is_source_dry = False
        """It has no row just now, but will have others."""
        self._has_read_all = False
        self._finished: list[tuple[int, RequestOutput]] = []
        self._first: ReplicaEngine | None = None
        """The first that was ready, which speaks for all."""

    def __enter__(self) -> ReplicaPool:
        try:
            self._wait_for_first()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model_name(self) -> str:
        """See `raytp.LLM`."""
        assert self._first is not None
        return self._first.model_name

    @property
    def tokenizer(self) -> Any:
        """See `raytp.LLM`."""
        assert self._first is not None
        return self._first.tokenizer

    def crew(self) -> Crew:
        """The replicas as they are now."""
        return crew_of(self.replicas)

    @property
    def num_waiting(self) -> int:
        """Rows that are there, and that no replica has."""
        return len(self._backlog) + (0 if self._has_read_all else self._num_unread())

    def complete(self, jobs: Iterable[Job | None]) -> Generator[tuple[int, RequestOutput] | None, None, None]:
        """Answers in the order of completion; see `raytp.LLM.complete`. Need not be entered before.

        Raises what ended the last replica, if no other can be had.
        """
        source = iter(jobs)
        while True:
            self._read(source)
            self._hand_out()
            if self._has_read_all and not self._backlog and not any(replica.open for replica in self.replicas):
                return
            if self._backlog:
                self._check_hope()
            self._take_events(_ASK_AGAIN_S if self._is_source_dry else _POLL_S)
            self._tick()
            finished, self._finished = self._finished, []
            yield from finished or (None,)

    def close(self) -> None:
        """End all replicas, and wait until nothing of them is left, for a while. May be called twice."""
        replicas = self.replicas + self._ending
        for replica in replicas:
            replica.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        left = [each for each in replicas if not each.join(max(0.0, deadline - time.monotonic()))]
        for replica in left:
            logger.warning("replica %d has not ended within %g s", replica.number, _CLOSE_TIMEOUT_S)
        self.replicas, self._ending, self.is_closed = [], left, True

    def _wait_for_first(self) -> None:
        with ProgressBar("starting replicas", self._show_progress, names_stages=True) as bar:
            while self._first is None:
                self._tick(is_needed=True)
                if self.replicas:
                    stage, fraction = max((replica.stage for replica in self.replicas), key=lambda stage: stage[1])
                    num_replicas = len(self.replicas)
                    bar.update(f"{num_replicas} replica{'' if num_replicas == 1 else 's'}: {stage}", fraction)
                self._take_events(0.2)
                self._check_hope()

    def _read(self, source: Iterator[Job | None]) -> None:
        """As many rows as the replicas can have, and as many again, among which those with a home are found."""
        takers = [replica for replica in self.replicas if replica.takes_rows]
        room = max(1, sum(2 * replica.window - replica.load for replica in takers))
        self._is_source_dry = False
        while not self._has_read_all and len(self._backlog) < room:
            try:
                job = next(source)
            except StopIteration:
                self._has_read_all = True
                return
            if job is None:
                self._is_source_dry = True
                return
            self._backlog.add(job, takers)

    def _hand_out(self) -> None:
        """Rows to those with room, the emptiest first."""
        able = [replica for replica in self.replicas if replica.has_room]
        while self._backlog and able:
            replica = min(able, key=lambda each: each.load)
            job = self._backlog.take(replica)
            if job is not None:
                replica.ask(job)
            if job is None or not replica.has_room:
                able.remove(replica)

    def _take_events(self, timeout_s: float) -> None:
        """All that has happened; waits up to `timeout_s` for something to happen."""
        try:
            self._take(self._events.get(timeout=timeout_s))
            while True:
                self._take(self._events.get_nowait())
        except queue.Empty:
            return

    def _take(self, event: Event) -> None:
        replica = event.replica
        if isinstance(event, Finished):
            self._take_output(replica, event.key, event.output)
        elif isinstance(event, Ended):
            self._lose(replica, event.error)
        elif isinstance(event, Ready):
            self._first = self._first or replica.engine
            if replica.state is State.STARTING:  # it may have been told to leave in the meantime
                self._gauge.count_start(replica)
                replica.enter(State.READY)
        elif isinstance(event, Recovering):
            replica.recovering_since_s = time.monotonic() if event.is_recovering else None

    def _take_output(self, replica: Replica, key: int, output: RequestOutput) -> None:
        job = replica.open.pop(key)
        if any(each.finish_reason == "abort" for each in output.outputs):  # nobody but `take_back` ends rows
            self._backlog.give_back([job])
            return
        replica.num_done += 1
        self._failures.forget(replica.number)
        self._gauge.count_row(replica, output)
        self._finished.append((key, output))

    def _lose(self, replica: Replica, error: Exception | None) -> None:
        """A replica has ended: its rows are for others."""
        self.replicas.remove(replica)
        self._ending.append(replica)
        was_leaving = replica.state is State.LEAVING
        replica.enter(State.ENDED)
        self._backlog.leave(replica)
        self._backlog.give_back(replica.open.values())
        num_rows = len(replica.open)
        replica.open.clear()
        if was_leaving or error is None:
            return
        is_of_no_use = replica.num_done == 0 and not isinstance(error, PlacementError)  # a place may be found later
        if is_of_no_use or self._first is None:
            self._failures.add(error, self._num_started)
        if self.replicas or self._may_start:
            logger.warning("replica %d was lost, and others do its %d rows: %s", replica.number, num_rows, error)

    def _check_hope(self) -> None:
        """Raises what ended the first of the replicas that failed, if none is left and no other may be started."""
        if not self.replicas and not self._may_start:
            raise self._failures.first

    @property
    def _may_start(self) -> bool:
        return self._failures.allow_more(has_had_one=self._first is not None)

    def _tick(self, is_needed: bool = False) -> None:
        """Once a second: as many replicas as there should be, and rows away from those that cannot do them."""
        now = time.monotonic()
        if now - self._ticked_s < _TICK_S:
            return
        self._ticked_s = now
        self._ending = [replica for replica in self._ending if not replica.join(0.0)]
        self._scale(now, is_needed)
        for replica in self.replicas:
            since_s = replica.recovering_since_s
            if since_s is not None and now - since_s > _PATIENCE_S:
                self._relieve(replica)
        if self._has_read_all and not self._backlog:
            self._balance()

    def _scale(self, now: float, is_needed: bool) -> None:
        num_waiting = max(int(is_needed), self.num_waiting)  # one is needed before there are rows, to say what it is
        if now - self._decided_s >= self._decide_every_s:
            self._decided_s = now
            seen = self._gauge.observe(self.replicas, num_waiting, self._num_arrived(), self.scaler)
            self.scaler.decide(seen)
        target = max(self.scaler.target, 1 if num_waiting else 0)
        staying = [replica for replica in self.replicas if replica.state is not State.LEAVING]
        is_work_left = not self._has_read_all or bool(self._backlog)
        wanted = target if is_work_left else min(target, 1)
        num_new = min(wanted - len(staying), _MAX_UNPLACED - self.crew().num_waiting)
        staying += [self._add() for _ in range(num_new if self._may_start else 0)]
        staying.sort(key=lambda replica: (not replica.takes_rows, replica.state is State.STARTING, -replica.load))
        for replica in staying[target:]:
            replica.enter(State.LEAVING)
            self._backlog.leave(replica)
            replica.finish()

    def _add(self) -> Replica:
        replica = Replica(self._num_started, self._start, self._events)
        self._num_started += 1
        self.replicas.append(replica)
        return replica

    def _relieve(self, replica: Replica) -> None:
        """Its rows to others, if there are any who can do them."""
        if any(other.takes_rows for other in self.replicas):
            self._backlog.leave(replica)
            self._backlog.give_back(replica.take_back(replica.load))

    def _balance(self) -> None:
        """No more rows come: those that only wait at one replica are for one that has less to do."""
        ready = [replica for replica in self.replicas if replica.takes_rows]
        if len(ready) < 2:
            return
        most, least = max(ready, key=lambda each: each.load), min(ready, key=lambda each: each.load)
        num_rows = min(most.load - most.rows_at_once, (most.load - least.load) // 2)
        if num_rows > 0:
            self._backlog.give_back(most.take_back(num_rows))
