"""The draw of plain rows on a GPU: each rank's best candidate of its own part of the vocabulary, in one Triton pass.

Same noise as `workers.noise`, bit for bit in the hash. A candidate is packed into one int64 that compares as its score
does (and, among equal scores, prefers the lower id), so that the best over blocks is an atomic maximum and the best
over ranks an all-reduce. Called by `workers.candidates`; imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_MAX_EXPONENTIAL = tl.constexpr(23.0)


@triton.jit
def _murmur_finalise(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _best_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, temperature_ptr, keys_ptr, best_ptr, stride, num_ids, first_id, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_ids
    scores = tl.load(logits_ptr + row.to(tl.int64) * stride + columns, mask=mask, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    ids = first_id + columns
    if temperature > 0:
        first_key = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
        second_key = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
        hashed = _murmur_finalise(_murmur_finalise(ids.to(tl.uint32) ^ first_key) ^ second_key)
        high, low = (hashed >> 16).to(tl.float32), (hashed & 0xFFFF).to(tl.float32)
        uniform = (high * 65536.0 + (low + 0.5)) * 2.3283064365386963e-10
        # log1p(-u) where it matters, at small u, without cancellation: Kahan's correction of log(w).
        w = 1.0 - uniform
        exponential = tl.where(w == 1.0, uniform, -tl.log(w) * (uniform / (1.0 - w)))
        exponential = tl.minimum(exponential, _MAX_EXPONENTIAL)
        scores = scores - temperature * tl.log(exponential)
    scores = tl.where(scores != scores, -float("inf"), scores)
    best, index = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    bits = best.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    best_id = (first_id + tl.program_id(1) * BLOCK + index).to(tl.int64)
    tl.atomic_max(best_ptr + row, (ordered << 32) | (0xFFFFFFFF - best_id))


def best_candidates(logits: Tensor, temperature: Tensor, keys: Tensor, first_id: int) -> Tensor:
    """Packed best candidate of each row, (N,) int64: see `workers.candidates.best_candidates`."""
    num_rows, num_ids = logits.shape
    best = torch.full((num_rows,), torch.iinfo(torch.int64).min, dtype=torch.int64, device=logits.device)
    _best_kernel[(num_rows, triton.cdiv(num_ids, _BLOCK))](
        logits, temperature, keys, best, logits.stride(0), num_ids, first_id, BLOCK=_BLOCK, num_warps=8
    )
    return best
