"""Which tokens top-k, top-p, min-p and min_tokens keep, against transformers' warpers and at their extremes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.data_plane.one_sampler import (
    V,
    assert_drawn_from,
    draws,
    ids,
    kept_set,
    one_token,
    random_logits,
    sample,
    sampler_with,
    slot_sampling,
    warped,
)

MIXED_RANKS = [(3, 0.5), (40, 1.0), (0, 0.6), (10, 0.9)]
"""top_k and top_p of rows that share a batch."""


# --- what the filters keep ---


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 2},
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 8, "top_p": 0.8},
        {"top_k": 8, "min_p": 0.2},
        {"top_p": 0.8, "min_p": 0.2},
    ],
    ids=str,
)
def test_the_kept_set_is_that_of_transformers(changes: dict[str, Any], seed: int) -> None:
    """Without ties, where transformers' top-k keeps more than k."""
    logits = random_logits(seed, V)
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    expected = warped(logits, temperature=2.0, **filters)
    sampler = sampler_with(slot_sampling(temperature=2.0, **changes))
    filters_of_row = sampler.prepare(ids(0), ids(1)).filters
    filtered = sampler.filter_logits(logits[None].clone(), torch.tensor([[2.0]]), filters_of_row)[0]
    assert torch.equal(filtered == -torch.inf, expected == -torch.inf)


def test_rows_of_different_top_k_keep_what_they_keep_alone() -> None:
    """They are ranked together, to the width of the largest."""
    num_rows = 4
    logits = random_logits(14, num_rows, V)
    rows = [slot_sampling(i, top_k=top_k, top_p=top_p) for i, (top_k, top_p) in enumerate(MIXED_RANKS)]
    filters = sampler_with(*rows).prepare(np.arange(num_rows, dtype=np.int32), ids(1, 1, 1, 1)).filters
    filtered = sampler_with().filter_logits(logits.clone(), torch.ones(num_rows, 1), filters)
    for i, (top_k, top_p) in enumerate(MIXED_RANKS):
        assert torch.equal(filtered[i], warped(logits[i], temperature=1.0, top_k=top_k, top_p=top_p, min_p=0.0))


def test_of_equal_logits_exactly_k_of_the_lowest_ids_are_kept() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 3.0, 1.0, 1.0])
    assert kept_set(logits, top_k=3) == {1, 2, 3}
    assert kept_set(torch.zeros(8), top_k=2) == {0, 1}


def test_top_p_of_equal_logits_keeps_the_fewest_that_reach_it() -> None:
    assert kept_set(torch.zeros(8), top_p=0.5) == {0, 1, 2, 3}
    assert kept_set(torch.zeros(8), top_p=0.51) == {0, 1, 2, 3, 4}


def test_min_p_keeps_all_ties_with_the_likeliest() -> None:
    assert kept_set(torch.tensor([1.0, 3.0, 3.0, 2.0]), min_p=1.0) == {1, 2}


@pytest.mark.parametrize("top_k", [V, V + 1, 2**31 - 1])
def test_top_k_of_the_vocabulary_or_more_changes_nothing(top_k: int) -> None:
    logits = random_logits(3, V)
    assert torch.equal(draws(logits, top_k=top_k), draws(logits))


def test_a_top_k_too_large_to_be_selected_is_sorted_alike() -> None:
    logits = random_logits(4, 3_000)
    expected = warped(logits, temperature=1.0, top_k=1_500, top_p=1.0, min_p=0.0)
    tokens = draws(logits, temperature=1e30, top_k=1_500)
    assert (expected[tokens] > -torch.inf).all()
    assert len(set(tokens.tolist())) == 1_500


def test_top_k_of_one_is_greedy_even_among_ties() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 2.0])
    assert kept_set(logits, top_k=1) == {1}
    assert one_token(logits, temperature=0.0) == 1


# --- extremes ---


@pytest.mark.parametrize("temperature", [1e-45, 5e-324, 1e-30, 1e-5])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("changes", [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_a_tiny_temperature_takes_the_likeliest(temperature: float, scale: float, changes: dict[str, Any]) -> None:
    logits = random_logits(5, V, scale=scale)
    tokens = [one_token(logits, position, temperature=temperature, **changes) for position in range(20)]
    # At 1e-5, gaps of 1e-5 and less are still drawn from.
    gap = float(logits.max() - logits[tokens].min())
    assert gap <= temperature * 30


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e300])
@pytest.mark.parametrize("changes", [{}, {"top_k": 10}, {"top_p": 0.2}], ids=str)
def test_a_huge_temperature_draws_evenly(temperature: float, changes: dict[str, Any]) -> None:
    """Which of equally likely tokens a filter keeps is still decided by their logits."""
    logits = random_logits(6, V)
    kept = logits.topk(10 if changes else V).indices
    expected = torch.zeros(V)
    expected[kept] = 1 / len(kept)
    assert_drawn_from(draws(logits, temperature=temperature, **changes), expected)


@pytest.mark.parametrize("seed", range(5))
def test_top_p_of_almost_nothing_is_greedy_and_of_almost_all_is_plain(seed: int) -> None:
    logits = random_logits(seed, V)
    assert one_token(logits, top_p=1e-9) == int(logits.argmax())
    assert torch.equal(draws(logits, top_p=0.9999999), draws(logits))


def test_tiny_top_p_and_large_min_p_still_keep_one() -> None:
    assert one_token(torch.zeros(5), top_p=5e-324) == 0
    assert one_token(torch.tensor([1.0, 2.0]), min_p=1.0, top_p=1e-9, top_k=1) == 1


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_excluded_and_overflowing_logits(changes: dict[str, Any]) -> None:
    logits = torch.full((V,), -torch.inf)
    logits[7] = -3e38
    assert one_token(logits, **changes) == 7
    logits[9] = 3e38
    assert one_token(logits, **changes) == 9


# --- min_tokens ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_banned_until_min_tokens_are_out(temperature: float) -> None:
    logits = random_logits(12, V)
    logits[[3, 5]] = 60.0
    changes = {"num_prompt_tokens": 10, "min_tokens": 4, "stop_token_ids": ids(3, 5), "temperature": temperature}
    sampler = sampler_with(slot_sampling(0, **changes), slot_sampling(1))
    for position in range(10, 18):
        token = int(sample(sampler, logits.expand(2, V), [1, 0], [1, position]).token_ids[1])
        assert (token in (3, 5)) == (position - 10 >= 4)


def test_a_filter_keeps_tokens_even_if_all_its_likeliest_are_banned() -> None:
    logits = torch.arange(10.0)
    changes = {"min_tokens": 2, "stop_token_ids": ids(9, 8, 7), "top_k": 2}
    assert kept_set(logits, **(changes | {"min_tokens": 2**31 - 1})) == {5, 6}
