"""The step loop with fake ranks in its own process: who gets what, and that nobody waits for ever."""

from __future__ import annotations

import threading
import time

import pytest

from raytp.errors import EngineError
from raytp.outputs import CompletionUpdate
from tests.control_plane.fake_model import make_config
from tests.control_plane.rig import PROMPTLY_S, Rig, wait_until


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
    wait_until(lambda: not rig.engine._mailboxes)
    rig.engine.close()


def test_poll_returns_empty_after_its_timeout(rig: Rig) -> None:
    start = time.monotonic()
    assert rig.engine.poll("a", 0.1) == []
    assert 0.09 < time.monotonic() - start < PROMPTLY_S


def test_only_an_abort_that_ends_something_is_a_point_for_faults(rig: Rig, gate: threading.Event) -> None:
    rig.engine.submit("a", [rig.request(0, [1]), rig.request(1, [2])])
    rig.engine.abort("a", 0, None, "abort")
    rig.engine.abort("a", 7, None, "abort")
    gate.set()
    rig.collect("a", 2)
    rig.engine.forget("a")
    rig.wait_until_idle()
    assert rig.ranks.reached == ["abort"]


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
