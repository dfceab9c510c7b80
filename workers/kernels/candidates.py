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

_BLOCK = 1024
_CHUNK = 8 * _BLOCK
"""Ids of one program: it reduces over its threads only once."""
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _murmur_finalise(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _log_exponential(ids, first_key, second_key):  # type: ignore[no-untyped-def]
    """The logarithm of each id's exponential variate, -log1p(-u)."""
    hashed = _murmur_finalise(_murmur_finalise(ids.to(tl.uint32) ^ first_key) ^ second_key)
    high, low = (hashed >> 16).to(tl.float32), (hashed & 0xFFFF).to(tl.float32)
    u = (high * 65536.0 + (low + 0.5)) * 2.3283064365386963e-10
    # Small u, which win, by the series, whose next term is below float32's precision.
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    exponential = tl.where(u < 0.015625, series, -_LN_2 * tl.log2(1.0 - u))
    return _LN_2 * tl.log2(tl.minimum(exponential, 23.0))


@triton.jit
def _best_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    keys_ptr,
    best_ptr,
    stride,
    num_ids,
    first_id,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    first_key = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
    second_key = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_columns = tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        columns = tl.program_id(1) * CHUNK + start + tl.arange(0, BLOCK)
        scores = tl.load(logits_ptr + columns, mask=columns < num_ids, other=-float("inf")).to(tl.float32)
        if temperature > 0:
            scores -= temperature * _log_exponential(first_id + columns, first_key, second_key)
        is_better = scores > best  # never true of a NaN
        best = tl.where(is_better, scores, best)
        best_columns = tl.where(is_better, columns, best_columns)
    bits = best.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    packed = (ordered << 32) | (0xFFFFFFFF - (first_id + best_columns).to(tl.int64))
    tl.atomic_max(best_ptr + row, tl.max(packed))


def best_candidates(logits: Tensor, temperature: Tensor, keys: Tensor, first_id: int) -> Tensor:
    """Packed best candidate of each row, (N,) int64: see `workers.candidates.best_candidates`."""
    num_rows, num_ids = logits.shape
    best = torch.full((num_rows,), torch.iinfo(torch.int64).min, dtype=torch.int64, device=logits.device)
    _best_kernel[(num_rows, triton.cdiv(num_ids, _CHUNK))](
        logits, temperature, keys, best, logits.stride(0), num_ids, first_id, BLOCK=_BLOCK, CHUNK=_CHUNK, num_warps=4
    )
    return best
