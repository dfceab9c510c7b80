"""The Triton kernel that writes a step's keys and values into the paged cache. Used on GPUs; imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride,
    v_stride,
    row_size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)  # 64 bits: slot * row_size passes 2**31 in a large cache
    if slot >= 0:
        columns = tl.arange(0, BLOCK)
        mask = columns < row_size
        key = tl.load(k_ptr + token * k_stride + columns, mask=mask)
        value = tl.load(v_ptr + token * v_stride + columns, mask=mask)
        tl.store(k_cache_ptr + slot * row_size + columns, key, mask=mask)
        tl.store(v_cache_ptr + slot * row_size + columns, value, mask=mask)


def store_kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy k and v (T, K, D) into slots `slot_mapping` (T,) of the caches (N, P, K, D), contiguous; -1 is skipped.

    k and v may be views whose tokens lie apart, but each token's heads must be contiguous. K and D may be any size.
    """
    num_tokens, num_heads, head_dim = k.shape
    row_size = num_heads * head_dim
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    _store_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        row_size,
        BLOCK=triton.next_power_of_2(row_size),
    )
