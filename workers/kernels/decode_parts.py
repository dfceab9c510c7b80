"""Puts together what the programs of decode attention have left of an item that crosses their shares, in Triton.

Called by the last of them, in `workers.kernels.triton_decode`; where the partial results lie is
`workers.kernels.decode_plan`'s.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_parts(  # type: ignore[no-untyped-def]
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
