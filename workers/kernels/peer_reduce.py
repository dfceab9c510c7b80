"""Sums rows over the ranks straight from each other's memory, and normalises them: one Triton kernel in place of an
all-reduce and a norm.

For few rows, where an all-reduce is all latency. Every rank reads every rank's rows over NVLink, and adds them in the
order of the ranks, so that all get the same bits. A program tells its counterparts on the other ranks that its rows are
ready and waits for theirs: each launch counts one up, and writes the count into the counterparts' flags. Called by
`workers.layers.reduction`; imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.kernels.overlap import can_overlap

MAX_PROGRAMS = 128
FLAG_STRIDE = 32
"""int32 elements from one flag to the next, so that each has a cache line of its own."""


@triton.jit
def _meet_peers(flags, RANK: tl.constexpr, STRIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the same program of every rank is here. A rank's flags are [program][rank], its own one its count."""
    NUM_RANKS: tl.constexpr = len(flags)
    program = tl.program_id(0) * NUM_RANKS * STRIDE
    own_ptr = flags[RANK] + program
    count = tl.load(own_ptr + RANK * STRIDE) + 1
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            tl.atomic_xchg(flags[rank] + program + RANK * STRIDE, count, sem="release", scope="sys")
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            arrived = count - 1
            while arrived < count:
                # By every thread, since each then reads the peer's rows; an atomic would keep the peer from writing.
                arrived = tl.inline_asm_elementwise(
                    "ld.acquire.sys.global.s32 $0, [$1];",
                    "=r,l",
                    [own_ptr + rank * STRIDE],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
    tl.debug_barrier()  # all threads have read the old count
    tl.store(own_ptr + RANK * STRIDE, count)


@triton.jit(do_not_specialize=["num_rows"])
def _reduce_norm_kernel(  # type: ignore[no-untyped-def]
    parts,
    flags,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    size,
    eps,
    RANK: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < size)[None, :]
    elements = rows[:, None] * size + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0)[None, :]
    if OVERLAP:
        gdc_wait()  # the own rows are complete: only now may the peers be told
    if HAS_RESIDUAL:  # asked for before the peers are waited for, so that it is there when they are
        residual = tl.load(residual_ptr + elements, mask=mask, other=0.0)
    _meet_peers(flags, RANK, STRIDE)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for rank in tl.static_range(len(parts)):
        # Past the L1 cache, which knows nothing of what other GPUs write.
        total += tl.load(parts[rank] + elements, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    x = total.to(out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        x = x + residual
    tl.store(residual_ptr + elements, x, mask=mask)
    exact = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 1) / size + eps)[:, None]
    tl.store(out_ptr + elements, (exact * scale).to(weight.dtype) * weight, mask=mask)


def reduce_add_norm(
    parts: tuple[Tensor, ...],
    flags: tuple[Tensor, ...],
    rank: int,
    num_rows: int,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Of the sum over ranks of their rows, plus the residual: (the norm, the sum), each (num_rows, size).

    parts: each rank's rows (num_rows or more, size), in memory that all ranks reach, like flags: of each rank
    MAX_PROGRAMS * R * FLAG_STRIDE int32, zero at first. The sum takes the residual's place.
    """
    size = len(weight)
    out = torch.empty((num_rows, size), dtype=weight.dtype, device=weight.device)
    block = triton.next_power_of_2(size)
    rows_each = triton.next_power_of_2(triton.cdiv(num_rows, MAX_PROGRAMS))
    overlap = can_overlap(weight.device)
    total = residual if residual is not None else torch.empty_like(out)
    _reduce_norm_kernel[(triton.cdiv(num_rows, rows_each),)](
        parts,
        flags,
        total,
        weight,
        out,
        num_rows,
        size,
        eps,
        RANK=rank,
        STRIDE=FLAG_STRIDE,
        HAS_RESIDUAL=residual is not None,
        ROWS=rows_each,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=min(16, max(1, rows_each * block // 512)),
        launch_pdl=overlap,
    )
    return out, total
