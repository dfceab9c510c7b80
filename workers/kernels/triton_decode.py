"""Paged attention of one query token per sequence, in Triton: reads each sequence's keys and values once, at the
speed of the memory, whatever their lengths.

The keys of all sequences and kv heads form one line, [sequence][kv head][key], measured in units of `_UNIT` keys. A
fixed number of programs cut it into equal shares, so a batch of any raggedness, or a single sequence, fills the GPU,
and a CUDA graph captured once holds for all lengths. An item, one (sequence, kv head), that lies in one share is
written at once; where it crosses shares, each program leaves a partial result, and these are combined.

`plan_decode` cuts the line, once for all layers of a step; `attend_decode` runs one layer. Called by
`workers.kernels.triton_backend`; knows nothing of layers or steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_UNIT = 16
"""Keys in the smallest piece of work."""
_PLAN_COLUMNS = 8
_LOG2_E = math.log2(math.e)
_INTERPRETED_NUM_SMS = 3


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the work is laid out on the GPU; changes speed only."""

    tile: int = 64
    """Keys that a program works on at a time."""
    num_warps: int = 4
    num_stages: int = 4
    programs_per_sm: int = 2
    min_units: int = 4
    """No program gets less: below this, combining costs more than reading."""
    combines_in_place: bool = True
    """The last program to arrive at an item combines it; otherwise a second kernel does."""


class DecodeWorkspace:
    """The plan and the partial results of one model's decode steps; every step and layer uses it again.

    Steps that share it must run on one stream. To be made outside of a CUDA graph capture: the counters start at
    zero, and each launch leaves them so.
    """

    def __init__(
        self, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, config: DecodeConfig
    ) -> None:
        num_sms = _INTERPRETED_NUM_SMS
        if device.type == "cuda":
            assert not torch.cuda.is_current_stream_capturing()
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.config = config
        self.num_programs = num_sms * config.programs_per_sm
        self.num_kv_heads = num_kv_heads
        self.group = num_q_heads // num_kv_heads
        # A program leaves up to two partial results: of the item that its share begins in, and of the one it ends in.
        num_parts = 2 * self.num_programs
        self.plan = torch.zeros(self.num_programs, _PLAN_COLUMNS, dtype=torch.int32, device=device)
        self.parts = torch.empty(num_parts, self.group, head_dim, dtype=torch.float32, device=device)
        self.peaks = torch.empty(num_parts, self.group, dtype=torch.float32, device=device)
        self.sums = torch.empty_like(self.peaks)
        self.counters = torch.zeros(self.num_programs, dtype=torch.int32, device=device)
        self.splits = torch.zeros(self.num_programs, 2, dtype=torch.int32, device=device)

    def fits(self, q: Tensor, k_cache: Tensor) -> bool:
        """Whether it was made for queries (T, H, D) and caches (N, P, K, D) like these."""
        num_kv_heads, head_dim = k_cache.shape[2:]
        group = q.shape[1] // num_kv_heads
        shape = (2 * self.num_programs, group, head_dim)
        return self.num_kv_heads == num_kv_heads and self.parts.shape == shape and self.parts.device == q.device


@triton.jit
def _units(seq_lens_ptr, rows_ptr, sequences, num_seqs, UNIT: tl.constexpr, IS_MIXED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Units of each sequence's keys. An empty one has one too, so that its row is written."""
    is_real = sequences < num_seqs
    units = tl.cdiv(tl.load(seq_lens_ptr + sequences, mask=is_real, other=0), UNIT)
    units = tl.where(is_real, tl.maximum(units, 1), 0)
    if IS_MIXED:
        start = tl.load(rows_ptr + sequences, mask=is_real, other=0)
        stop = tl.load(rows_ptr + sequences + 1, mask=is_real, other=0)
        units = tl.where(stop - start == 1, units, 0)
    return units


@triton.jit(do_not_specialize=["num_seqs", "num_programs"])
def _plan_kernel(  # type: ignore[no-untyped-def]
    seq_lens_ptr,
    rows_ptr,
    plan_ptr,
    num_seqs,
    num_programs,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    IS_MIXED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    total = 0
    for start in range(0, num_seqs, BLOCK_S):
        sequences = start + tl.arange(0, BLOCK_S)
        total += tl.sum(_units(seq_lens_ptr, rows_ptr, sequences, num_seqs, UNIT, IS_MIXED)) * HEADS
    share = tl.maximum(tl.cdiv(total, num_programs), MIN_UNITS)

    programs = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    begins = programs * share
    sequence = tl.zeros([BLOCK_P], tl.int32)
    sequence_begin = tl.zeros([BLOCK_P], tl.int32)
    before = 0
    for start in range(0, num_seqs, BLOCK_S):
        sequences = start + tl.arange(0, BLOCK_S)
        units = _units(seq_lens_ptr, rows_ptr, sequences, num_seqs, UNIT, IS_MIXED) * HEADS
        ends = before + tl.cumsum(units)
        is_past = (ends[None, :] <= begins[:, None]) & (sequences < num_seqs)[None, :]
        sequence += tl.sum(is_past.to(tl.int32), 1)
        sequence_begin = tl.maximum(sequence_begin, tl.max(tl.where(is_past, ends[None, :], 0), 1))
        before += tl.sum(units)

    todo = tl.minimum(tl.maximum(total - begins, 0), share)
    is_program = programs < num_programs
    seq_len = tl.load(seq_lens_ptr + sequence, mask=is_program & (todo > 0), other=0)
    row_ptr = plan_ptr + programs * COLUMNS
    tl.store(row_ptr, sequence, mask=is_program)
    tl.store(row_ptr + 1, begins - sequence_begin, mask=is_program)
    tl.store(row_ptr + 2, seq_len, mask=is_program)
    tl.store(row_ptr + 3, todo, mask=is_program)
    tl.store(row_ptr + 4, share, mask=is_program)


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    stop,
    scale_log2,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attention of q (rows, columns) over keys begin..stop: weighted sum of values, highest score, sum of weights."""
    NUM_ROWS: tl.constexpr = q.shape[0]
    NUM_COLUMNS: tl.constexpr = q.shape[1]
    columns = tl.arange(0, NUM_COLUMNS)
    keys = tl.arange(0, TILE)
    acc = tl.zeros([NUM_ROWS, NUM_COLUMNS], tl.float32)
    peak = tl.full([NUM_ROWS], -float("inf"), tl.float32)
    totals = tl.zeros([NUM_ROWS, TILE], tl.float32)  # summed at the end: a sum over warps in every tile costs time
    # Block ids are read a tile ahead: otherwise every tile would wait for two loads, one after the other.
    blocks = tl.load(table_ptr + (begin + keys) // P, mask=begin + keys < stop, other=0)
    for start in range(begin, stop, TILE):
        positions = start + keys
        is_seen = positions < stop
        # 64 bits: elements of a cache pass 2**31.
        offsets = (blocks.to(tl.int64) * P + positions % P) * (HEADS * D)
        offsets = offsets[:, None] + columns[None, :]
        mask = is_seen[:, None] if D == NUM_COLUMNS else is_seen[:, None] & (columns < D)[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        blocks = tl.load(table_ptr + (positions + TILE) // P, mask=positions + TILE < stop, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(is_seen[None, :], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        totals = totals * decay[:, None] + weights
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, tl.sum(totals, 1)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    out_ptr,
    parts_ptr,
    peaks_ptr,
    sums_ptr,
    first_program,
    num_parts,
    G: tl.constexpr,
    D: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the item that programs first_program.. left in num_parts partial results.

    Loads bypass the L1 cache, which may hold what the workspace held before.
    """
    heads, columns = tl.arange(0, NUM_HEADS), tl.arange(0, NUM_COLUMNS)
    elements = heads[:, None] * D + columns[None, :]
    is_element = (heads < G)[:, None] & (columns < D)[None, :]
    acc = tl.zeros([NUM_HEADS, NUM_COLUMNS], tl.float32)
    peak = tl.full([NUM_HEADS], -float("inf"), tl.float32)
    total = tl.zeros([NUM_HEADS], tl.float32)
    for start in range(0, num_parts, CHUNK):
        parts = start + tl.arange(0, CHUNK)
        # An item begins in the last piece of its first program, and is the first piece of the others.
        slots = 2 * (first_program + parts) + (parts == 0).to(tl.int32)
        is_part = parts < num_parts
        stats = slots[:, None] * G + heads[None, :]
        mask = is_part[:, None] & (heads < G)[None, :]
        peaks = tl.load(peaks_ptr + stats, mask=mask, other=-float("inf"), cache_modifier=".cg")
        sums = tl.load(sums_ptr + stats, mask=mask, other=0.0, cache_modifier=".cg")
        values = tl.load(
            parts_ptr + slots[:, None, None] * (G * D) + elements[None, :, :],
            mask=is_part[:, None, None] & is_element[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        new_peak = tl.where(heads < G, new_peak, 0.0)
        weights = tl.exp2(peaks - new_peak[None, :])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights * sums, 0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * values, 0)
        peak = new_peak
    total = tl.where(heads < G, total, 1.0)
    tl.store(out_ptr + elements, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_element)


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    parts_ptr,
    peaks_ptr,
    sums_ptr,
    splits_ptr,
    G: tl.constexpr,
    D: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    num_parts = tl.load(splits_ptr + 2 * program)
    if num_parts > 0:
        item = tl.load(splits_ptr + 2 * program + 1).to(tl.int64)
        out_ptr += item * (G * D)
        _combine(out_ptr, parts_ptr, peaks_ptr, sums_ptr, program, num_parts, G, D, NUM_HEADS, NUM_COLUMNS, CHUNK)


@triton.jit(do_not_specialize=["table_stride"])
def _attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    seq_lens_ptr,
    rows_ptr,
    plan_ptr,
    parts_ptr,
    peaks_ptr,
    sums_ptr,
    counters_ptr,
    splits_ptr,
    q_stride,
    table_stride,
    scale_log2,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PLAN_COLUMNS: tl.constexpr,
    IS_MIXED: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    program = tl.program_id(0)
    plan_ptr += program * PLAN_COLUMNS
    sequence = tl.load(plan_ptr)
    offset = tl.load(plan_ptr + 1)  # in units, from the sequence's first
    seq_len = tl.load(plan_ptr + 2)
    todo = tl.load(plan_ptr + 3)
    share = tl.load(plan_ptr + 4)
    rows, columns = tl.arange(0, NUM_ROWS), tl.arange(0, NUM_COLUMNS)
    mask = (rows < G)[:, None] & (columns < D)[None, :]
    elements = rows[:, None] * D + columns[None, :]
    position = program * share
    split_parts = 0
    split_item = 0
    while todo > 0:
        units = tl.maximum(tl.cdiv(seq_len, UNIT), 1)
        head = offset // units
        first = offset % units
        count = tl.minimum(units - first, todo)
        begin = first * UNIT
        row = tl.load(rows_ptr + sequence) if IS_MIXED else sequence
        item = row * HEADS + head
        q = tl.load(q_ptr + row.to(tl.int64) * q_stride + head * (G * D) + elements, mask=mask, other=0.0)
        acc, peak, total = _attend_keys(
            q,
            k_ptr + head * D,
            v_ptr + head * D,
            tables_ptr + sequence.to(tl.int64) * table_stride,
            begin,
            tl.minimum(seq_len, begin + count * UNIT),
            scale_log2,
            HEADS,
            D,
            P,
            TILE,
        )
        item_ptr = out_ptr + item.to(tl.int64) * (G * D)
        if count == units:
            total = tl.where(total > 0, total, 1.0)  # a padding row has no keys
            tl.store(item_ptr + elements, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        else:
            slot = 2 * program + (first == 0).to(tl.int32)
            tl.store(parts_ptr + slot * (G * D) + elements, acc, mask=mask)
            tl.store(peaks_ptr + slot * G + rows, peak, mask=rows < G)
            tl.store(sums_ptr + slot * G + rows, total, mask=rows < G)
            first_program = (position - first) // share
            num_parts = (position - first + units - 1) // share - first_program + 1
            if IN_PLACE:
                tl.debug_barrier()  # all threads' stores come before the arrival
                if tl.atomic_add(counters_ptr + first_program, 1, sem="acq_rel") == num_parts - 1:
                    _combine(
                        item_ptr,
                        parts_ptr,
                        peaks_ptr,
                        sums_ptr,
                        first_program,
                        num_parts,
                        G,
                        D,
                        NUM_HEADS,
                        NUM_COLUMNS,
                        CHUNK,
                    )
                    tl.store(counters_ptr + first_program, 0)
            elif first == 0:
                split_parts = num_parts
                split_item = item
        position += count
        offset += count
        todo -= count
        if (offset == units * HEADS) & (todo > 0):
            offset = 0
            sequence += 1
            if IS_MIXED:
                while tl.load(rows_ptr + sequence + 1) - tl.load(rows_ptr + sequence) != 1:
                    sequence += 1
            seq_len = tl.load(seq_lens_ptr + sequence)
    if not IN_PLACE:
        tl.store(splits_ptr + 2 * program, split_parts)
        tl.store(splits_ptr + 2 * program + 1, split_item)


def plan_decode(seq_lens: Tensor, workspace: DecodeWorkspace, cu_seqlens_q: Tensor | None = None) -> None:
    """Cut a step's work into the programs' shares, on the device, and leave them in `workspace.plan`.

    seq_lens (S,) int32 may be 0. With cu_seqlens_q (S + 1,) int32, sequences with other than one row are left out.
    """
    block_p = 16
    _plan_kernel[(triton.cdiv(workspace.num_programs, block_p),)](
        seq_lens,
        seq_lens if cu_seqlens_q is None else cu_seqlens_q,
        workspace.plan,
        len(seq_lens),
        workspace.num_programs,
        HEADS=workspace.num_kv_heads,
        UNIT=_UNIT,
        MIN_UNITS=workspace.config.min_units,
        IS_MIXED=cu_seqlens_q is not None,
        BLOCK_S=512,
        BLOCK_P=block_p,
        COLUMNS=_PLAN_COLUMNS,
    )


def attend_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    out: Tensor,
    cu_seqlens_q: Tensor | None = None,
) -> None:
    """Write softmax(q k^T * scale) v of each sequence's one row into `out`; the rows of others are left alone.

    q (T, H, D), whose rows may lie apart; out (T, H, D) and k_cache, v_cache (N, P, K, D) contiguous; seq_lens (S,)
    and block_tables (S, B) int32. seq_lens and cu_seqlens_q are those that `workspace` was planned for. Without
    cu_seqlens_q row i is sequence i's. A sequence without keys gets zeros.
    """
    _, page, heads, head_dim = k_cache.shape
    config, group = workspace.config, workspace.group
    assert q.stride()[1:] == (head_dim, 1)
    assert block_tables.stride(1) == 1
    assert out.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    num_heads, num_columns = triton.next_power_of_2(group), max(16, triton.next_power_of_2(head_dim))
    shrink = max(1, num_columns * q.element_size() // 256)  # shared memory has room for fewer wide rows
    combining = {
        "G": group,
        "D": head_dim,
        "NUM_HEADS": num_heads,
        "NUM_COLUMNS": num_columns,
        "CHUNK": max(1, 512 * config.num_warps // (num_heads * num_columns)),  # 16 registers of each thread
        "num_warps": config.num_warps,
    }
    results = (out, workspace.parts, workspace.peaks, workspace.sums)
    _attend_kernel[(workspace.num_programs,)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        seq_lens,
        seq_lens if cu_seqlens_q is None else cu_seqlens_q,
        workspace.plan,
        *results[1:],
        workspace.counters,
        workspace.splits,
        q.stride(0),
        block_tables.stride(0),
        scale * _LOG2_E,
        HEADS=heads,
        P=page,
        UNIT=_UNIT,
        TILE=max(16, config.tile // shrink),
        NUM_ROWS=max(16, num_heads),  # tl.dot works on 16 at least
        PLAN_COLUMNS=_PLAN_COLUMNS,
        IS_MIXED=cu_seqlens_q is not None,
        IN_PLACE=config.combines_in_place,
        num_stages=config.num_stages,
        **combining,
    )
    if not config.combines_in_place:
        _combine_kernel[(workspace.num_programs,)](*results, workspace.splits, **combining)
