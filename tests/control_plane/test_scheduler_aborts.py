"""Sequences aborted at every stage: the others go on, to the fake ranks' tokens."""

from __future__ import annotations

import pytest

from tests.control_plane.fake_model import Harness, expected_tokens, make_config, make_sequence

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def test_abort_while_waiting() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    harness.add(make_sequence(0, PROMPT))
    harness.add(make_sequence(1, PROMPT))
    harness.advance(2)
    harness.abort(1)
    harness.run()
    harness.assert_as_expected(0)
    assert (harness.stories[1].token_ids, harness.stories[1].finish_reason) == ([], "abort")


def test_abort_while_the_prompt_is_being_computed_in_chunks() -> None:
    harness = Harness(make_config(max_num_batched_tokens=4))
    harness.add(make_sequence(0, PROMPT))
    harness.add(make_sequence(1, PROMPT))
    harness.schedule()
    harness.abort(0)
    assert harness.scheduler.stats().num_free_blocks == 64
    harness.run()
    harness.assert_as_expected(1)
    assert harness.stories[1].num_cached_tokens == 4, "its first chunk had been sent, so it may be shared"


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_abort_while_a_step_is_in_flight(turns: int) -> None:
    harness = Harness(make_config())
    harness.add(make_sequence(0, PROMPT))
    harness.add(make_sequence(1, PROMPT[::-1]))
    for _ in range(turns):
        harness.advance(2)
    assert harness.scheduler.num_in_flight == 1
    harness.abort(0)
    harness.add(make_sequence(2, [3, 4, 5]))  # takes its slot and its blocks at once
    harness.run()
    harness.assert_as_expected(1)
    harness.assert_as_expected(2)
    plain, _ = expected_tokens(PROMPT, harness.sequences[0].sampling, harness.config)
    assert harness.stories[0].token_ids == plain[: turns - 1]


@pytest.mark.parametrize("victim", [0, 1])
def test_abort_of_a_sequence_that_shares_its_prefix(victim: int) -> None:
    harness = Harness(make_config(num_kv_blocks=8))
    for seq_id in range(2):
        harness.add(make_sequence(seq_id, PROMPT, max_tokens=12))
    harness.advance(2)
    assert harness.sequences[0].block_table[:2] == harness.sequences[1].block_table[:2]
    harness.abort(victim)
    harness.abort(victim)  # a second time does nothing
    harness.abort(99)  # and neither does an id that nobody has
    harness.add(make_sequence(2, [30] * 10, max_tokens=12))
    harness.run()
    harness.assert_as_expected(1 - victim)
    harness.assert_as_expected(2)
    assert harness.stories[victim].finish_reason == "abort"


def test_abort_while_preempted_with_its_token_still_on_the_way() -> None:
    harness = Harness(make_config(num_kv_blocks=4, block_size=4, enable_prefix_caching=False))
    for seq_id in range(2):
        harness.add(make_sequence(seq_id, [seq_id] * 7, max_tokens=8))
    while harness.scheduler.stats().num_preemptions == 0:
        harness.advance(2)
    (preempted,) = harness.scheduler.waiting
    harness.abort(preempted.seq_id)
    harness.run()
    harness.assert_as_expected(1 - preempted.seq_id)
