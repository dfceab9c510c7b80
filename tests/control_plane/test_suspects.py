"""The ranks die: everything is computed again as if nothing had happened, and a request that kills them ends alone."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from scheduler.step import Step, StepResult
from tests.control_plane.fake_model import FakeRanks, Harness, expected_tokens, make_config, make_sequence

POISON_LEN = 21
"""A prompt of this length kills the ranks."""


class DeadRanksError(Exception):
    """What the engine's transport would raise."""


class MortalRanks(FakeRanks):
    """Die when they compute a sequence whose prompt is POISON_LEN long, once it has `fatal_len` tokens."""

    fatal_len = 0

    def execute(self, step: Step) -> StepResult:
        settings = self._settings | {each.slot: each for each in step.new_slots}
        for slot, seq_len in zip(step.slots.tolist(), step.seq_lens.tolist(), strict=True):
            if settings[slot].num_prompt_tokens == POISON_LEN and seq_len >= self.fatal_len:
                raise DeadRanksError
        return super().execute(step)


def run_to_the_end(harness: Harness) -> int:
    """As the engine does; returns how often the ranks died."""
    num_deaths = 0
    while harness.scheduler.has_unfinished or harness.results:
        try:
            harness.advance(2)
        except DeadRanksError:
            num_deaths += 1
            assert num_deaths < 100
            harness.lose_ranks()
    return num_deaths


def prompts(num: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(50) for _ in range(choose.randint(1, 20))] for _ in range(num)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    poisoned=st.sets(st.integers(0, 11), max_size=3),
    fatal_len=st.sampled_from([0, 21, 25]),
    budget=st.sampled_from([5, 64]),
)
def test_only_the_requests_that_kill_are_lost(seed: int, poisoned: set[int], fatal_len: int, budget: int) -> None:
    config = make_config(max_num_seqs=5, max_num_batched_tokens=budget)
    harness = Harness(config)
    harness.ranks = type("Ranks", (MortalRanks,), {"fatal_len": fatal_len})(config)
    for seq_id, prompt in enumerate(prompts(12, seed)):
        if seq_id in poisoned:
            prompt = [7] * POISON_LEN
        harness.add(make_sequence(seq_id, prompt, max_tokens=26))
    num_deaths = run_to_the_end(harness)
    assert num_deaths <= 5 * len(poisoned)
    for seq_id, story in harness.stories.items():
        if seq_id in poisoned:
            assert story.finish_reason == "error"
            assert story.error is not None
            assert "killed" in story.error
        else:
            harness.assert_as_expected(seq_id)


def test_deaths_that_no_request_causes_convict_nobody() -> None:
    """The ranks are killed again and again, each time a little later."""
    harness = Harness(make_config())
    for seq_id, prompt in enumerate(prompts(20, seed=1)):
        harness.add(make_sequence(seq_id, prompt, max_tokens=40))
    num_deaths = 0
    while harness.scheduler.has_unfinished:
        for _ in range(7):
            harness.advance(2)
        harness.lose_ranks()
        num_deaths += 1
    assert num_deaths > 10
    for seq_id in harness.stories:
        harness.assert_as_expected(seq_id)


def test_two_early_deaths_in_a_row_are_followed_by_trials_that_all_pass() -> None:
    """Everybody is a suspect, and is tried alone; nobody waits for another's whole answer."""
    harness = Harness(make_config())
    for seq_id in range(5):
        harness.add(make_sequence(seq_id, [seq_id, 1, 2], max_tokens=30))
    for _ in range(2):
        harness.advance(2)
        harness.lose_ranks()
    first_steps = []
    while harness.scheduler._suspects.to_try or harness.scheduler._suspects.on_trial:
        harness.advance(2)
        first_steps.append(harness.steps[-1])
    assert {len(step.slots) for step in first_steps[:-1]} == {1}
    assert len(first_steps) < 5 * 6
    harness.run()
    for seq_id in harness.stories:
        harness.assert_as_expected(seq_id)


def test_an_accident_convicts_nobody_not_even_whoever_is_on_trial() -> None:
    harness = Harness(make_config())
    for seq_id in range(3):
        harness.add(make_sequence(seq_id, [seq_id, 1, 2], max_tokens=30))
    for _ in range(2):
        harness.advance(2)
        harness.lose_ranks()
    for _ in range(4):  # each time in the first step of a trial
        harness.advance(2)
        assert harness.scheduler._suspects.on_trial is not None
        harness.lose_ranks(is_accident=True)
    harness.run()
    for seq_id in harness.stories:
        harness.assert_as_expected(seq_id)


def test_one_kill_during_a_trial_convicts_nobody() -> None:
    """Each is tried alone, and the ranks are killed once in every trial."""
    harness = Harness(make_config())
    for seq_id in range(4):
        harness.add(make_sequence(seq_id, [seq_id, 1, 2], max_tokens=30))
    for _ in range(2):
        harness.advance(2)
        harness.lose_ranks()
    killed = set()
    while harness.scheduler.has_unfinished:
        harness.advance(2)
        tried = harness.scheduler._suspects.on_trial
        if tried is not None and tried.seq_id not in killed:
            killed.add(tried.seq_id)
            harness.lose_ranks()
    assert len(killed) == 4
    for seq_id in harness.stories:
        harness.assert_as_expected(seq_id)


@pytest.mark.parametrize("num_kv_blocks", [64, 6, 3])
def test_a_pool_of_another_size(num_kv_blocks: int) -> None:
    """A smaller group has less memory: what no longer fits ends with an error that says so, the others go on."""
    harness = Harness(make_config())
    for seq_id, length in enumerate((3, 14, 30)):
        harness.add(make_sequence(seq_id, list(range(length)), max_tokens=4))
    harness.advance(2)
    harness.lose_ranks()
    smaller = make_config(num_kv_blocks=num_kv_blocks)
    harness.scheduler.replace_pool(num_kv_blocks)
    harness.ranks, harness.config = FakeRanks(smaller), smaller
    harness.run()
    for seq_id, length in enumerate((3, 14, 30)):
        story = harness.stories[seq_id]
        if length > smaller.num_kv_tokens:
            assert "lower max_tokens or give the KV cache more memory" in str(story.error)
        else:
            sampling = harness.sequences[seq_id].sampling
            expected = expected_tokens(np.arange(length).tolist(), sampling, smaller)
            assert (story.token_ids, story.finish_reason) == expected
