"""What may happen to logits before a token is drawn: penalties for tokens already seen, top-k, top-p and min-p.

Functions of device tensors, and the one piece of state that they need, the tokens seen by each penalised sequence.
A row's result depends on that row alone, to the last bit, so that batches can be composed freely. Called by
`workers.sampler`; knows nothing of slots or of drawing.

Shapes: K rows, V token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scheduler.step import IntArray
from workers.batch import to_device

UNPENALISED_ROW = 0
"""The row of `SeenTokens` of every sequence without penalties; what it holds has no effect."""
_WEIGHT_SCALE = 2.0**44
"""Fixed-point scale of probabilities relative to the likeliest; the sum of 2**18 of them still fits int64."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Each row's penalties, (K, 1) float32, and `seen_rows`, its (K,) int64 rows of `SeenTokens`."""

    seen_rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class RankFilter:
    """How many of the likeliest tokens some rows keep."""

    rows: Tensor
    """(K,) int64 index of the rows that this filter is for."""
    top_k: Tensor
    """(K, 1) int64, V where all are kept."""
    top_p: Tensor
    """(K, 1) float64, inf where all are kept."""
    width: int
    """How many of the likeliest logits must be ranked: at least every top_k."""


class SeenTokens:
    """Which tokens the penalised sequences hold: a table whose rows are lent out, as many as were needed at once."""

    def __init__(self, num_ids: int, device: torch.device) -> None:
        self.num_ids = num_ids
        self.output_counts = torch.zeros((1, num_ids), dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros((1, num_ids), dtype=torch.bool, device=device)
        self._free_rows: list[int] = []

    def take_row(self, prompt: IntArray, output: IntArray) -> int:
        """Lend a row that holds the given tokens. Ids from `num_ids` on are left out: they cannot be sampled."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        for tokens, target in ((prompt, self.in_prompt), (output, self.output_counts)):
            if tokens.size == 0:
                target[row] = 0
                continue
            counts = np.bincount(tokens[tokens < self.num_ids], minlength=self.num_ids)
            target[row] = to_device(counts, target.device)
        return row

    def give_back_row(self, row: int) -> None:
        """Let another sequence use `row`."""
        if row != UNPENALISED_ROW:
            self._free_rows.append(row)

    def add_outputs(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count the sampled `token_ids` (K,) for `rows` (K,), which differ except for UNPENALISED_ROW."""
        self.output_counts[rows, token_ids] += 1

    def _grow(self) -> None:
        num_rows = len(self.in_prompt)
        self.output_counts = torch.cat([self.output_counts, torch.zeros_like(self.output_counts)])
        self.in_prompt = torch.cat([self.in_prompt, torch.zeros_like(self.in_prompt)])
        self._free_rows.extend(range(num_rows, 2 * num_rows))


def penalise(logits: Tensor, penalties: Penalties, seen: SeenTokens) -> Tensor:
    """Lower the (K, V) float32 logits of tokens seen before.

    The repetition penalty (Keskar et al., 2019) divides a positive logit and multiplies a negative one, for tokens of
    prompt and output; the presence and frequency penalties count the output alone, as OpenAI's API defines them.
    """
    counts = seen.output_counts[penalties.seen_rows]
    in_output = counts > 0
    scaled = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = torch.where(in_output | seen.in_prompt[penalties.seen_rows], scaled, logits)
    return logits - penalties.frequency * counts - penalties.presence * in_output


def keep_likeliest(logits: Tensor, temperature: Tensor, rank_filter: RankFilter) -> Tensor:
    """Set all but each row's likeliest tokens to -inf: the top_k first, then the fewest that reach top_p of those.

    `logits` (K, V) float32 are not yet divided by `temperature` (K, 1). Of equal logits the lower ids are kept, so
    exactly top_k remain. Probabilities are summed as integers, because a float sum depends on how it is grouped, and
    so on the width that other rows need.
    """
    values = logits.topk(rank_filter.width, dim=1).values
    ranks = torch.arange(rank_filter.width, device=logits.device)
    is_in_top_k = ranks < rank_filter.top_k
    weights = ((values - values[:, :1]) / temperature).exp().mul(_WEIGHT_SCALE).long() * is_in_top_k
    before = weights.cumsum(dim=1) - weights
    is_kept = is_in_top_k & (before < rank_filter.top_p * weights.sum(dim=1, keepdim=True))
    num_kept = is_kept.sum(dim=1, keepdim=True).clamp_min(1)

    last_kept = values.gather(1, num_kept - 1)
    num_ties_kept = num_kept - (values > last_kept).sum(dim=1, keepdim=True)
    ties = logits == last_kept
    keep = (logits > last_kept) | (ties & (ties.cumsum(dim=1, dtype=torch.int32) <= num_ties_kept))
    return logits.masked_fill(~keep, -torch.inf)


def drop_unlikely(logits: Tensor, temperature: Tensor, log_min_p: Tensor) -> Tensor:
    """Set tokens to -inf that are less likely than min_p times the likeliest.

    `logits` (K, V) float32 are not yet divided by `temperature` (K, 1); `log_min_p` (K, 1) float32 is -inf for none.
    """
    relative = (logits - logits.amax(dim=1, keepdim=True)) / temperature
    return logits.masked_fill(relative < log_min_p, -torch.inf)
