"""Attention of decoding rows over the keys that all sequences of a step have in common, in Triton.

Requests that begin with the same system prompt hold the same blocks. `workers.kernels.triton_decode` reads them once
for each sequence; here a program reads its split of them once for many, whose queries fill the rows of a product. What
it leaves, for each split, is where `triton_decode` starts from (Juravsky et al., "Hydragen", 2024). The number of such
keys is on the device, so a captured step holds for any; with none, nothing is done. Called by
`workers.kernels.triton_backend`; knows nothing of blocks' owners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.kernels.overlap import can_overlap
from workers.kernels.triton_prefill import attend_range

_LOG2_E = math.log2(math.e)
_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """How the work is laid out on the GPU; changes speed only."""

    rows: int = 128
    """Sequences x query heads of a program."""
    tile: int = 64
    """Keys that a program works on at a time."""
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True, slots=True, eq=False)
class SharedAttention:
    """What the shared keys give, of S sequences, in C splits: float32, and nothing where there are no shared keys."""

    num_blocks: Tensor
    """(1,) int32."""
    parts: Tensor
    """(C, S, H, D) weighted sums of values."""
    peaks: Tensor
    """(C, S, H) highest scores, times log2(e); -inf where a split has no keys."""
    sums: Tensor
    """(C, S, H) sums of weights."""


@triton.jit(do_not_specialize=["num_seqs"])
def _attend_shared_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    parts_ptr,
    peaks_ptr,
    sums_ptr,
    table_ptr,
    seq_lens_ptr,
    rows_ptr,
    num_blocks_ptr,
    num_seqs,
    q_stride,
    scale_log2,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,
    PADDED_G: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    IS_MIXED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head, split, num_splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    num_keys = tl.load(num_blocks_ptr) * P
    NUM_ROWS: tl.constexpr = SEQS * PADDED_G
    rows, columns = tl.arange(0, NUM_ROWS), tl.arange(0, NUM_COLUMNS)
    sequences = tl.program_id(1) * SEQS + rows // PADDED_G
    is_row = (sequences < num_seqs) & (rows % PADDED_G < G)
    q_rows = sequences
    if IS_MIXED:
        q_rows = tl.load(rows_ptr + sequences, mask=is_row, other=0)
        is_row = is_row & (tl.load(rows_ptr + sequences + 1, mask=is_row, other=0) - q_rows == 1)
    else:
        is_row = is_row & (tl.load(seq_lens_ptr + sequences, mask=is_row, other=0) > 0)
    if (num_keys == 0) | (tl.max(is_row.to(tl.int32)) == 0):
        return

    heads = head * G + rows % PADDED_G
    mask = is_row[:, None] & (columns < D)[None, :]
    q_offsets = q_rows.to(tl.int64) * q_stride + heads * D
    q = tl.load(q_ptr + q_offsets[:, None] + columns[None, :], mask=mask, other=0.0)
    keys_per_split = tl.cdiv(tl.cdiv(num_keys, TILE), num_splits) * TILE
    begin = tl.minimum(split * keys_per_split, num_keys)
    stop = tl.minimum(begin + keys_per_split, num_keys)
    whole = begin + (stop - begin) // TILE * TILE
    last_seen = tl.zeros([NUM_ROWS], tl.int32) + (stop - 1)
    acc, peak, total = attend_range(
        q,
        k_ptr + head * D,
        v_ptr + head * D,
        table_ptr,
        last_seen,
        begin,
        whole,
        stop,
        scale_log2,
        HEADS,
        D,
        P,
        TILE,
    )
    items = (split * num_seqs + sequences).to(tl.int64) * (HEADS * G) + heads
    tl.store(parts_ptr + items[:, None] * D + columns[None, :], acc, mask=mask)
    tl.store(peaks_ptr + items, peak, mask=is_row)
    tl.store(sums_ptr + items, total, mask=is_row)


@triton.jit
def load_shared(  # type: ignore[no-untyped-def]
    parts_ptr,
    peaks_ptr,
    sums_ptr,
    item,
    num_items,
    is_wanted,
    G: tl.constexpr,
    D: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """One (sequence, kv head), all splits together: weighted sum (rows, columns), highest score, sum of weights.

    Those of no keys if it is not wanted.
    """
    rows, columns = tl.arange(0, NUM_ROWS), tl.arange(0, NUM_COLUMNS)
    mask = (rows < G)[:, None] & (columns < D)[None, :]
    elements = rows[:, None] * D + columns[None, :]
    acc = tl.zeros([NUM_ROWS, NUM_COLUMNS], tl.float32)
    peak = tl.full([NUM_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([NUM_ROWS], tl.float32)
    if is_wanted:
        for split in tl.static_range(NUM_SPLITS):
            heads = (split * num_items + item).to(tl.int64) * G
            # The first split always has keys: from then on the peak is finite.
            part_peak = tl.load(peaks_ptr + heads + rows, mask=rows < G, other=0.0)
            part_total = tl.load(sums_ptr + heads + rows, mask=rows < G, other=0.0)
            part = tl.load(parts_ptr + heads * D + elements, mask=mask, other=0.0)
            new_peak = tl.maximum(peak, part_peak)
            decay, weight = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
            acc = acc * decay[:, None] + part * weight[:, None]
            total = total * decay + part_total * weight
            peak = new_peak
    return acc, peak, total


def attend_shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    num_blocks: Tensor,
    scale: float,
    config: SharedConfig,
    cu_seqlens_q: Tensor | None = None,
) -> SharedAttention:
    """Attention of each sequence's one row to the first keys of all; what it leaves of other rows means nothing.

    q (T, H, D), whose rows may lie apart; k_cache and v_cache (N, P, K, D) contiguous; seq_lens (S,), block_tables
    (S, B) and num_blocks (1,) int32: with so many blocks all sequences begin, and each has a key more. Without
    cu_seqlens_q (S + 1,) row i is sequence i's.
    """
    num_q_heads, head_dim = q.shape[1:]
    _, page, heads, _ = k_cache.shape
    assert q.stride()[1:] == (head_dim, 1)
    num_seqs, group = len(seq_lens), num_q_heads // heads
    padded_group = triton.next_power_of_2(group)
    columns = max(16, triton.next_power_of_2(head_dim))
    shrink = max(1, columns * q.element_size() // 256)  # shared memory has room for fewer wide rows
    most = triton.next_power_of_2(num_seqs) * padded_group
    num_rows = max(16, padded_group, min(config.rows // shrink, most))
    seqs = num_rows // padded_group
    num_programs = heads * triton.cdiv(num_seqs, seqs)
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 3 * num_programs
    num_splits = max(1, min(_MAX_SPLITS, num_sms // num_programs))
    num_splits = 1 << (num_splits.bit_length() - 1)  # the decode kernel is compiled for each number
    shape = (num_splits, num_seqs, num_q_heads)
    parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    peaks, sums = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    overlap = can_overlap(q.device)
    _attend_shared_kernel[(heads, triton.cdiv(num_seqs, seqs), num_splits)](
        q,
        k_cache,
        v_cache,
        parts,
        peaks,
        sums,
        block_tables,
        seq_lens,
        seq_lens if cu_seqlens_q is None else cu_seqlens_q,
        num_blocks,
        num_seqs,
        q.stride(0),
        scale * _LOG2_E,
        HEADS=heads,
        G=group,
        D=head_dim,
        P=page,
        TILE=max(16, config.tile // shrink),
        SEQS=seqs,
        PADDED_G=padded_group,
        NUM_COLUMNS=columns,
        IS_MIXED=cu_seqlens_q is not None,
        OVERLAP=overlap,
        num_warps=config.num_warps if num_rows >= 64 else 4,
        num_stages=config.num_stages,
        launch_pdl=overlap,
    )
    return SharedAttention(num_blocks, parts, peaks, sums)
