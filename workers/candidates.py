"""Draws the plain rows (greedy, or a temperature alone) without gathering their logits.

Gumbel-max over the whole vocabulary is the maximum of the maxima over its parts, so each rank offers its best candidate
and one small all-reduce finds the winner, exactly the token that one rank with all the logits would draw. On a GPU this
is one pass of a Triton kernel; here is the plain torch version, for CPUs and as its oracle. Called by
`workers.parallel_sampler`.

Shapes: N rows, V/R token ids on this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.noise import perturbed_scores

_LOW_HALF = 0xFFFFFFFF


def best_candidates(logits: Tensor, temperature: Tensor, keys: Tensor, first_id: int) -> Tensor:
    """The token of each row with the highest logit - temperature * log(exponential noise), packed: (N,) int64.

    `logits` (N, V/R) of any float dtype are those of ids from `first_id` on; `temperature` (N,) float32, 0 is greedy;
    `keys` (N, 2) int32 of `noise.row_keys`. Packed values compare as the scores do, lower ids first among equals.
    """
    if logits.is_cuda:
        from workers.kernels.candidates import best_candidates as on_gpu

        return on_gpu(logits, temperature, keys, first_id)
    if logits.shape[1] == 0:  # a rank may hold nothing but padding
        return torch.full((len(logits),), torch.iinfo(torch.int64).min)
    is_greedy = not temperature.any()
    scores = logits.float() if is_greedy else perturbed_scores(logits, temperature, keys, first_id)
    best, index = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).max(dim=1)
    bits = best.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (ordered << 32) | (_LOW_HALF - (index + first_id))


def unpack_ids(packed: Tensor) -> Tensor:
    """The token ids of packed candidates: (N,) int64 -> (N,) int64."""
    return _LOW_HALF - (packed & _LOW_HALF)
