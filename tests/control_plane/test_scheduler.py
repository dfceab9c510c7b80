"""Admission, ends, sharing inside one step, preemption: each against the fake ranks' tokens."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.errors import ConfigError, RequestError
from scheduler.sampling_params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.step import StepLogprobs, StepResult
from tests.control_plane.fake_model import Harness, expected_tokens, make_config, make_sequence, run_all

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("name", ["num_kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"])
def test_a_limit_below_one_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
        make_config(**{name: 0})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1] * 16, "16 tokens, but max_model_len=16"),
        ([1] * 12, r"12 tokens, but the KV cache holds 12 \(3 blocks of 4\)"),
        ([1, 50, 2], "token id 50 is outside the vocabulary: ids go from 0 to 49"),
        ([1, -1, 2], "token id -1 is outside the vocabulary: ids go from 0 to 49"),
    ],
)
def test_what_can_never_be_served_is_refused_alone(prompt: list[int], message: str) -> None:
    config = make_config(num_kv_blocks=3, max_model_len=16)
    harness = Harness(config)
    harness.add(make_sequence(0, PROMPT[:5], max_tokens=4))
    with pytest.raises(RequestError, match=message):
        harness.scheduler.add(make_sequence(1, prompt))
    harness.add(make_sequence(2, PROMPT[:3], max_tokens=4))
    harness.run()
    harness.assert_as_expected(0)
    harness.assert_as_expected(2)


def test_the_longest_prompt_that_admission_lets_through_is_served() -> None:
    harness = run_all([make_sequence(0, [1] * 11)], make_config(num_kv_blocks=3, max_model_len=16))
    assert harness.stories[0].finish_reason == "error", "two tokens more than the pool"
    harness = run_all([make_sequence(0, [1] * 15)], make_config(max_model_len=16))
    assert (len(harness.stories[0].token_ids), harness.stories[0].finish_reason) == (1, "length")


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 64])
def test_a_sequence_that_outgrows_a_pool_of_two_blocks_fails_alone(
    max_in_flight: int, max_num_batched_tokens: int
) -> None:
    config = make_config(num_kv_blocks=2, block_size=4, max_num_batched_tokens=max_num_batched_tokens)
    sequences = [
        make_sequence(0, PROMPT[:2], max_tokens=2),
        make_sequence(1, PROMPT[:4], max_tokens=30),
        make_sequence(2, PROMPT[:6], max_tokens=3),
        make_sequence(3, [1], max_tokens=8),
    ]
    harness = run_all(sequences, config, max_in_flight=max_in_flight)
    assert [story.finish_reason for story in harness.stories.values()] == ["length", "error", "length", "length"]
    story = harness.stories[1]
    assert len(story.token_ids) == 5
    assert story.error is not None
    assert "grew to 9 tokens, but the KV cache holds 8 (2 blocks of 4): lower max_tokens" in story.error


@pytest.mark.parametrize(
    ("num_kv_blocks", "max_num_seqs", "lengths", "max_in_flight"),
    [
        (5, 3, [(1, 5), (2, 5), (4, 4), (3, 2), (1, 4)], 2),
        (6, 4, [(2, 6), (1, 5), (5, 6), (2, 4), (3, 6)], 1),
    ],
)
def test_a_sequence_preempted_when_it_has_outgrown_the_pool_fails_and_does_not_wait_for_ever(
    num_kv_blocks: int, max_num_seqs: int, lengths: list[tuple[int, int]], max_in_flight: int
) -> None:
    """All write the same text, so that one fills the pool with blocks it shares, and is preempted with a token more."""
    config = make_config(
        num_kv_blocks=num_kv_blocks,
        block_size=1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=9,
        vocab_size=50 if max_in_flight == 2 else 5,
    )
    endless = make_config(num_kv_blocks=99, vocab_size=config.vocab_size)
    text = [1, *expected_tokens([1], make_sequence(0, [1], max_tokens=10).sampling, endless)[0]]
    sequences = [
        make_sequence(seq_id, text[:num_prompt_tokens], max_tokens=max_tokens)
        for seq_id, (num_prompt_tokens, max_tokens) in enumerate(lengths)
    ]
    run_all(sequences, config, max_in_flight=max_in_flight)


def test_max_tokens_and_max_model_len_end_a_sequence_without_computing_more() -> None:
    config = make_config(max_model_len=16)
    harness = run_all([make_sequence(0, PROMPT, max_tokens=3), make_sequence(1, PROMPT[:8], max_tokens=100)], config)
    assert [len(story.token_ids) for story in harness.stories.values()] == [3, 8]
    # The last token of each is sampled, and never computed.
    assert (
        harness.scheduler.stats().num_computed_tokens == len(PROMPT) + 2 + 8 + 7 - harness.stories[1].num_cached_tokens
    )
    assert max(int(step.seq_lens.max()) for step in harness.steps) == 15


def test_stop_ids_end_a_sequence_but_not_before_min_tokens() -> None:
    config = make_config()
    plain, _ = expected_tokens(PROMPT, make_sequence(0, PROMPT, max_tokens=12).sampling, config)
    stop = plain[3]
    first = plain.index(stop)
    harness = run_all(
        [
            make_sequence(0, PROMPT, max_tokens=12, stop_token_ids=(stop, 49)),
            make_sequence(1, PROMPT, max_tokens=12, stop_token_ids=(stop,), min_tokens=first + 1),
        ],
        config,
    )
    stopped, delayed = harness.stories[0], harness.stories[1]
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_token_id) == (plain[: first + 1], "stop", stop)
    assert len(delayed.token_ids) > first + 1
    assert stop not in delayed.token_ids[: first + 1]


def test_a_stop_id_that_the_ranks_let_through_too_early_does_not_end_a_sequence() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_sequence(0, PROMPT, stop_token_ids=(5,), min_tokens=2))
    reasons = []
    for step_id in range(2):
        scheduler.schedule()
        scheduler.postprocess(StepResult(step_id=step_id, token_ids=np.array([5], dtype=np.int32)))
        reasons += [update.finish_reason for update in scheduler.take_updates()]
    assert reasons == [None, "stop"]


def test_the_token_that_follows_a_stop_is_dropped() -> None:
    """One step ahead, the ranks have sampled one token more than the sequence has."""
    config = make_config()
    plain, _ = expected_tokens(PROMPT, make_sequence(0, PROMPT).sampling, config)
    harness = run_all([make_sequence(0, PROMPT, stop_token_ids=(plain[1],))], config, max_in_flight=2)
    sampled = sum(int(step.samples.sum()) for step in harness.steps)
    assert (len(harness.stories[0].token_ids), sampled) == (2, 3)


def test_identical_prompts_that_arrive_together_compute_their_prefix_once_in_one_step() -> None:
    config = make_config(block_size=4)
    prompt = [*PROMPT[:8], 1, 2]
    harness = Harness(config)
    for seq_id in range(5):
        harness.add(make_sequence(seq_id, prompt, max_tokens=1))
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.num_steps == 1
    assert stats.num_computed_tokens == 10 + 4 * 2
    assert stats.num_cached_tokens == 4 * 8
    assert [harness.stories[i].num_cached_tokens for i in range(5)] == [0, 8, 8, 8, 8]
    for seq_id in range(5):
        harness.assert_as_expected(seq_id)


def test_a_long_prompt_is_computed_in_chunks_beside_running_sequences() -> None:
    config = make_config(max_num_batched_tokens=4)
    harness = Harness(config)
    harness.add(make_sequence(0, [1, 2], max_tokens=10))
    harness.advance(2)
    harness.add(make_sequence(1, PROMPT, max_tokens=2))
    harness.run()
    chunks = [step.num_scheduled_tokens.tolist() for step in harness.steps[1:6]]
    assert chunks == [[1, 3], [1, 3], [1, 3], [1, 1], [1, 1]]
    assert [step.samples.tolist() for step in harness.steps[1:5]] == [[1, 0], [1, 0], [1, 0], [1, 1]]
    harness.assert_as_expected(0)
    harness.assert_as_expected(1)


def test_a_decode_step_carries_no_token_ids_and_few_blocks() -> None:
    harness = Harness(make_config(block_size=4))
    harness.add(make_sequence(0, PROMPT[:4], max_tokens=10))
    harness.run()
    first, *others = harness.steps
    assert first.token_ids.tolist() == PROMPT[:4]
    assert all(step.token_ids.tolist() == [-1] for step in others)
    assert [len(step.block_ids) for step in harness.steps] == [1, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert [len(step.new_slots) for step in harness.steps] == [1] + [0] * 9


def test_the_youngest_is_preempted_and_goes_to_the_head_of_the_queue() -> None:
    config = make_config(num_kv_blocks=4, block_size=4, max_num_seqs=2, enable_prefix_caching=False)
    harness = Harness(config)
    for seq_id in range(3):
        harness.add(make_sequence(seq_id, [seq_id] * 7, max_tokens=6))
    while harness.scheduler.stats().num_preemptions == 0:
        harness.advance(1)
    assert list(harness.scheduler.running) == [0]
    assert [seq.seq_id for seq in harness.scheduler.waiting] == [1, 2]
    harness.run(1)
    for seq_id in range(3):
        harness.assert_as_expected(seq_id)


def test_the_same_tokens_whatever_the_limits() -> None:
    prompts = [[i % 5] * (i % 9) + PROMPT[: i % 7 + 1] for i in range(12)]
    base = make_config()
    configs = [
        base,
        make_config(block_size=1, num_kv_blocks=40),
        make_config(block_size=8, num_kv_blocks=4, enable_prefix_caching=False),
        make_config(max_num_seqs=1),
        make_config(max_num_batched_tokens=1),
        make_config(num_kv_blocks=9, block_size=3, max_num_batched_tokens=7),
    ]
    outputs = []
    for config in configs:
        for order in (1, -1):
            sequences = [make_sequence(i, prompt, max_tokens=9) for i, prompt in enumerate(prompts)][::order]
            harness = run_all(sequences, config)
            outputs.append([harness.stories[i].token_ids for i in range(len(prompts))])
    assert all(output == outputs[0] for output in outputs)
    assert harness.scheduler.stats().num_preemptions > 2


def test_blocks_kept_for_the_head_of_the_queue_are_not_taken_by_those_behind() -> None:
    """First come, first served: a short prompt does not overtake a long one that has no room yet."""
    harness = Harness(make_config(num_kv_blocks=6, block_size=4))
    harness.add(make_sequence(0, [1] * 14, max_tokens=2))
    harness.add(make_sequence(1, [2] * 14, max_tokens=2))
    harness.add(make_sequence(2, [3], max_tokens=2))
    harness.advance(1)
    assert list(harness.scheduler.running) == [0]
    assert [seq.seq_id for seq in harness.scheduler.waiting] == [1, 2]
    harness.run(1)


def test_each_sequence_gets_as_many_log_probabilities_as_it_asked_for() -> None:
    """The ranks answer with as many for each row as the most that any row asked for."""
    scheduler = Scheduler(make_config())
    for seq_id, logprobs in enumerate((None, 0, 1, 3)):
        scheduler.add(Sequence(seq_id, np.array([seq_id], np.int32), ResolvedSampling(max_tokens=1, logprobs=logprobs)))
    step = scheduler.schedule()
    assert step is not None
    rows = np.array([1, 2, 3], dtype=np.int32)
    arrays = StepLogprobs(
        rows=rows,
        chosen=-rows.astype(np.float32),
        top_ids=np.arange(9, dtype=np.int32).reshape(3, 3),
        top=np.arange(9, dtype=np.float32).reshape(3, 3),
    )
    scheduler.postprocess(
        StepResult(step_id=step.step_id, token_ids=np.array([5, 6, 7, 8], dtype=np.int32), logprobs=arrays)
    )
    none, *others = [update.logprobs for update in scheduler.take_updates()]
    assert none is None
    assert [each and (each.chosen, each.top_ids.tolist(), each.top.tolist()) for each in others] == [
        (-1.0, [], []),
        (-2.0, [3], [3.0]),
        (-3.0, [6, 7, 8], [6.0, 7.0, 8.0]),
    ]
