"""An engine on fake ranks, in the test's own process. Called by the tests of the engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from raytp.engine import Engine
from raytp.errors import EngineError
from raytp.outputs import CompletionUpdate, Failure, Request
from raytp.transport import Transport
from scheduler.config import SchedulerConfig
from scheduler.errors import RaytpError
from scheduler.sampling_params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.step import Step, StepResult
from tests.control_plane.fake_model import FakeRanks, expected_tokens

PROMPTLY_S = 3.0


def wait_until(holds: Callable[[], object]) -> None:
    """Fails if it does not within PROMPTLY_S."""
    deadline = time.monotonic() + PROMPTLY_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FakeTransport(Transport):
    """Runs each step at once; fails, or waits, where a test says so."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._ranks = FakeRanks(config)
        self._results: deque[StepResult] = deque()
        self.before_receive: Callable[[], None] = lambda: None
        self.max_in_flight = 0
        self.is_closed = False

    def send(self, step: Step) -> None:
        self._results.append(self._ranks.execute(step))
        self.max_in_flight = max(self.max_in_flight, len(self._results))

    def receive(self) -> StepResult:
        self.before_receive()
        return self._results.popleft()

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class FakeRankSource:
    """Has new ranks ready, unless a test says otherwise; rebuilding waits while `gate` is not set."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.before_receive: Callable[[], None] = lambda: None
        """Of every new transport."""
        self.refusal: EngineError | None = None
        self.reports: list[str] = []
        self.transports: list[FakeTransport] = []
        self.rooms: list[str] = []
        self.reached: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def examine(self, failure: RaytpError) -> Failure:
        return Failure(report=f"{failure}, seen closely", is_accident=False)

    def rebuild(self, report: str) -> tuple[Transport, int]:
        self.reports.append(report)
        assert self.gate.wait(20)
        if self.refusal is not None:
            raise self.refusal
        transport = FakeTransport(self._config)
        transport.before_receive = self.before_receive
        self.transports.append(transport)
        return transport, self._config.num_kv_blocks

    def room_for_more(self) -> str | None:
        return self.rooms.pop() if self.rooms else None

    def reach(self, point: str) -> None:
        self.reached.append(point)


class Rig:
    """An engine on fake ranks."""

    def __init__(self, config: SchedulerConfig, **options: Any) -> None:
        self.config = config
        self.transport = FakeTransport(config)
        self.scheduler = Scheduler(config)
        self.ranks = FakeRankSource(config)
        self.engine = Engine(self.scheduler, self.transport, self.ranks, max_restarts=3, **options)

    def request(self, request_id: int, prompt: list[int], *, is_stream: bool = False, **sampling: Any) -> Request:
        return Request(
            request_id=request_id,
            prompt=np.array(prompt, dtype=np.int32),
            sampling=ResolvedSampling(**{"max_tokens": 8} | sampling),
            cache_salt="",
            wants_every_token=is_stream,
        )

    def expected(self, request: Request) -> tuple[list[int], str]:
        return expected_tokens(request.prompt.tolist(), request.sampling, self.config)

    def collect(self, client_id: str, num_completions: int) -> list[CompletionUpdate]:
        """All news until so many completions have ended."""
        updates: list[CompletionUpdate] = []
        deadline = time.monotonic() + 20
        while sum(update.finish_reason is not None for update in updates) < num_completions:
            assert time.monotonic() < deadline, "a completion never ended"
            updates += self.engine.poll(client_id, 1.0)
        return updates

    def wait_until_idle(self) -> None:
        wait_until(lambda: not self.engine.stats().num_running)
