"""A sampler with rows of any settings, what it draws and keeps, and transformers' warpers: for the sampler's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from scheduler.step import IntArray, SlotSampling
from workers.sampler import Sampled, Sampler

CPU = torch.device("cpu")
NO_IDS = np.zeros(0, dtype=np.int32)
V = 50
NUM_DRAWS = 20_000


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
