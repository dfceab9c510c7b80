"""Sums rows over the ranks straight from each other's memory, and normalises them: one Triton kernel in place of an
all-reduce and a norm.

For few rows, where an all-reduce is all latency. Every rank reads every rank's rows over NVLink, and adds them in the
order of the ranks, so that all get the same bits. A row's program tells its counterparts that its rows are ready and
waits for theirs, by flags that are set to 1 by the one and back to 0 by the other: they are 0 again after each launch,
as a CUDA graph needs it. Called by `workers.layers.reduction`; imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _reduce_norm_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,
    flags_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    offset,
    size,
    eps,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            flag_ptr = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32)) + row * NUM_RANKS + RANK
            while tl.atomic_cas(flag_ptr, 0, 1, sem="release", scope="sys") != 0:
                pass
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            flag_ptr = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + row * NUM_RANKS + rank
            while tl.atomic_cas(flag_ptr, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        part_ptr = tl.load(rows_ptr + rank).to(tl.pointer_type(out_ptr.dtype.element_ty)) + offset + row * size
        # Past the L1 cache, which knows nothing of what other GPUs write.
        total += tl.load(part_ptr + columns, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    x = total.to(out_ptr.dtype.element_ty)
    row = row.to(tl.int64)
    if HAS_RESIDUAL:
        x = x + tl.load(residual_ptr + row * size + columns, mask=mask, other=0.0)
    tl.store(residual_ptr + row * size + columns, x, mask=mask)
    exact = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + columns, (exact * scale).to(weight.dtype) * weight, mask=mask)


def reduce_add_norm(
    row_pointers: Tensor,
    flag_pointers: Tensor,
    rank: int,
    offset: int,
    num_rows: int,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Of the sum over ranks of their rows, plus the residual: (the norm, the sum), each (num_rows, size).

    row_pointers and flag_pointers (R,) int64: the addresses of each rank's rows and flags in this process. The rows lie
    `offset` elements in; flags are int32, one for each row and rank. The sum takes the residual's place.
    """
    size = len(weight)
    out = torch.empty((num_rows, size), dtype=weight.dtype, device=weight.device)
    block = triton.next_power_of_2(size)
    total = residual if residual is not None else torch.empty_like(out)
    _reduce_norm_kernel[(num_rows,)](
        row_pointers,
        flag_pointers,
        total,
        weight,
        out,
        offset,
        size,
        eps,
        RANK=rank,
        NUM_RANKS=len(row_pointers),
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return out, total
