"""Paged causal attention of sequences with several query tokens in a step, in Triton: prompts and their chunks.

A program takes a tile of one sequence's query tokens, with all query heads of one kv head as further rows, so that
keys and values are read once for the group. Sequences of any lengths lie side by side; those with a single row are
left to `workers.kernels.triton_decode`. Called by `workers.kernels.triton_backend`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = math.log2(math.e)
_SEARCH_BLOCK = 512


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the work is laid out on the GPU; changes speed only."""

    rows: int = 128
    """Query tokens x query heads of a program."""
    tile: int = 64
    """Keys that a program works on at a time."""
    num_warps: int = 8
    num_stages: int = 3


@triton.jit
def _find_sequence(cu_seqlens_ptr, num_seqs, query_tile, TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence that a query tile belongs to, and the first of its tiles.

    Sequence s has tiles from cu_seqlens[s] // TOKENS + s on: never fewer than it needs, so some stay empty.
    """
    sequence = -1
    first_tile = 0
    for start in range(0, num_seqs, BLOCK):
        sequences = start + tl.arange(0, BLOCK)
        is_real = sequences < num_seqs
        firsts = tl.load(cu_seqlens_ptr + sequences, mask=is_real, other=0) // TOKENS + sequences
        is_past = is_real & (firsts <= query_tile)
        sequence += tl.sum(is_past.to(tl.int32))
        first_tile = tl.maximum(first_tile, tl.max(tl.where(is_past, firsts, 0)))
    return sequence, first_tile


@triton.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
    q,
    acc,
    peak,
    total,
    k_ptr,
    v_ptr,
    table_ptr,
    last_seen,
    begin,
    stop,
    scale_log2,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Take keys begin..stop into acc, peak and total. Row i sees keys up to last_seen[i]; unmasked, all of them."""
    NUM_COLUMNS: tl.constexpr = q.shape[1]
    columns = tl.arange(0, NUM_COLUMNS)
    keys = tl.arange(0, TILE)
    # Block ids are read a tile ahead: otherwise every tile would wait for two loads, one after the other.
    blocks = tl.load(table_ptr + (begin + keys) // P, mask=begin + keys < stop, other=0)
    for start in range(begin, stop, TILE):
        positions = start + keys
        # 64 bits: elements of a cache pass 2**31.
        offsets = (blocks.to(tl.int64) * P + positions % P) * (HEADS * D)
        offsets = offsets[:, None] + columns[None, :]
        mask = (columns < D)[None, :]
        if IS_MASKED:
            mask = mask & (positions < stop)[:, None]
        if IS_MASKED or D != NUM_COLUMNS:
            k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
            v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        blocks = tl.load(table_ptr + (positions + TILE) // P, mask=positions + TILE < stop, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if IS_MASKED:
            scores = tl.where(positions[None, :] <= last_seen[:, None], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def attend_range(  # type: ignore[no-untyped-def]
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    last_seen,
    begin,
    num_seen_by_all,
    stop,
    scale_log2,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attention of q (rows, columns) to keys begin..stop: weighted sum of values, highest score, sum of weights.

    Row i sees keys up to last_seen[i], which are those before num_seen_by_all, whole tiles from `begin`, and more.
    """
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    peak = tl.full([q.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    for IS_MASKED in tl.static_range(2):
        first = num_seen_by_all if IS_MASKED else begin
        last = stop if IS_MASKED else num_seen_by_all
        acc, peak, total = _attend_tiles(
            q,
            acc,
            peak,
            total,
            k_ptr,
            v_ptr,
            table_ptr,
            last_seen,
            first,
            last,
            scale_log2,
            HEADS,
            D,
            P,
            TILE,
            IS_MASKED,
        )
    return acc, peak, total


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    num_seqs,
    q_stride,
    table_stride,
    scale_log2,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED_G: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    head = tl.program_id(0)
    query_tile = tl.num_programs(1) - 1 - tl.program_id(1)  # a prompt's last tiles, which take longest, come first
    sequence, first_tile = _find_sequence(cu_seqlens_ptr, num_seqs, query_tile, TOKENS, SEARCH_BLOCK)
    first_row = tl.load(cu_seqlens_ptr + sequence)
    q_len = tl.load(cu_seqlens_ptr + sequence + 1) - first_row
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_token = (query_tile - first_tile) * TOKENS
    if (q_len == 1) | (first_token >= q_len):
        return

    NUM_ROWS: tl.constexpr = TOKENS * PADDED_G
    rows, columns = tl.arange(0, NUM_ROWS), tl.arange(0, NUM_COLUMNS)
    tokens = first_token + rows // PADDED_G
    heads = head * G + rows % PADDED_G
    mask = ((tokens < q_len) & (rows % PADDED_G < G))[:, None] & (columns < D)[None, :]
    q_offsets = (first_row + tokens).to(tl.int64) * q_stride + heads * D
    q = tl.load(q_ptr + q_offsets[:, None] + columns[None, :], mask=mask, other=0.0)

    k_ptr += head * D
    v_ptr += head * D
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    num_before = seq_len - q_len
    last_seen = num_before + tokens
    num_seen_by_all = (num_before + first_token + 1) // TILE * TILE
    stop = tl.minimum(seq_len, num_before + first_token + TOKENS)
    acc, _, total = attend_range(
        q,
        k_ptr,
        v_ptr,
        table_ptr,
        last_seen,
        0,
        num_seen_by_all,
        stop,
        scale_log2,
        HEADS,
        D,
        P,
        TILE,
    )
    out_offsets = ((first_row + tokens).to(tl.int64) * (HEADS * G) + heads) * D
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets[:, None] + columns[None, :], result, mask=mask)


def attend_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    out: Tensor,
    config: PrefillConfig,
) -> None:
    """Write softmax(q k^T * scale) v of all sequences with two rows or more into `out`; other rows are left alone.

    q (T, H, D), whose rows may lie apart; out (T, H, D) and k_cache, v_cache (N, P, K, D) contiguous; seq_lens (S,),
    block_tables (S, B) and cu_seqlens_q (S + 1,) int32. A sequence's last row sees all of its keys.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _, page, heads, _ = k_cache.shape
    assert q.stride()[1:] == (head_dim, 1)
    assert block_tables.stride(1) == 1
    assert out.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    group = num_q_heads // heads
    padded_group = triton.next_power_of_2(group)
    columns = max(16, triton.next_power_of_2(head_dim))
    # Wide rows leave room for fewer of them in shared memory and registers.
    shrink = max(1, columns * q.element_size() // 256)
    tokens = max(config.rows // shrink // padded_group, -(-16 // padded_group))
    _prefill_kernel[(heads, num_tokens // tokens + len(seq_lens))](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        len(seq_lens),
        q.stride(0),
        block_tables.stride(0),
        scale * _LOG2_E,
        HEADS=heads,
        G=group,
        D=head_dim,
        P=page,
        TILE=max(16, config.tile // shrink),
        TOKENS=tokens,
        PADDED_G=padded_group,
        NUM_COLUMNS=columns,
        SEARCH_BLOCK=_SEARCH_BLOCK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
