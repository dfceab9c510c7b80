"""Sums rows over the ranks through each other's memory, and normalises them: one Triton kernel in place of an
all-reduce and a norm.

For few rows, where an all-reduce is all latency. Every rank writes its rows into each peer's mailbox over NVLink, waits
until theirs are in its own, and adds them in the order of the ranks, so that all get the same bits. The rows themselves
say that they are there: a mailbox holds zeros until something comes, and a real zero is sent as minus zero. So a sum
takes one trip over the link, without flags or fences (the idea of NCCL's LL protocol, and of the "Lamport" all-reduce
of TensorRT-LLM, which has another sentinel).

A row has three mailboxes, used in turn. While one fills, the one before it, all of which has been
read, is emptied: a peer writes into that one again only after it has had this rank's next row, which is sent after this
kernel has ended. Called by `workers.layers.reduction`; imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.kernels.overlap import can_overlap
from workers.kernels.skinny_linear import load_sum_of_splits

_MAX_SMALL_PROGRAMS, _MAX_PROGRAMS = 256, 128
"""Of one row, and of several. They wait for their counterparts, so all of them must find room on a GPU at once."""


@triton.jit
def _wait_for_rows(mailbox_ptr, mask):  # type: ignore[no-untyped-def]
    """What a peer has sent, as soon as no element of it is missing."""
    rows = tl.load(mailbox_ptr, mask=mask, other=1, volatile=True)
    while tl.min(tl.min((rows != 0).to(tl.int32), 1), 0) == 0:
        rows = tl.load(mailbox_ptr, mask=mask, other=1, volatile=True)
    return rows


@triton.jit
def _sum_over_ranks(  # type: ignore[no-untyped-def]
    own, mailboxes, turns, elements, mask, sender_stride, RANK: tl.constexpr, TURNS: tl.constexpr
):
    """The sum of all ranks' `own`, in float32. Mailboxes are [turn][sender][row]."""
    NUM_RANKS: tl.constexpr = len(mailboxes)
    filling = turns[:, None] * (NUM_RANKS * sender_stride) + elements
    emptied = ((turns + TURNS - 1) % TURNS)[:, None] * (NUM_RANKS * sender_stride) + elements
    bits = own.to(mailboxes[RANK].dtype.element_ty, bitcast=True)
    MINUS_ZERO: tl.constexpr = -(1 << (bits.dtype.primitive_bitwidth - 1))
    sent = tl.where(bits == 0, MINUS_ZERO, bits).to(bits.dtype)
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            tl.store(mailboxes[rank] + filling + RANK * sender_stride, sent, mask=mask)
    tl.debug_barrier()  # nobody waits before all is sent, and all know the turn
    total = tl.zeros(own.shape, tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            tl.store(mailboxes[RANK] + emptied + rank * sender_stride, tl.zeros_like(sent), mask=mask)
            received = _wait_for_rows(mailboxes[RANK] + filling + rank * sender_stride, mask)
            total += received.to(own.dtype, bitcast=True).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _reduce_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    mailboxes,
    turns_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    max_rows,
    size,
    eps,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    TURNS: tl.constexpr,
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
        gdc_wait()
    turns = tl.load(turns_ptr + rows, mask=rows < num_rows, other=0)
    own = load_sum_of_splits(x_ptr, elements, mask, num_rows * size, SPLITS, out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:  # asked for before the peers are waited for, so that it is there when they are
        residual = tl.load(residual_ptr + elements, mask=mask, other=0.0)
    total = _sum_over_ranks(own, mailboxes, turns, elements, mask, max_rows * size, RANK, TURNS)
    tl.store(turns_ptr + rows, (turns + 1) % TURNS, mask=rows < num_rows)
    x = total.to(out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        x = x + residual
    tl.store(residual_ptr + elements, x, mask=mask)
    exact = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 1) / size + eps)[:, None]
    tl.store(out_ptr + elements, (exact * scale).to(weight.dtype) * weight, mask=mask)


def reduce_add_norm(
    x: Tensor,
    mailboxes: tuple[Tensor, ...],
    turns: Tensor,
    rank: int,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Of the sum of the ranks' x (T, size), plus the residual: (the norm, the sum), each (T, size).

    If there is a residual, x may be (S, T, size) float32, of which the sum is meant. All tensors contiguous.
    mailboxes: each rank's, (3, R, T or more rows, size) integers of as many bits as the weight's, in memory that all
    ranks reach; turns: this rank's own, one int32 a row. All of them zero at first. The sum takes the residual's place.
    """
    num_rows, size = x.shape[-2:]
    total = residual if residual is not None else torch.empty_like(x)
    out = torch.empty_like(total)
    block = triton.next_power_of_2(size)
    rows_each = 1
    if num_rows > _MAX_SMALL_PROGRAMS:
        rows_each = triton.next_power_of_2(triton.cdiv(num_rows, _MAX_PROGRAMS))
    overlap = can_overlap(x.device)
    _reduce_norm_kernel[(triton.cdiv(num_rows, rows_each),)](
        x,
        mailboxes,
        turns,
        total,
        weight,
        out,
        num_rows,
        mailboxes[rank].shape[2],
        size,
        eps,
        SPLITS=len(x) if x.dim() > out.dim() else 1,
        RANK=rank,
        TURNS=mailboxes[rank].shape[0],
        HAS_RESIDUAL=residual is not None,
        ROWS=rows_each,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=min(16, max(1, rows_each * block // 256)),  # 16 bytes a thread
        launch_pdl=overlap,
    )
    return out, total
