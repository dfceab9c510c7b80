"""The step loop when ranks die, again and again or for good, and when it is closed: nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

import raytp.engine as engine_module
import raytp.succession as succession_module
from raytp.engine import Engine
from raytp.errors import EngineClosedError, EngineError, RankFailedError
from tests.control_plane.fake_model import make_config
from tests.control_plane.rig import PROMPTLY_S, Rig, wait_until
from workers.errors import FrameError


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
    wait_until(lambda: rig.ranks.reports)
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
    wait_until(lambda: rig.ranks.reports)
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
    wait_until(lambda: rig.ranks.reports)
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        go_on.wait(20)

    rig.engine._commands.put(hold)
    assert is_held.wait(PROMPTLY_S)
    rig.ranks.gate.set()
    wait_until(lambda: rig.ranks.transports)
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
    wait_until(lambda: rig.ranks.transports)
    assert rig.transport.is_closed, "the old ranks are told to end"
    rig.engine.submit("a", requests)
    for update in rig.collect("a", 3):
        assert (update.token_ids, update.finish_reason) == rig.expected(requests[update.request_id])
    assert rig.ranks.reports == ["there is room"]
    rig.engine.close()


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


def test_a_question_between_two_steps_waits_for_as_long_as_it_says(rig: Rig) -> None:
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        go_on.wait(20)

    rig.transport.before_receive = hold
    rig.engine.submit("a", [rig.request(0, [1])])
    assert is_held.wait(PROMPTLY_S)
    for ask in (rig.engine.stats, rig.engine.step_loop_cpu_s):
        with pytest.raises(EngineError, match=r"timeout_s=0\.2: a long step is under way"):
            ask(0.2)
    threading.Timer(0.5, go_on.set).start()
    rig.engine.stats(PROMPTLY_S)
    rig.collect("a", 1)


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
