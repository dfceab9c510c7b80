"""The sampler against softmax, transformers' logits processors and brute force."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from scheduler.step import IntArray, SlotSampling
from workers.noise import perturbed_scores, row_keys
from workers.sampler import Sampled, Sampler, to_step_logprobs

CPU = torch.device("cpu")
NO_IDS = np.zeros(0, dtype=np.int32)
V = 50
NUM_DRAWS = 20_000
MIXED_RANKS = [(3, 0.5), (40, 1.0), (0, 0.6), (10, 0.9)]
"""top_k and top_p of rows that share a batch."""


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def slot_sampling(slot: int = 0, **changes: Any) -> SlotSampling:
    plain = SlotSampling(
        slot=slot,
        num_prompt_tokens=1,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=1234,
        min_tokens=0,
        logprobs=-1,
        stop_token_ids=NO_IDS,
        history=NO_IDS,
    )
    return replace(plain, **changes)


def sampler_with(*slots: SlotSampling, num_valid_tokens: int = V, max_num_seqs: int = 16) -> Sampler:
    sampler = Sampler(max_num_seqs=max_num_seqs, num_valid_tokens=num_valid_tokens, device=CPU)
    sampler.take_slots(slots)
    return sampler


def sample(sampler: Sampler, logits: Tensor, slots: list[int], positions: list[int]) -> Sampled:
    return sampler.sample(logits, sampler.prepare(ids(*slots), ids(*positions)))


def one_token(logits: Tensor, position: int = 1, **changes: Any) -> int:
    """The token of a fresh sampler with one row of `logits` (V,)."""
    sampler = sampler_with(slot_sampling(**changes), num_valid_tokens=len(logits))
    return int(sample(sampler, logits[None], [0], [position]).token_ids[0])


def draws(logits: Tensor, **changes: Any) -> Tensor:
    """The tokens of one sequence at NUM_DRAWS positions, all with the same `logits` (V,)."""
    sampler = sampler_with(slot_sampling(**changes), num_valid_tokens=len(logits))
    slots = np.zeros(2_000, dtype=np.int32)
    starts = range(1, NUM_DRAWS, len(slots))
    rows = logits.expand(len(slots), -1)
    batches = [sampler.prepare(slots, np.arange(start, start + len(slots), dtype=np.int32)) for start in starts]
    return torch.cat([sampler.sample(rows, batch).token_ids for batch in batches])


def kept_set(logits: Tensor, **changes: Any) -> set[int]:
    """Which ids of `logits` (V,) are drawn, at a temperature that makes all that are kept equally likely."""
    return set(draws(logits, temperature=1e30, **changes).tolist())


def random_logits(seed: int, *shape: int, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_drawn_from(tokens: Tensor, probabilities: Tensor) -> None:
    """Chi-square of the counts, with ids expected under 5 times pooled; fails one time in 10**5 of right samplers."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities.double() * len(tokens)
    is_rare = expected < 5
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    counts = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]])
    statistic = float(((counts - expected) ** 2 / expected.clamp_min(1)).sum())
    freedom = len(expected) - 1
    # Wilson and Hilferty's approximation of the quantile at 4.26 standard deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.26 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} exceeds {limit:.1f}"


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """transformers' own chain of warpers, in its order, on `logits` (V,)."""
    no_ids = torch.zeros((1, 0), dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(no_ids, logits[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(no_ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(no_ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(no_ids, scores)
    return torch.as_tensor(scores[0])


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


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_extreme_repetition_penalties_make_no_nan(penalty: float) -> None:
    logits = torch.tensor([0.0, -1.0, 5.0, 4.0])
    history = ids(0, 1, 2)
    token = one_token(logits, 3, temperature=0.0, repetition_penalty=penalty, num_prompt_tokens=3, history=history)
    assert token == (2 if penalty < 1 else 3)


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_excluded_and_overflowing_logits(changes: dict[str, Any]) -> None:
    logits = torch.full((V,), -torch.inf)
    logits[7] = -3e38
    assert one_token(logits, **changes) == 7
    logits[9] = 3e38
    assert one_token(logits, **changes) == 9


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


# --- penalties ---


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
