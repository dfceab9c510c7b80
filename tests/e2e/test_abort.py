"""Whoever asked may abort, from any thread: what was aborted ends, its blocks come back, the others notice nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raytp import LLM, RequestOutput, SamplingParams
from tests.e2e.checkpoints import TRIVIA
from tests.e2e.conftest import EngineCache

PREFIX = [5 + i % 40 for i in range(200)]
PROMPTS = [[*PREFIX, 50 + i, 60 + i] for i in range(6)]
LONG = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)


@pytest.fixture
def llm(engines: EngineCache) -> LLM:
    """Computes a prompt of PROMPTS in 13 chunks."""
    return engines.get(TRIVIA, max_num_batched_tokens=16, max_num_seqs=4)


_references: list[list[int]] = []


@pytest.fixture
def undisturbed(llm: LLM) -> list[list[int]]:
    """What PROMPTS give when nobody aborts anything."""
    if not _references:
        _references.extend(output.token_ids for output in llm.generate(PROMPTS, LONG, cache_salt="undisturbed"))
    return _references


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """The call's result appears in the list."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def assert_all_is_free(llm: LLM) -> None:
    wait_until(lambda: llm.stats().num_running == llm.stats().num_waiting == 0)
    assert llm.stats().num_free_blocks == llm.info.num_kv_blocks


def assert_cut_off(output: RequestOutput, whole: list[int]) -> None:
    assert output.finish_reason == "abort"
    assert len(output.token_ids) < len(whole)
    assert output.token_ids == whole[: len(output.token_ids)]


@pytest.mark.parametrize("num_tokens_first", [20, 400], ids=["prefilled", "decoding"])
def test_one_of_several_that_share_their_prefix(llm: LLM, undisturbed: list[list[int]], num_tokens_first: int) -> None:
    """The first, whose blocks the others use, when it has been computed in part or answers; and one that waits."""
    before = llm.stats().num_computed_tokens
    thread, results = in_thread(lambda: llm.generate(PROMPTS, LONG, cache_salt=f"shared {num_tokens_first}"))
    wait_until(lambda: llm.stats().num_computed_tokens - before >= num_tokens_first)
    llm.abort(0)
    llm.abort(5)
    llm.abort("nobody's")
    thread.join()
    (outputs,) = results
    for index, (output, whole) in enumerate(zip(outputs, undisturbed, strict=True)):
        if index in (0, 5):
            assert_cut_off(output, whole)
        else:
            assert output.token_ids == whole
    assert_all_is_free(llm)


def test_a_stream_is_aborted_by_its_handle_before_or_while_it_is_read(llm: LLM, undisturbed: list[list[int]]) -> None:
    other, aborted, unread = (llm.stream(PROMPTS[i], LONG) for i in (0, 1, 2))
    first = next(other), next(aborted)
    aborted.abort()
    unread.abort()
    rest = list(aborted)
    assert rest[-1].finish_reason == "abort"
    so_far = first[1].token_ids + [token for chunk in rest for token in chunk.token_ids]
    assert so_far == undisturbed[1][: len(so_far)]
    assert [chunk.finish_reason for chunk in unread][-1] == "abort"
    assert first[0].token_ids + [token for chunk in other for token in chunk.token_ids] == undisturbed[0]
    aborted.abort()  # a second time does nothing
    assert_all_is_free(llm)


def test_requests_of_complete_are_aborted_by_their_keys(llm: LLM, undisturbed: list[list[int]]) -> None:
    jobs = [("even" if i % 2 == 0 else i, prompt, LONG) for i, prompt in enumerate(PROMPTS)]
    finished: Iterator[Any] = llm.complete(jobs)
    outputs = []
    while len(outputs) < len(jobs):
        item = next(finished)
        llm.abort("even")
        outputs += [] if item is None else [item]
    assert "abort" in [output.finish_reason for key, output in outputs if key == "even"]
    for key, output in outputs:
        if key != "even":
            assert output.token_ids == undisturbed[key]
    assert_all_is_free(llm)


def test_abort_of_all_ends_every_call_and_leaves_the_engine_usable(llm: LLM, undisturbed: list[list[int]]) -> None:
    """Of 3,000 prompts most have not even been sent; of `complete`, no more jobs are read."""
    num_read = 0

    def endless() -> Iterator[Any]:
        nonlocal num_read
        while True:
            num_read += 1
            yield num_read, [7, 8], LONG

    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    many, outputs = in_thread(lambda: llm.generate([[5]] * 3000, LONG))
    completing, completed = in_thread(lambda: [item for item in llm.complete(endless()) if item is not None])
    wait_until(lambda: llm.stats().num_waiting > 1024)
    llm.abort_all()
    for thread in (many, completing):
        thread.join(30)
        assert not thread.is_alive()
    assert list(stream)[-1].finish_reason == "abort"
    assert len(outputs[0]) == 3000
    assert {output.finish_reason for output in outputs[0]} <= {"abort", "length"}
    assert outputs[0][-1].finish_reason == "abort"
    assert sorted(key for key, _ in completed[0]) == list(range(1, num_read + 1))
    assert llm.generate(PROMPTS[1], LONG)[0].token_ids == undisturbed[1]
    assert_all_is_free(llm)
