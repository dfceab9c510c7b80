"""One engine among several, with the thread that starts it, feeds it and ends it. Made by `raytp.replicas.pool`.

The pool's own thread calls; what becomes of the rows, and of the replica, it reads from a queue of events. So only one
thread ever decides whose a row is.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from raytp.batch_job.rows import Job
from raytp.errors import EngineClosedError
from raytp.outputs import EngineInfo, RequestOutput
from raytp.scaling.window import rows_window
from scheduler.updates import SchedulerStats

_MAX_LEAD = 4
"""One that is ahead of another by more than one row in four that it may have gives rows up."""
_ASK_EVERY_S = 1.0
_IDLE_S = 0.2


class ReplicaEngine(Protocol):
    """What a replica needs of `raytp.LLM`."""

    info: EngineInfo
    model_name: str
    tokenizer: Any

    def complete(self, jobs: Iterable[Job | None]) -> Generator[tuple[int, RequestOutput] | None, None, None]:
        """See `raytp.LLM.complete`."""

    def abort(self, key: int) -> None:
        """See `raytp.LLM.abort`."""

    def abort_all(self) -> None:
        """See `raytp.LLM.abort_all`."""

    def is_recovering(self) -> bool:
        """See `raytp.LLM.is_recovering`."""

    def stats(self, timeout_s: float) -> SchedulerStats:
        """See `raytp.LLM.stats`."""

    def shutdown(self) -> None:
        """See `raytp.LLM.shutdown`."""


ProgressCallback: TypeAlias = Callable[[str, float], None]
"""Told what is being done, and which part of it is done; it raises to end a start-up."""
Start: TypeAlias = Callable[[int, ProgressCallback], ReplicaEngine]
"""Of a replica with a number, counted from 0."""
_WAITING = "waiting for resources"
"""How the stage begins in which they have none."""
_PLACED = ("starting ranks", "joining", "loading weights", "allocating the KV cache", "ready")
"""Stages of a start-up in which its ranks have a place."""


@dataclass(frozen=True, slots=True)
class Ready:
    """It takes rows."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class Finished:
    """A row came back; if its finish_reason is "abort", it was taken back."""

    replica: Replica
    key: int
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Recovering:
    """Its ranks have died and are replaced, or (False) have been."""

    replica: Replica
    is_recovering: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more comes of it. The engine may take seconds more to go."""

    replica: Replica
    error: Exception | None


Event: TypeAlias = Ready | Finished | Recovering | Ended


class State(enum.Enum):
    """Of a replica, as the pool sees it."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    """Finishes what it has."""
    ENDED = "ended"


class Replica:
    """`enter`, `ask`, `take_back`, `finish` and `close` are called by the pool's thread, which alone sets its state."""

    def __init__(self, number: int, start: Start, events: queue.SimpleQueue[Event]) -> None:
        """Begins to start at once."""
        self.number = number
        self.state = State.STARTING
        self.since_s = time.monotonic()
        """When the state began."""
        self.recovering_since_s: float | None = None
        """Since when its ranks are being replaced."""
        self.stage = ("starting", 0.0)
        """How far the start-up is."""
        self.began_s = time.monotonic()
        self.placed_s: float | None = None
        """When there was room for its ranks; None until then."""
        self._waiting_since_s: float | None = None
        self.engine: ReplicaEngine | None = None
        """Set before `Ready`."""
        self.open: dict[int, Job] = {}
        """Rows that it has, oldest first."""
        self.num_done = 0
        self._start = start
        self._events = events
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """None ends it."""
        self._num_sent = 0
        """Rows that the engine has; the thread's own."""
        self._is_closing = False
        self._asked_s = 0.0
        self._was_recovering = False
        self._thread = threading.Thread(target=self._run, name=f"raytp-replica-{number}", daemon=True)
        self._thread.start()

    @property
    def load(self) -> int:
        """Rows that it has."""
        return len(self.open)

    @property
    def rows_at_once(self) -> int:
        """Rows that the engine runs at once."""
        return 0 if self.engine is None else self.engine.info.max_num_seqs

    @property
    def window(self) -> int:
        """Rows that it may have."""
        return rows_window(self.rows_at_once)

    @property
    def waits_for_room(self) -> bool:
        """Whether it is starting, and there is no place for its ranks."""
        return self.placed_s is None and self._waiting_since_s is not None

    @property
    def waited_s(self) -> float:
        """How long there was no place for its ranks; 0 until they have one."""
        if self.placed_s is None or self._waiting_since_s is None:
            return 0.0
        return self.placed_s - self._waiting_since_s

    @property
    def is_busy(self) -> bool:
        """Whether it has rows, and ranks to do them. One that takes no rows any more may be."""
        return self.load > 0 and self.recovering_since_s is None

    @property
    def takes_rows(self) -> bool:
        """Whether it may be given rows, when it has room."""
        return self.state is State.READY and self.recovering_since_s is None

    @property
    def has_room(self) -> bool:
        """Whether it may be given a row."""
        return self.takes_rows and len(self.open) < self.window

    def is_overloaded_beside(self, other: Replica) -> bool:
        """Whether `other` may have rows that wait for this one."""
        return not self.has_room or self.load - other.load > self.window // _MAX_LEAD

    def enter(self, state: State) -> None:
        """Be in it from now on."""
        self.state, self.since_s = state, time.monotonic()

    def ask(self, job: Job) -> None:
        """Give it a row."""
        self.open[job[0]] = job
        self._inbox.put(job)

    def take_back(self, num_rows: int) -> list[Job]:
        """Its newest rows: those that have not left for the engine are returned, and others come with "abort"."""
        unsent: list[Job] = []
        with contextlib.suppress(queue.Empty):
            while len(unsent) < num_rows:
                job = self._inbox.get_nowait()
                if job is None:
                    self._inbox.put(None)
                    break
                unsent.append(self.open.pop(job[0]))
        if self.engine is not None:
            for key in list(self.open)[::-1][: num_rows - len(unsent)]:
                self.engine.abort(key)
        return unsent

    def finish(self) -> None:
        """Take no more rows, and end when those that it has are done; at once if it is still starting."""
        self._is_closing |= self.engine is None
        self._inbox.put(None)

    def close(self) -> None:
        """End it, whatever it does. Does not wait."""
        self._is_closing = True
        self._inbox.put(None)
        if self.engine is not None:
            with contextlib.suppress(Exception):  # it may have died
                self.engine.abort_all()

    def join(self, timeout_s: float) -> bool:
        """Whether nothing of it is left; waits for that."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._start(self.number, self._report)
        except Exception as error:
            self._events.put(Ended(self, error))
            return
        try:
            self.engine = engine
            self.placed_s = self.placed_s or time.monotonic()
            self._events.put(Ready(self))
            self._feed(engine)
        except Exception as error:
            self._events.put(Ended(self, error))
        else:
            self._events.put(Ended(self, None))
        finally:
            with contextlib.suppress(Exception):  # what is left of an engine that died
                engine.shutdown()

    def _report(self, stage: str, fraction: float) -> None:
        self.stage = (stage, fraction)
        if self._waiting_since_s is None and stage.startswith(_WAITING):
            self._waiting_since_s = time.monotonic()
        if self.placed_s is None and stage in _PLACED:
            self.placed_s = time.monotonic()
        if self._is_closing:
            raise EngineClosedError("the replica was ended before it was ready")

    def _feed(self, engine: ReplicaEngine) -> None:
        with closing(engine.complete(self._jobs())) as results:
            for result in results:
                if self._is_closing:
                    return
                if result is None:
                    self._look_after(engine)
                    continue
                self._num_sent -= 1
                self._events.put(Finished(self, *result))

    def _jobs(self) -> Iterator[Job | None]:
        """What the engine is to do; waits a moment where it has nothing."""
        while True:
            try:
                job = self._inbox.get(block=self._num_sent == 0, timeout=_IDLE_S)
            except queue.Empty:
                yield None
                continue
            if job is None:
                return
            self._num_sent += 1
            yield job

    def _look_after(self, engine: ReplicaEngine) -> None:
        """Nothing has come for a while: are there ranks?"""
        now = time.monotonic()
        if now - self._asked_s < _ASK_EVERY_S:
            return
        self._asked_s = now
        is_recovering = engine.is_recovering()
        if is_recovering != self._was_recovering:
            self._was_recovering = is_recovering
            self._events.put(Recovering(self, is_recovering))
