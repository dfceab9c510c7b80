"""Repetition, presence and frequency penalties against transformers and brute force, whoever had the slot before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tests.data_plane.one_sampler import V, ids, one_token, random_logits, sample, sampler_with, slot_sampling
from workers.sampler import Sampler


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_extreme_repetition_penalties_make_no_nan(penalty: float) -> None:
    logits = torch.tensor([0.0, -1.0, 5.0, 4.0])
    history = ids(0, 1, 2)
    token = one_token(logits, 3, temperature=0.0, repetition_penalty=penalty, num_prompt_tokens=3, history=history)
    assert token == (2 if penalty < 1 else 3)


@pytest.mark.parametrize("penalty", [0.5, 1.2, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = random_logits(10, 1, V)
    history = ids(3, 3, 8, 20, 21, 8)
    sampler = sampler_with(slot_sampling(repetition_penalty=penalty, num_prompt_tokens=3, history=history))
    filters = sampler.prepare(ids(0), ids(6)).filters
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(history.astype(np.int64))[None], logits)
    torch.testing.assert_close(sampler.filter_logits(logits, torch.ones(1, 1), filters), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.4), (-1.0, 2.0), (2.0, -0.3)])
def test_presence_and_frequency_penalties_count_the_output_alone(presence: float, frequency: float) -> None:
    history = ids(3, 3, 8, 20, 21, 20, 20, 3)
    changes: dict[str, Any] = {"presence_penalty": presence, "frequency_penalty": frequency}
    sampler = sampler_with(slot_sampling(num_prompt_tokens=3, history=history, **changes))
    filters = sampler.prepare(ids(0), ids(8)).filters
    expected = torch.zeros(1, V)
    for token, count in {20: 3, 21: 1, 3: 1}.items():
        expected[0, token] = -presence - frequency * count
    torch.testing.assert_close(sampler.filter_logits(torch.zeros(1, V), torch.ones(1, 1), filters), expected)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.4), (-1.0, 2.0), (2.0, -0.3)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_follow_brute_force_over_a_generation(presence: float, frequency: float, temperature: float) -> None:
    """Beside two rows without penalties, one of them with a filter, whose tokens must not be counted."""
    prompt, repetition = [4, 4, 9], 1.3
    settings_ = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    penalised = slot_sampling(
        2, temperature=temperature, num_prompt_tokens=3, history=ids(*prompt), seed=77, **settings_
    )
    sampler = sampler_with(slot_sampling(0), slot_sampling(1, top_k=4), penalised)
    output: list[int] = []
    for position in range(3, 40):
        logits = random_logits(position, V, scale=1.0)
        expected = logits.clone()
        for token in set(prompt + output):
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        for token in set(output):
            expected[token] -= frequency * output.count(token) + presence
        tokens = sample(sampler, logits.expand(3, V), [1, 2, 0], [position] * 3).token_ids
        assert int(tokens[1]) == one_token(expected, position, temperature=temperature, seed=77)
        output.append(int(tokens[1]))
    assert len(set(output)) > 1


def test_retaking_a_slot_with_history_goes_on_as_if_never_left() -> None:
    changes: dict[str, Any] = {
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "temperature": 0.9,
        "num_prompt_tokens": 2,
    }
    logits = random_logits(11, V, scale=1.0)

    def generate(sampler: Sampler, slot: int, tokens: list[int], until: int) -> list[int]:
        while len(tokens) < until:
            tokens.append(int(sample(sampler, logits[None], [slot], [len(tokens)]).token_ids[0]))
        return tokens

    straight = generate(sampler_with(slot_sampling(history=ids(5, 6), **changes)), 0, [5, 6], 40)
    sampler = sampler_with(slot_sampling(0, history=ids(5, 6), **changes))
    tokens = generate(sampler, 0, [5, 6], 15)
    intruder = slot_sampling(0, presence_penalty=2.0, history=ids(1, 1, 1, 7, 7))
    sampler.take_slots([intruder])
    generate(sampler, 0, [1, 1, 1, 7, 7], 9)
    sampler.take_slots([slot_sampling(3, history=ids(*tokens), **changes)])
    assert generate(sampler, 3, tokens, 40) == straight


def test_a_slot_forgets_its_former_sequence() -> None:
    logits = torch.zeros(V)
    logits[6] = 1.0
    sampler = sampler_with(slot_sampling(0, temperature=0.0, presence_penalty=2.0, history=ids(0, 6)))
    assert sample(sampler, logits[None], [0], [2]).token_ids[0] != 6
    sampler.take_slots([slot_sampling(0, temperature=0.0)])
    assert sample(sampler, logits[None], [0], [2]).token_ids[0] == 6
    sampler.take_slots([slot_sampling(0, temperature=0.0, presence_penalty=2.0, history=ids(0))])
    assert sample(sampler, logits[None], [0], [1]).token_ids[0] == 6


def test_memory_of_penalties_is_reused_and_only_taken_by_slots_that_need_it() -> None:
    sampler = sampler_with(*(slot_sampling(slot) for slot in range(16)))
    empty = len(sampler.seen_tokens.output_counts)
    for turn in range(50):
        sampler.take_slots([slot_sampling(turn % 3, presence_penalty=1.0, history=ids(1, 2))])
    assert empty == 1
    assert len(sampler.seen_tokens.output_counts) <= 4
