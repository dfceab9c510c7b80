"""The step loop with fake ranks in its own process: who gets what, and that nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import raytp.engine as engine_module
import raytp.succession as succession_module
from raytp.engine import Engine
from raytp.errors import EngineClosedError, EngineError, RankFailedError
from raytp.outputs import CompletionUpdate, Failure, Request
from raytp.transport import Transport
from scheduler.config import SchedulerConfig
from scheduler.errors import RaytpError
from scheduler.sampling_params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.step import Step, StepResult
from tests.control_plane.fake_model import FakeRanks, expected_tokens, make_config
from workers.errors import FrameError

PROMPTLY_S = 3.0


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
        deadline = time.monotonic() + PROMPTLY_S
        while self.engine.stats().num_running:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(make_config())
    yield rig
    rig.engine.close()


@pytest.fixture
def gate(rig: Rig) -> Iterator[threading.Event]:
    """Results arrive only once it is set."""
    event = threading.Event()
    rig.transport.before_receive = lambda: None if event.wait(20) else pytest.fail("nobody opened the gate")
    yield event
    event.set()


def test_results_reach_the_caller_that_asked(rig: Rig) -> None:
    requests = {client: [rig.request(i, [n, i + 1, 3]) for i in range(5)] for n, client in enumerate("abc")}
    for client, some in requests.items():
        rig.engine.submit(client, some)
    for client, some in requests.items():
        updates = rig.collect(client, 5)
        assert len(updates) == 5, "one letter each, since nobody asked for more"
        for update in updates:
            assert (update.token_ids, update.finish_reason) == rig.expected(some[update.request_id])
            assert 0 <= update.timings.first_token_s <= update.timings.finished_s
    assert rig.transport.max_in_flight == 2, "one step ahead"


def test_a_stream_gets_every_token_as_it_comes(rig: Rig) -> None:
    request = rig.request(7, [1, 2, 3], is_stream=True, max_tokens=20)
    tokens = []
    rig.transport.before_receive = lambda: time.sleep(0.02)
    rig.engine.submit("a", [request])
    updates = rig.collect("a", 1)
    assert len(updates) > 5, "they did not come all at once"
    for update in updates:
        assert len(update.token_ids) >= 1
        tokens += update.token_ids
    assert (tokens, updates[-1].finish_reason) == rig.expected(request)
    assert all(update.finish_reason is None for update in updates[:-1])


def test_bad_requests_fail_alone(rig: Rig) -> None:
    good = [rig.request(0, [1, 2]), rig.request(5, [3, 4])]
    bad = [rig.request(1, []), rig.request(2, [1] * 128), rig.request(3, [99]), rig.request(4, [-7])]
    rig.engine.submit("a", [good[0], *bad, good[1]])
    updates = {update.request_id: update for update in rig.collect("a", 6)}
    for request in good:
        update = updates[request.request_id]
        assert (update.token_ids, update.finish_reason) == rig.expected(request)
    messages = [updates[request.request_id].error or "" for request in bad]
    for message, part in zip(messages, ["empty", "max_model_len=128", "token id 99", "token id -7"], strict=True):
        assert part in message
    assert all(updates[request.request_id].finish_reason == "error" for request in bad)


def test_a_sequence_that_outgrows_the_pool_fails_alone() -> None:
    rig = Rig(make_config(num_kv_blocks=2, block_size=4))
    requests = [rig.request(i, [i], max_tokens=[20, 3][i % 2]) for i in range(6)]
    rig.engine.submit("a", requests)
    for update in rig.collect("a", 6):
        assert (update.token_ids, update.finish_reason) == rig.expected(requests[update.request_id])
        assert ("the KV cache holds 8" in (update.error or "")) == (update.request_id % 2 == 0)
    rig.engine.close()


def test_n_completions_have_an_index_and_a_seed_each(rig: Rig) -> None:
    rig.engine.submit("a", [rig.request(0, [1, 2, 3], n=3, seed=5, temperature=1.0)])
    updates = rig.collect("a", 3)
    assert sorted(update.index for update in updates) == [0, 1, 2]
    seeds = {settings.seed for settings in rig.transport._ranks._settings.values()}
    assert len(seeds) == 3
    assert 5 in seeds, "completion 0 is what n=1 gives"
    rig.engine.submit("a", [rig.request(1, [], n=3)])
    assert sorted(update.index for update in rig.collect("a", 3)) == [0, 1, 2]


def test_abort_ends_one_completion_one_request_or_all_of_a_caller(rig: Rig, gate: threading.Event) -> None:
    rig.engine.submit("a", [rig.request(i, [i + 1], n=2) for i in range(3)])
    rig.engine.submit("b", [rig.request(0, [1])])
    rig.engine.abort("a", 0, 1, "stop")
    rig.engine.abort("a", 1, None, "abort")
    rig.engine.abort("a", 77, None, "abort")
    rig.engine.abort("nobody", None, None, "abort")
    gate.set()
    ends = {(u.request_id, u.index): u.finish_reason for u in rig.collect("a", 6)}
    assert ends == {
        (0, 0): "length", (0, 1): "stop", (1, 0): "abort", (1, 1): "abort", (2, 0): "length", (2, 1): "length"
    }  # fmt: skip
    assert [update.finish_reason for update in rig.collect("b", 1)] == ["length"]


def test_forget_ends_what_a_caller_has_running_and_nothing_else(rig: Rig, gate: threading.Event) -> None:
    rig.engine.submit("a", [rig.request(i, [i + 1], max_tokens=100, is_stream=True) for i in range(4)])
    rig.engine.submit("b", [rig.request(0, [1, 2])])
    rig.engine.forget("a")
    gate.set()
    assert [update.finish_reason for update in rig.collect("b", 1)] == ["length"]
    rig.wait_until_idle()
    assert rig.engine.stats().num_free_blocks == rig.config.num_kv_blocks
    assert list(rig.engine._mailboxes) == ["b"], "a forgotten caller leaves nothing behind"


def test_forget_wakes_a_caller_that_still_waits(rig: Rig) -> None:
    answers: list[list[CompletionUpdate]] = []
    waiter = threading.Thread(target=lambda: answers.append(rig.engine.poll("a", 20)))
    waiter.start()
    time.sleep(0.1)
    rig.engine.forget("a")
    waiter.join(PROMPTLY_S)
    assert answers == [[]]


def test_a_silent_caller_is_forgotten_and_told_so_if_it_comes_back() -> None:
    rig = Rig(make_config(), silence_timeout_s=0.4)
    rig.transport.before_receive = lambda: time.sleep(0.02)
    for client_id in ("silent", "polling", "paused"):
        rig.engine.submit(client_id, [rig.request(0, [1, 2], max_tokens=60)])
    start = time.monotonic()
    while "silent" in rig.engine._mailboxes:
        assert time.monotonic() - start < PROMPTLY_S
        rig.engine.poll("polling", 0.05)
        rig.engine.keep_waiting(["paused", "unknown"])
    assert time.monotonic() - start >= 0.4
    assert sorted(rig.engine._mailboxes) == ["paused", "polling"]
    assert rig.engine.stats().num_running == 2
    for come_back in (
        lambda: rig.engine.poll("silent", 20),
        lambda: rig.engine.submit("silent", [rig.request(1, [1])]),
    ):
        with pytest.raises(EngineError, match=r"heard nothing of this caller for 0\.4 s"):
            come_back()
    rig.engine.close()


def test_a_silent_caller_is_forgotten_while_nothing_runs() -> None:
    rig = Rig(make_config(), silence_timeout_s=0.2)
    rig.engine.submit("silent", [rig.request(0, [1, 2])])
    assert list(rig.engine._mailboxes) == ["silent"]
    deadline = time.monotonic() + PROMPTLY_S
    while rig.engine._mailboxes:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rig.engine.close()


def test_poll_returns_empty_after_its_timeout(rig: Rig) -> None:
    start = time.monotonic()
    assert rig.engine.poll("a", 0.1) == []
    assert 0.09 < time.monotonic() - start < PROMPTLY_S


def _waiters(engine: Engine, num_waiters: int) -> tuple[list[threading.Thread], list[Exception]]:
    """Threads that wait for news that never comes, and what they raised."""
    raised: list[Exception] = []

    def wait(client_id: str) -> None:
        try:
            while True:
                engine.poll(client_id, 60)
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=wait, args=(f"waiter {i}",), daemon=True) for i in range(num_waiters)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    return threads, raised


def _fail_sometimes(failures: list[int], every: int) -> Callable[[], None]:
    """Raises at each `every`-th call, and counts that."""
    calls = iter(range(1, 100_000))

    def fail() -> None:
        if next(calls) % every == 0:
            failures.append(1)
            raise RankFailedError("rank 1 died") if len(failures) % 2 else FrameError("bad frame")

    return fail


def test_ranks_that_die_again_and_again_change_no_token(rig: Rig) -> None:
    failures: list[int] = []
    rig.transport.before_receive = rig.ranks.before_receive = _fail_sometimes(failures, every=9)
    requests = [rig.request(i, [1, 2, i], max_tokens=40) for i in range(6)]
    rig.engine.submit("a", requests)
    for update in rig.collect("a", 6):
        expected = rig.expected(requests[update.request_id])
        assert (update.token_ids, update.finish_reason) == expected
    assert len(failures) == len(rig.ranks.reports) >= 4
    assert rig.ranks.reports[0] == "rank 1 died, seen closely"
    assert rig.transport.is_closed


def test_callers_are_served_while_the_ranks_are_built_again(rig: Rig) -> None:
    """They may ask, submit and abort; what they have asked for goes on with the new ranks."""
    failures: list[int] = []
    rig.transport.before_receive = _fail_sometimes(failures, every=3)
    rig.ranks.gate.clear()
    first = rig.request(0, [1, 2], max_tokens=20)
    rig.engine.submit("a", [first, rig.request(1, [3, 4], max_tokens=20)])
    deadline = time.monotonic() + PROMPTLY_S
    while not rig.ranks.reports:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rig.engine.abort("a", 1, None, "abort")
    rig.engine.submit("a", [rig.request(2, [5])])
    assert rig.engine.poll("a", 1.0)[0].finish_reason == "abort"
    assert rig.engine.stats().num_waiting == 2
    assert rig.engine.stats().num_running == 0
    rig.ranks.gate.set()
    updates = {update.request_id: update for update in rig.collect("a", 2)}
    assert updates[0].token_ids == rig.expected(first)[0]
    assert updates[2].finish_reason == "length"


def test_an_engine_is_closed_while_its_ranks_are_built_again(rig: Rig) -> None:
    rig.transport.before_receive = _fail_sometimes([], every=2)
    rig.ranks.gate.clear()
    rig.engine.submit("a", [rig.request(0, [1, 2])])
    deadline = time.monotonic() + PROMPTLY_S
    while not rig.ranks.reports:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    start = time.monotonic()
    rig.engine.close()
    assert time.monotonic() - start < PROMPTLY_S
    with pytest.raises(EngineClosedError):
        rig.engine.poll("a", 5)
    rig.ranks.gate.set()


def test_an_engine_closed_as_new_ranks_are_ready_tells_them_to_end() -> None:
    """The step loop is kept from taking them."""
    rig = Rig(make_config())
    rig.transport.before_receive = _fail_sometimes([], every=1)
    rig.ranks.gate.clear()
    rig.engine.submit("a", [rig.request(0, [1, 2])])
    deadline = time.monotonic() + PROMPTLY_S
    while not rig.ranks.reports:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        go_on.wait(20)

    rig.engine._commands.put(hold)
    assert is_held.wait(PROMPTLY_S)
    rig.ranks.gate.set()
    while not rig.ranks.transports:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    rig.engine._is_closing = True
    go_on.set()
    rig.engine.close()
    assert [transport.is_closed for transport in rig.ranks.transports] == [True]


def test_an_idle_engine_takes_more_ranks_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession_module, "_LOOK_FOR_ROOM_EVERY_S", 0.0)
    rig = Rig(make_config())
    rig.transport.before_receive = lambda: time.sleep(0.01)
    requests = [rig.request(i, [i, 2], max_tokens=50) for i in range(3)]
    rig.engine.submit("a", requests)
    rig.ranks.rooms = ["there is room"]
    for update in rig.collect("a", 3):
        assert (update.token_ids, update.finish_reason) == rig.expected(requests[update.request_id])
    deadline = time.monotonic() + PROMPTLY_S
    while not rig.ranks.transports:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert rig.transport.is_closed, "the old ranks are told to end"
    rig.engine.submit("a", requests)
    for update in rig.collect("a", 3):
        assert (update.token_ids, update.finish_reason) == rig.expected(requests[update.request_id])
    assert rig.ranks.reports == ["there is room"]
    rig.engine.close()


def test_only_an_abort_that_ends_something_is_a_point_for_faults(rig: Rig, gate: threading.Event) -> None:
    rig.engine.submit("a", [rig.request(0, [1]), rig.request(1, [2])])
    rig.engine.abort("a", 0, None, "abort")
    rig.engine.abort("a", 7, None, "abort")
    gate.set()
    rig.collect("a", 2)
    rig.engine.forget("a")
    rig.wait_until_idle()
    assert rig.ranks.reached == ["abort"]


def test_ranks_that_never_finish_a_step_are_given_up(rig: Rig) -> None:
    rig.transport.before_receive = rig.ranks.before_receive = _fail_sometimes([], every=1)
    rig.engine.submit("a", [rig.request(i, [1, i]) for i in range(30)])

    def wait() -> None:
        while True:
            rig.engine.poll("a", 5)

    with pytest.raises(
        EngineError, match=r"died 20 times in a row .*\(max_restarts=3\), 16 of them with one request alone"
    ):
        wait()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RankFailedError("rank 1 died"), RankFailedError),
        (KeyError("oops"), EngineError),
    ],
    ids=["no new ranks", "bug"],
)
def test_a_transport_that_raises_ends_every_waiter_at_once(rig: Rig, error: Exception, kind: type[Exception]) -> None:
    def fail() -> None:
        raise error

    rig.ranks.refusal = RankFailedError("rank 1 died")
    rig.transport.before_receive = fail
    threads, raised = _waiters(rig.engine, 5)
    start = time.monotonic()
    rig.engine.submit("a", [rig.request(0, [1])])
    for thread in threads:
        thread.join(PROMPTLY_S)
    assert [type(each) for each in raised] == [kind] * 5
    assert all(str(error).strip("'") in str(each) for each in raised)
    for call in (
        lambda: rig.engine.poll("late", 60),
        lambda: rig.engine.submit("late", [rig.request(0, [1])]),
        lambda: rig.engine.stats(),
    ):
        with pytest.raises(kind):
            call()
    assert time.monotonic() - start < PROMPTLY_S
    rig.engine._thread.join(PROMPTLY_S)
    assert rig.transport.is_closed, "the ranks are told to end"
    rig.engine.close()
    with pytest.raises(kind) as raised_late:
        rig.engine.poll("late", 60)
    assert "shut down" not in str(raised_late.value), "the first failure is the one to tell"


def test_close_ends_every_waiter_and_the_ranks(rig: Rig) -> None:
    threads, raised = _waiters(rig.engine, 3)
    rig.engine.submit("waiter 0", [rig.request(0, [1] * 20, max_tokens=100)])
    rig.engine.close()
    rig.engine.close()
    for thread in threads:
        thread.join(PROMPTLY_S)
    assert [type(each) for each in raised] == [EngineClosedError] * 3
    assert rig.transport.is_closed
    with pytest.raises(EngineClosedError, match="shut down"):
        rig.engine.submit("a", [rig.request(0, [1])])


def test_close_does_not_wait_for_ranks_that_never_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_CLOSE_TIMEOUT_S", 0.3)
    is_waiting, stuck = threading.Event(), threading.Event()

    def wait() -> None:
        is_waiting.set()
        stuck.wait(30)

    rig.transport.before_receive = wait
    threads, raised = _waiters(rig.engine, 1)
    rig.engine.submit("a", [rig.request(0, [1])])
    assert is_waiting.wait(PROMPTLY_S)
    start = time.monotonic()
    rig.engine.close()
    threads[0].join(PROMPTLY_S)
    assert 0.3 <= time.monotonic() - start < PROMPTLY_S
    assert [type(each) for each in raised] == [EngineClosedError]
    stuck.set()
    rig.engine._thread.join(PROMPTLY_S)
    assert not rig.engine._thread.is_alive()


def test_many_threads_submit_poll_abort_and_read_stats_at_once() -> None:
    rig = Rig(make_config(num_kv_blocks=24, max_num_seqs=5, max_num_batched_tokens=11))
    failures: list[BaseException] = []

    def caller(number: int) -> None:
        try:
            client = f"client {number}"
            for turn in range(6):
                first = turn * 10
                requests = [
                    rig.request(
                        first + i, [number % 7, i, turn], is_stream=bool(i % 2), max_tokens=1 + (number + i) % 6
                    )
                    for i in range(4)
                ]
                rig.engine.submit(client, requests)
                rig.engine.abort(client, first + 3, None, "abort")
                rig.engine.stats()
                tokens: dict[int, list[int]] = {}
                ends: dict[int, str] = {}
                for update in rig.collect(client, 4):
                    tokens.setdefault(update.request_id, []).extend(update.token_ids)
                    if update.finish_reason is not None:
                        ends[update.request_id] = update.finish_reason
                for request in requests[:3]:
                    assert (tokens[request.request_id], ends[request.request_id]) == rig.expected(request)
            rig.engine.forget(client)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=caller, args=(number,), daemon=True) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), "deadlock"
    assert not failures
    rig.wait_until_idle()
    stats = rig.engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_free_blocks) == (0, 0, 24)
    assert not rig.engine._mailboxes
    assert not rig.engine._completions
    rig.engine.close()
