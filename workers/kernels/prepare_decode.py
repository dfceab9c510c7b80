"""The Triton kernel at the head of a decode graph: from slots and lengths to everything the model's layers read.

One program a row. It applies the row's new block, looks up the token that the slot sampled last, and writes position,
cos and sin, the slot to store to, and the row's block table. A padding row (length 0) stores nothing. Called by
`workers.decode_graph`; imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _prepare_kernel(  # type: ignore[no-untyped-def]
    slots_ptr,
    seq_lens_ptr,
    new_blocks_ptr,
    last_tokens_ptr,
    tables_ptr,
    inv_freq_ptr,
    input_ids_ptr,
    cos_ptr,
    sin_ptr,
    slot_mapping_ptr,
    row_tables_ptr,
    block_size,
    attention_factor,
    NUM_BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TABLE: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(seq_lens_ptr + row) - 1
    new_block = tl.load(new_blocks_ptr + row)
    last = position // block_size
    table_ptr = tables_ptr + slot * NUM_BLOCKS
    if new_block >= 0:
        tl.store(table_ptr + last, new_block)
    for start in range(0, NUM_BLOCKS, BLOCK_TABLE):
        entries = start + tl.arange(0, BLOCK_TABLE)
        blocks = tl.load(table_ptr + entries, mask=entries <= last, other=0)
        blocks = tl.where((entries == last) & (new_block >= 0), new_block, blocks)
        tl.store(row_tables_ptr + row * NUM_BLOCKS + entries, blocks, mask=entries <= last)
    if position >= 0:
        block = tl.load(table_ptr + last)
        block = tl.where(new_block >= 0, new_block, block)
        tl.store(slot_mapping_ptr + row, block * block_size + position % block_size)
    else:
        tl.store(slot_mapping_ptr + row, -1)
    tl.store(input_ids_ptr + row, tl.load(last_tokens_ptr + slot))
    columns = tl.arange(0, BLOCK)
    mask = columns < HALF
    angles = position.to(tl.float32) * tl.load(inv_freq_ptr + columns, mask=mask, other=0.0)
    tl.store(cos_ptr + row * HALF + columns, tl.cos(angles) * attention_factor, mask=mask)
    tl.store(sin_ptr + row * HALF + columns, tl.sin(angles) * attention_factor, mask=mask)


def prepare_decode(
    slots: Tensor,
    seq_lens: Tensor,
    new_blocks: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    inv_freq: Tensor,
    attention_factor: float,
    block_size: int,
    input_ids: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    row_tables: Tensor,
) -> None:
    """Fill the last five tensors, of S rows each, and enter new blocks in the slots' `block_tables`.

    slots, seq_lens, new_blocks (S,) int32: a row's length after this step (0 for padding), and the block it has got
    with this step (-1 for none). last_tokens (slots,) int64; block_tables (slots, B) int32; inv_freq (D/2,) float32.
    input_ids (S,) int64; cos and sin (S, 1, D/2) float32; slot_mapping (S,) and row_tables (S, B) int32.
    """
    num_blocks = block_tables.shape[1]
    _prepare_kernel[(len(slots),)](
        slots,
        seq_lens,
        new_blocks,
        last_tokens,
        block_tables,
        inv_freq,
        input_ids,
        cos,
        sin,
        slot_mapping,
        row_tables,
        block_size,
        attention_factor,
        NUM_BLOCKS=num_blocks,
        HALF=len(inv_freq),
        BLOCK=triton.next_power_of_2(len(inv_freq)),
        BLOCK_TABLE=min(1024, triton.next_power_of_2(num_blocks)),
    )
