"""Paged attention of one query token per sequence, in Triton: reads each sequence's keys and values once, at the
speed of the memory, whatever their lengths.

Each program works on its share of the plan (`workers.kernels.decode_plan`). An item, one (sequence, kv head), that lies
in one share is written at once; where it crosses shares, each program leaves a partial result, and the last to arrive
combines them. An item may begin with what `workers.kernels.shared_prefix` has left of keys that all sequences share.
Called by `workers.kernels.triton_backend`; knows nothing of layers or steps.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.kernels.decode_parts import combine_parts
from workers.kernels.decode_plan import PLAN_COLUMNS, UNIT, DecodeWorkspace
from workers.kernels.overlap import can_overlap
from workers.kernels.shared_prefix import SharedAttention, load_shared

_LOG2_E = math.log2(math.e)


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]
    q,
    acc,
    peak,
    total,
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
    """Attention of q (rows, columns) over keys begin..stop: weighted sum of values, highest score, sum of weights.

    acc, peak and total: the same of the keys before.
    """
    NUM_COLUMNS: tl.constexpr = q.shape[1]
    columns = tl.arange(0, NUM_COLUMNS)
    keys = tl.arange(0, TILE)
    # Summed at the end: a sum over warps in every tile costs time.
    totals = tl.where((keys == 0)[None, :], total[:, None], 0.0)
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
def _next_sequence(seq_lens_ptr, rows_ptr, sequence, IS_MIXED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence after this one that has work; there must be one."""
    sequence += 1
    while tl.load(seq_lens_ptr + sequence) == 0:
        sequence += 1
    if IS_MIXED:
        while tl.load(rows_ptr + sequence + 1) - tl.load(rows_ptr + sequence) != 1:
            sequence += 1
    return sequence


@triton.jit(do_not_specialize=["table_stride", "num_items"])
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
    num_shared_blocks_ptr,
    shared_parts_ptr,
    shared_peaks_ptr,
    shared_sums_ptr,
    num_items,
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
    NUM_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
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
    num_shared = 0
    if NUM_SPLITS > 0:
        num_shared = tl.load(num_shared_blocks_ptr) * P
    while todo > 0:
        units = tl.cdiv(seq_len - num_shared, UNIT)
        head = offset // units
        first = offset % units
        count = tl.minimum(units - first, todo)
        begin = num_shared + first * UNIT
        row = tl.load(rows_ptr + sequence) if IS_MIXED else sequence
        item = row * HEADS + head
        q = tl.load(q_ptr + row.to(tl.int64) * q_stride + head * (G * D) + elements, mask=mask, other=0.0)
        acc, peak, total = load_shared(
            shared_parts_ptr,
            shared_peaks_ptr,
            shared_sums_ptr,
            sequence * HEADS + head,
            num_items,
            (num_shared > 0) & (first == 0),
            G,
            D,
            NUM_ROWS,
            NUM_COLUMNS,
            NUM_SPLITS,
        )
        acc, peak, total = _attend_keys(
            q,
            acc,
            peak,
            total,
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
            tl.store(item_ptr + elements, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        else:
            slot = 2 * program + (first == 0).to(tl.int32)
            tl.store(parts_ptr + slot * (G * D) + elements, acc, mask=mask)
            tl.store(peaks_ptr + slot * G + rows, peak, mask=rows < G)
            tl.store(sums_ptr + slot * G + rows, total, mask=rows < G)
            first_program = (position - first) // share
            num_parts = (position - first + units - 1) // share - first_program + 1
            tl.debug_barrier()  # all threads' stores come before the arrival
            if tl.atomic_add(counters_ptr + first_program, 1, sem="acq_rel") == num_parts - 1:
                combine_parts(
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
        position += count
        offset += count
        todo -= count
        if (offset == units * HEADS) & (todo > 0):
            offset = 0
            sequence = _next_sequence(seq_lens_ptr, rows_ptr, sequence, IS_MIXED)
            seq_len = tl.load(seq_lens_ptr + sequence)


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
    shared: SharedAttention | None = None,
) -> None:
    """Write softmax(q k^T * scale) v of each sequence's one row into `out`; the rows of others are left alone.

    q (T, H, D), whose rows may lie apart; out (T, H, D) and k_cache, v_cache (N, P, K, D) contiguous; seq_lens (S,)
    and block_tables (S, B) int32. seq_lens, cu_seqlens_q and the number of shared blocks are those that `workspace` was
    planned for. Without cu_seqlens_q row i is sequence i's. The row of a sequence without keys is left alone.
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
    overlap = can_overlap(q.device)
    _attend_kernel[(workspace.num_programs,)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        seq_lens,
        seq_lens if cu_seqlens_q is None else cu_seqlens_q,
        workspace.plan,
        workspace.parts,
        workspace.peaks,
        workspace.sums,
        workspace.counters,
        *((None,) * 4 if shared is None else (shared.num_blocks, shared.parts, shared.peaks, shared.sums)),
        len(seq_lens) * heads,
        q.stride(0),
        block_tables.stride(0),
        scale * _LOG2_E,
        HEADS=heads,
        G=group,
        D=head_dim,
        P=page,
        UNIT=UNIT,
        TILE=max(16, config.tile // shrink),
        NUM_ROWS=max(16, num_heads),  # tl.dot works on 16 at least
        NUM_HEADS=num_heads,
        NUM_COLUMNS=num_columns,
        CHUNK=max(1, 512 * config.num_warps // (num_heads * num_columns)),  # 16 registers of each thread
        PLAN_COLUMNS=PLAN_COLUMNS,
        IS_MIXED=cu_seqlens_q is not None,
        NUM_SPLITS=0 if shared is None else len(shared.parts),
        OVERLAP=overlap,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        launch_pdl=overlap,
    )
