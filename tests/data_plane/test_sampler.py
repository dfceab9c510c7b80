"""The sampler's draws against softmax, transformers' warpers and each row alone; what it says of its probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_plane.one_sampler import (
    NO_IDS,
    V,
    assert_drawn_from,
    draws,
    ids,
    one_token,
    random_logits,
    sample,
    sampler_with,
    slot_sampling,
    warped,
)
from workers.noise import perturbed_scores, row_keys
from workers.sampler import to_step_logprobs

# --- the distribution ---


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 3.0},
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_of_transformers_warpers(changes: dict[str, Any]) -> None:
    logits = random_logits(1, V)
    scores = warped(logits, **({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes))
    assert_drawn_from(draws(logits, **changes), scores.softmax(dim=0))


def test_draws_over_seeds_follow_softmax_too() -> None:
    logits = random_logits(2, V)
    num_rows = 2_000
    sampler = sampler_with(*(slot_sampling(i, seed=i) for i in range(num_rows)), max_num_seqs=num_rows)
    batch = sampler.prepare(np.arange(num_rows, dtype=np.int32), np.full(num_rows, 5, dtype=np.int32))
    assert_drawn_from(sampler.sample(logits.expand(num_rows, V), batch).token_ids, logits.softmax(dim=0))


def test_a_large_vocabulary_of_equal_logits_is_drawn_evenly() -> None:
    keys = torch.from_numpy(row_keys(np.zeros(4_000, dtype=np.uint64), np.arange(4_000, dtype=np.int32)))
    tokens = perturbed_scores(torch.zeros(1, 20_000).expand(4_000, -1), torch.ones(4_000), keys).argmax(dim=1)
    assert_drawn_from(tokens // 500, torch.full((40,), 1 / 40))


def test_a_rare_token_is_drawn_as_often_as_it_should_be() -> None:
    logits = torch.zeros(2)
    logits[1] = float(np.log(1 / 500))
    assert_drawn_from(draws(logits), logits.softmax(dim=0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_takes_the_first_of_ties_in_every_batch(temperature: float) -> None:
    logits = torch.zeros(2, V)
    logits[0, [11, 30]] = 1
    sampler = sampler_with(slot_sampling(0, temperature=0.0), slot_sampling(1, temperature=temperature))
    assert sample(sampler, logits, [0, 1], [1, 1]).token_ids[0] == 11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 5, "logprobs": 2}], ids=str)
def test_any_float_dtype_gives_the_token_of_its_float32_value(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    logits = random_logits(7, V).to(dtype)
    original = logits.clone()
    assert one_token(logits, **changes) == one_token(logits.float(), **changes)
    assert torch.equal(logits, original)


# --- padding ---


@pytest.mark.parametrize("high", [1e30, torch.inf, torch.nan])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 1e6},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"min_tokens": 9, "stop_token_ids": ids(1, 40, 60)},
    ],
    ids=str,
)
def test_padding_is_never_sampled_nor_seen(high: float, changes: dict[str, Any]) -> None:
    valid = 40
    logits = random_logits(8, V)
    logits[valid:] = high
    sampler = sampler_with(slot_sampling(logprobs=50, history=ids(45), **changes), num_valid_tokens=valid)
    for position in range(1, 6):
        sampled = sample(sampler, logits[None], [0], [position])
        assert sampled.token_ids[0] < valid
        assert sampled.logprobs is not None
        assert sampled.logprobs.top.shape == (1, valid)
        assert sampled.logprobs.top.exp().sum() == pytest.approx(1, abs=1e-5)


# --- independence from the batch ---

row_settings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-5, 0.7, 1.0, 5.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 20, V]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.9, 0.9999999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -0.5]),
        "seed": st.integers(0, 2**63 - 1),
        "min_tokens": st.sampled_from([0, 0, 4]),
        "logprobs": st.sampled_from([-1, -1, 0, 3]),
        "stop_token_ids": st.sampled_from([NO_IDS, ids(3), ids(1, 2, 49)]),
        "history": st.lists(st.integers(0, V - 1), min_size=3, max_size=6).map(lambda tokens: ids(*tokens)),
    }
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(row_settings, min_size=1, max_size=7), data=st.data())
def test_a_rows_token_does_not_depend_on_the_batch(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    """Coarse logits, so that ties are everywhere; every row alone, then all together in another order of slots."""
    num_rows = len(rows)
    logits = (random_logits(data.draw(st.integers(0, 1_000)), num_rows, V) * 2).round() / 2
    positions = [len(row["history"]) for row in rows]
    alone = [one_token(logits[i], positions[i], num_prompt_tokens=2, **row) for i, row in enumerate(rows)]
    slots = data.draw(st.permutations(range(num_rows)))
    order = data.draw(st.permutations(range(num_rows)))
    sampler = sampler_with(*(slot_sampling(slots[i], num_prompt_tokens=2, **row) for i, row in enumerate(rows)))
    together = sample(sampler, logits[order], [slots[i] for i in order], [positions[i] for i in order])
    assert together.token_ids.tolist() == [alone[i] for i in order]


def test_a_large_batch_of_real_width_draws_each_row_as_if_alone() -> None:
    """Vectorised and threaded kernels must not round differently at other offsets."""
    num_rows, width = 12, 10_007
    logits = random_logits(9, num_rows, width)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.01}]
    rows = [slot_sampling(i, seed=i, **kinds[i % len(kinds)]) for i in range(num_rows)]
    together = sampler_with(*rows, num_valid_tokens=width)
    for position in range(10):
        tokens = sample(together, logits, list(range(num_rows)), [position] * num_rows).token_ids
        for i in range(num_rows):
            assert one_token(logits[i], position, seed=i, **kinds[i % len(kinds)]) == tokens[i]


def test_the_position_and_the_seed_change_the_noise() -> None:
    logits = torch.zeros(10_000)
    tokens = [one_token(logits, position, seed=seed) for position in range(10) for seed in range(10)]
    assert len(set(tokens)) > 95


def test_an_empty_batch() -> None:
    assert sample(sampler_with(slot_sampling()), torch.zeros(0, V), [], []).token_ids.shape == (0,)


# --- log probabilities ---


def test_logprobs_are_of_the_unmodified_logits_whatever_the_settings() -> None:
    logits = random_logits(13, 4, V).bfloat16()
    sampler = sampler_with(
        slot_sampling(0, logprobs=0, temperature=0.3, top_k=5),
        slot_sampling(1, logprobs=-1),
        slot_sampling(2, logprobs=4, temperature=0.0, repetition_penalty=3.0, history=ids(*range(V))),
        slot_sampling(3, logprobs=2, min_tokens=5, stop_token_ids=ids(int(logits[3].argmax()))),
    )
    sampled = sample(sampler, logits, [0, 1, 2, 3], [1, 1, 1, 1])
    assert sampled.logprobs is not None
    answer = to_step_logprobs(sampled.logprobs)
    expected = logits.float().log_softmax(dim=1)
    rows = torch.tensor([0, 2, 3])
    assert answer.rows.tolist() == rows.tolist()
    np.testing.assert_allclose(answer.chosen, expected[rows, sampled.token_ids[rows]], rtol=1e-6)
    assert answer.top.shape == answer.top_ids.shape == (3, 4)
    np.testing.assert_allclose(answer.top, expected[rows].topk(4).values, rtol=1e-6)
    for row, top_ids, top in zip(rows, answer.top_ids, answer.top, strict=True):
        np.testing.assert_allclose(expected[row, torch.from_numpy(top_ids).long()], top, rtol=1e-6)
    dtypes = [array.dtype.name for array in (answer.rows, answer.chosen, answer.top_ids, answer.top)]
    assert dtypes == ["int32", "float32", "int32", "float32"]


def test_the_chosen_tokens_logprob_alone() -> None:
    sampled = sample(sampler_with(slot_sampling(logprobs=0)), torch.zeros(1, V), [0], [1])
    assert sampled.logprobs is not None
    answer = to_step_logprobs(sampled.logprobs)
    assert answer.chosen == pytest.approx([-np.log(V)])
    assert answer.top.shape == (1, 0)


def test_no_row_wants_logprobs() -> None:
    assert sample(sampler_with(slot_sampling()), torch.zeros(1, V), [0], [1]).logprobs is None
