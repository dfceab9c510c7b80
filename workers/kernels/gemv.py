"""A linear layer over one row, as in decoding at batch 1: a Triton kernel that reads the weight about as fast as memory
gives it.

y = x @ W^T with x (1, K) and W (N, K). A program takes BLOCK_N rows of W, all columns at once, and sums their products
with x element by element.

It overlaps the kernel before it (`workers.kernels.overlap`), and meanwhile reads W: whoever fills a weight must have
another kernel, or a synchronisation, between that and this.

Called by `workers.kernels.fused`; imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.kernels.overlap import can_overlap

_BLOCK_K = 256
_MAX_PARTS = 16
"""Of _BLOCK_K columns, in a program's registers."""


def fits_gemv(x: Tensor, weight: Tensor) -> bool:
    """Whether `gemv` can do x (M, K) @ weight (N, K)^T. float32 is left to cuBLAS, since it is for exactness."""
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    fits = len(x) == 1 and weight.shape[1] <= _MAX_PARTS * _BLOCK_K
    return fits and is_half and x.is_contiguous() and weight.is_contiguous()


@triton.jit
def _gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    num_outputs,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tiles are (BLOCK_N, PARTS, BLOCK_K)."""
    if OVERLAP:
        gdc_launch_dependents()
    columns = tl.arange(0, PARTS)[None, :, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    which = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:  # each gate before its up
        features = tl.minimum(which // 2, num_outputs - 1) + (which % 2) * num_outputs
    else:
        features = tl.minimum(which, num_outputs - 1)
    rows = features.to(tl.int64)[:, None, None] * NUM_COLUMNS  # W may have more than 2**31 elements
    w = tl.load(w_ptr + rows + columns, mask=columns < NUM_COLUMNS, other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_wait()
    of_x = columns + tl.zeros([BLOCK_N, 1, 1], tl.int32)  # in the layout of w
    x = tl.load(x_ptr + of_x, mask=of_x < NUM_COLUMNS, other=0.0)
    y = tl.sum(tl.sum(x.to(tl.float32) * w.to(tl.float32), 1), 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + features).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    if GATED:  # rounded as in `reference_ops`
        gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
        exact = gate.to(tl.float32)
        y = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype) * up
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(out_ptr + outputs, y, mask=outputs < num_outputs)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """x (1, K) -> x @ weight^T + bias, (1, N), in float32 before it is rounded.

    weight (N, K); all tensors contiguous and of one dtype, bf16 or fp16. `gated`: the rows of the weight are gates and
    then as many ups, and the result silu(gate) * up (1, N / 2).
    """
    num_columns = x.shape[1]
    num_outputs = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(1, num_outputs)
    parts = max(4, triton.next_power_of_2(triton.cdiv(num_columns, _BLOCK_K)))
    block_n = max(2 if gated else 1, min(8, 64 // parts))  # a gate and its up lie in one program
    overlap = can_overlap(x.device)
    _gemv_kernel[(triton.cdiv(len(weight), block_n),)](
        x,
        weight,
        bias,
        out,
        num_outputs,
        NUM_COLUMNS=num_columns,
        BLOCK_N=block_n,
        BLOCK_K=_BLOCK_K,
        PARTS=parts,
        GATED=gated,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
