"""Rows of an experiment on Ray: what is asked, when it is there, and that each ends once."""

from __future__ import annotations

import pytest

from raytp.errors import EngineError
from raytp.experiment.rows import Rows
from raytp.outputs import CompletionOutput, RequestOutput, Timings
from raytp.simulator.requests import SimulatedRequest


def requests_at(*moments):
    return [SimulatedRequest(arrival_s=moment, prompt_tokens=9, output_tokens=4) for moment in moments]


def answer(num_tokens=4, first_s=1.0, finished_s=3.0, **more):
    settings = {"index": 0, "text": "", "token_ids": [1] * num_tokens, "finish_reason": "length"} | more
    timings = Timings(first_token_s=first_s, finished_s=finished_s)
    output = CompletionOutput(timings=timings, **settings)
    return RequestOutput(prompt=None, prompt_token_ids=[1], num_cached_tokens=0, outputs=[output])


def test_rows_are_there_when_they_arrive():
    now = [0.0]
    rows = Rows(requests_at(0.0, 0.0, 2.0, 5.0), seed=0, vocab_size=100, clock=lambda: now[0])
    jobs = rows.jobs()
    assert (rows.num_unread(), rows.num_arrived()) == (2, 0)
    assert [next(jobs)[0], next(jobs)[0], next(jobs)] == [0, 1, None]
    now[0] = 2.0
    assert (rows.num_unread(), rows.num_arrived()) == (1, 1)
    assert [next(jobs)[0], next(jobs)] == [2, None]
    now[0] = 9.0
    assert (rows.num_unread(), rows.num_arrived()) == (1, 2)
    assert next(jobs)[0] == 3
    assert next(jobs, "end") == "end"


def test_prompts_depend_on_the_seed_and_agree_in_their_prefix():
    shared = {"arrival_s": 0.0, "output_tokens": 1, "prefix_id": "a", "prefix_tokens": 30}
    requests = [SimulatedRequest(prompt_tokens=40, **shared), SimulatedRequest(prompt_tokens=35, **shared)]
    first, again, other = (Rows(requests, seed, 50, clock=lambda: 0.0) for seed in (1, 1, 2))
    one, two = first.prompt(0), first.prompt(1)
    assert (len(one), len(two)) == (40, 35)
    assert one[:30] == two[:30]
    assert one[30:35] != two[30:35]
    assert set(one + two) <= set(range(50))
    assert [again.prompt(0), again.prompt(1)] == [one, two]
    assert other.prompt(0) != one


def test_each_row_ends_once():
    now = [10.0]
    rows = Rows(requests_at(0.0, 0.0), seed=0, vocab_size=100, clock=lambda: now[0])
    rows.finish(1, answer())
    times = rows.times[1]
    assert (times.first_token_s, times.finish_s, times.output_tokens, times.error) == (8.0, 10.0, 4, None)
    with pytest.raises(EngineError, match="row 1 was answered twice"):
        rows.finish(1, answer())
    with pytest.raises(EngineError, match="1 rows were lost, row 0 the first"):
        rows.check_all_finished()
    rows.finish(0, answer(num_tokens=0, finish_reason="error", error="too long"))
    assert rows.times[0].error == "too long"
    rows.check_all_finished()


def test_tokens_are_spread_over_the_time_that_they_took():
    now = [10.0]
    rows = Rows(requests_at(0.0, 0.0, 0.0), seed=0, vocab_size=100, clock=lambda: now[0])
    rows.finish(0, answer())  # from 8 s to 10 s
    now[0] = 12.0
    rows.finish(1, answer(num_tokens=8, first_s=0.0, finished_s=4.0))
    assert rows.tokens_by([0.0, 8.0, 9.0, 10.0, 11.0, 12.0, 20.0]) == pytest.approx([0, 0, 4, 8, 10, 12, 12])
