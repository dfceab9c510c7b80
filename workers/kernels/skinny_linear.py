"""A linear layer over few rows, as in decoding: a Triton kernel for Hopper.

y = x @ W^T with x (M, K) and W (N, K). Where W is large, cuBLAS does this at the speed of memory. Where it is not, most
of a few microseconds goes by in starting and ending, four times in each layer of a model. This kernel's start hides
behind the end of the kernel before it, and its end behind the start of the next (`workers.kernels.overlap`); it has
SiLU(gate) * up in it; and it may leave a sum over splits of K to the norm behind it, where cuBLAS adds a kernel.

A program computes BLOCK_N features of BLOCK_M rows, as a product W @ x^T, so that few rows are the short side of the
tensor cores' tiles. Tiles of W and x come by the tensor memory accelerator, several ahead. Called by
`workers.kernels.fused`; imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from workers.kernels.overlap import can_overlap

_BLOCK_N, _BLOCK_K = 64, 128
_NUM_PROGRAMS = 132
"""As many as an H200 has multiprocessors: more would take turns, with fewer some have nothing to do."""
_MAX_SPLITS = 4
_TILE_BYTES = 200_000
"""Of all tiles that a program holds, in a multiprocessor's 227 KiB."""
_FEW_ROWS, _MAX_ROWS = 64, 256
_MAX_FEATURES, _MAX_ELEMENTS = 32768, 2**23
"""Of a weight, for few rows and for more: beyond, cuBLAS is faster (`benchmarks/linear_layers.py`)."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut."""

    block_m: int
    num_programs: int
    """Before K is split."""
    num_splits: int
    """Of K, each of them a program's."""
    num_stages: int
    """Tiles that are on their way or in use."""


def choose_tiling(num_rows: int, num_features: int, num_columns: int, *, gated: bool, may_split: bool) -> Tiling:
    """For x (num_rows, num_columns) and that many features out."""
    num_blocks = triton.cdiv(num_features, _BLOCK_N)
    block_m = max(16, min(64, triton.next_power_of_2(num_rows)))
    if 128 < num_rows <= 160 and 5 * num_blocks <= _NUM_PROGRAMS:
        block_m = 32  # of three blocks of 64, nearly one would be padding
    elif num_rows > 192 and num_blocks * triton.cdiv(num_rows, block_m) > _NUM_PROGRAMS:
        block_m = 128
    num_programs = num_blocks * triton.cdiv(num_rows, block_m)
    num_splits = 1
    while (
        may_split
        and num_splits < _MAX_SPLITS
        and 2 * num_splits * num_programs <= _NUM_PROGRAMS
        and num_columns % (2 * num_splits * _BLOCK_K) == 0
    ):
        num_splits *= 2
    tile_bytes = 2 * _BLOCK_K * (block_m + _BLOCK_N * (1 + gated))
    num_tiles = triton.cdiv(num_columns // num_splits, _BLOCK_K)
    return Tiling(block_m, num_programs, num_splits, max(2, min(num_tiles, _TILE_BYTES // tile_bytes)))


@cache
def _is_hopper(device: torch.device) -> bool:
    """Nothing else has been measured."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fits_skinny_linear(x: Tensor, weight: Tensor, *, gated: bool = False) -> bool:
    """Whether `skinny_linear` can do x (M, K) @ weight (N, K)^T, and was faster than cuBLAS with sizes like these."""
    (num_rows, num_columns), num_features = x.shape, len(weight)
    if not 0 < num_rows <= _MAX_ROWS:
        return False
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    if not (is_half and _is_hopper(x.device) and _is_aligned(x) and _is_aligned(weight)):
        return False
    if num_rows <= _FEW_ROWS:
        return num_features <= _MAX_FEATURES
    if weight.numel() >= _MAX_ELEMENTS:
        return False
    tiling = choose_tiling(num_rows, num_features // (1 + gated), num_columns, gated=gated, may_split=False)
    return tiling.num_programs <= _NUM_PROGRAMS


def _is_aligned(tensor: Tensor) -> bool:
    """To 16 bytes, as the tensor memory accelerator wants it."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and tensor.shape[1] % 8 == 0


@triton.jit
def load_sum_of_splits(  # type: ignore[no-untyped-def]
    ptr, offsets, mask, split_stride, SPLITS: tl.constexpr, dtype: tl.constexpr
):
    """What `skinny_linear` has left to be added up, and any other layer's result as it is."""
    total = tl.load(ptr + offsets, mask=mask, other=0.0)
    if SPLITS > 1:
        for split in tl.static_range(1, SPLITS):
            total += tl.load(ptr + split * split_stride + offsets, mask=mask, other=0.0)
    return total.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_linear_kernel(  # type: ignore[no-untyped-def]
    x_tiles,
    w_tiles,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """num_columns: of each split."""
    first = tl.program_id(0) * BLOCK_N
    first_row = tl.program_id(1) * BLOCK_M
    split = tl.program_id(2)
    first_column = split * num_columns
    if OVERLAP:
        gdc_wait()
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for column in tl.range(0, num_columns, BLOCK_K, num_stages=STAGES):
        w = w_tiles.load([first, first_column + column])
        x = x_tiles.load([first_row, first_column + column])
        if GATED:
            w_up = w_tiles.load([num_outputs + first, first_column + column])
            up = tl.dot(w_up, x.T, up)
        y = tl.dot(w, x.T, y)
    if OVERLAP:
        gdc_launch_dependents()  # earlier, and programs that wait would take this one's place on a multiprocessor
    features, rows = first + tl.arange(0, BLOCK_N), first_row + tl.arange(0, BLOCK_M)
    if bias_ptr is not None:
        is_feature = (features < num_outputs) & (split == 0)
        y += tl.load(bias_ptr + features, mask=is_feature, other=0.0)[:, None]
        if GATED:
            up += tl.load(bias_ptr + num_outputs + features, mask=is_feature, other=0.0)[:, None]
    y = y.to(out_ptr.dtype.element_ty)
    if GATED:  # rounded as in `reference_ops`
        exact = y.to(tl.float32)
        y = (exact / (1.0 + tl.exp(-exact))).to(y.dtype) * up.to(y.dtype)
    offsets = (split.to(tl.int64) * num_rows + rows[None, :]) * num_outputs + features[:, None]
    tl.store(out_ptr + offsets, y, mask=(rows < num_rows)[None, :] & (features < num_outputs)[:, None])


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, may_split: bool = False
) -> Tensor:
    """x (M, K) -> x @ weight^T + bias, (M, N), in float32 before it is rounded.

    weight (N, K); all tensors as `fits_skinny_linear` has found them. `gated`: the rows of the weight are gates and
    then as many ups, and the result silu(gate) * up (M, N / 2). `may_split`, if it is not gated: it may also be
    (S, M, N) float32, whose sum is meant: `load_sum_of_splits`.
    """
    assert not (gated and may_split), "SiLU of a part is no part of SiLU"
    (num_rows, num_columns), num_outputs = x.shape, len(weight) // (1 + gated)
    tiling = choose_tiling(num_rows, num_outputs, num_columns, gated=gated, may_split=may_split)
    out = x.new_empty(num_rows, num_outputs)
    if tiling.num_splits > 1:
        out = x.new_empty(tiling.num_splits, num_rows, num_outputs, dtype=torch.float32)
    overlap = can_overlap(x.device)
    grid = triton.cdiv(num_outputs, _BLOCK_N), triton.cdiv(num_rows, tiling.block_m), tiling.num_splits
    _skinny_linear_kernel[grid](
        TensorDescriptor.from_tensor(x, [tiling.block_m, _BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [_BLOCK_N, _BLOCK_K]),
        bias,
        out,
        num_rows,
        num_outputs,
        num_columns // tiling.num_splits,
        BLOCK_M=tiling.block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        STAGES=tiling.num_stages,
        GATED=gated,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
