"""The layers' work on a GPU: Triton kernels that do in one pass over memory what would take several, and the choice
between cuBLAS and our own kernels for linear layers.

Each rounds where `workers.kernels.reference_ops` does, which is where transformers does. Called by the layers through
`workers.kernels.ops`; imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.kernels import reference_ops
from workers.kernels.gemv import fits_gemv, gemv
from workers.kernels.overlap import can_overlap
from workers.kernels.skinny_linear import fits_skinny_linear, load_sum_of_splits, skinny_linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, may_split: bool = False) -> Tensor:
    """x (T, K) @ weight (N, K)^T + bias: (T, N), or (S, T, N) float32, of which the sum is meant, if it `may_split`."""
    if fits_gemv(x, weight):
        return gemv(x, weight, bias)
    if fits_skinny_linear(x, weight):
        return skinny_linear(x, weight, bias, may_split=may_split)
    return reference_ops.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(gate) * up of a linear layer: x (T, K), weight (2 I, K) -> (T, I)."""
    if fits_gemv(x, weight):
        return gemv(x, weight, bias, gated=True)
    if fits_skinny_linear(x, weight, gated=True):
        return skinny_linear(x, weight, bias, gated=True)
    return silu_mul(reference_ops.linear(x, weight, bias))


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    size,
    eps,
    SPLITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if OVERLAP:
        gdc_wait()
    x = load_sum_of_splits(x_ptr, row * size + columns, mask, num_rows * size, SPLITS, out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        x = x + tl.load(residual_ptr + row * size + columns, mask=mask, other=0.0)
        tl.store(residual_ptr + row * size + columns, x, mask=mask)
    exact = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact) / size + eps)
    tl.store(out_ptr + row * size + columns, (exact * scale).to(weight.dtype) * weight, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (T, size) contiguous -> x / rms(x) * weight."""
    out = torch.empty_like(x)
    _launch_rms_norm(x, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of x + residual, both (T, size) contiguous: (the norm, the sum); the sum takes the residual's place.

    x may be (S, T, size) float32, of which the sum is meant.
    """
    out = torch.empty_like(residual)
    _launch_rms_norm(x, residual, weight, out, eps)
    return out, residual


def _launch_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    size = out.shape[-1]
    num_rows = out.numel() // size
    block = triton.next_power_of_2(size)
    overlap = can_overlap(x.device)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        num_rows,
        size,
        eps,
        SPLITS=len(x) if x.dim() > out.dim() else 1,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=min(8, max(1, block // 512)),
        launch_pdl=overlap,
    )


@triton.jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, out_ptr, num_columns, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    gate = tl.load(gate_up_ptr + row * 2 * num_columns + columns, mask=mask)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * num_columns + columns, mask=mask)
    exact = gate.to(tl.float32)
    silu = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype)
    tl.store(out_ptr + row * num_columns + columns, silu * up, mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """(T, 2 I) contiguous, gate before up -> silu(gate) * up, (T, I)."""
    num_tokens, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, num_columns)
    block = min(1024, triton.next_power_of_2(num_columns))
    # It follows cuBLAS, after which a launch that may be early comes half a microsecond later. So it need not wait.
    _silu_mul_kernel[(num_tokens, triton.cdiv(num_columns, block))](
        gate_up, out, num_columns, BLOCK=block, OVERLAP=can_overlap(gate_up.device), num_warps=4
    )
    return out


@triton.jit
def _norm_rope_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    num_q_heads,
    num_kv_heads,
    eps,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    num_heads = num_q_heads + 2 * num_kv_heads
    columns = tl.arange(0, BLOCK)
    is_column = (columns < HALF)[None, :]
    offsets = heads[:, None] * (2 * HALF) + columns[None, :]
    mask = (heads < num_heads)[:, None] & is_column
    token_ptr = qkv_ptr + token * num_heads * (2 * HALF)
    if OVERLAP:
        gdc_wait()
    first = tl.load(token_ptr + offsets, mask=mask, other=0.0)
    second = tl.load(token_ptr + HALF + offsets, mask=mask, other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)  # 64 bits: offsets pass 2**31 in a large cache
    is_query, is_value = heads < num_q_heads, heads >= num_q_heads + num_kv_heads
    v_offsets = (slot * num_kv_heads - num_q_heads - num_kv_heads) * (2 * HALF) + offsets
    v_mask = mask & is_value[:, None] & (slot >= 0)
    tl.store(v_cache_ptr + v_offsets, first, mask=v_mask)
    tl.store(v_cache_ptr + HALF + v_offsets, second, mask=v_mask)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
        q_x = tl.load(q_weight_ptr + columns, mask=columns < HALF, other=0.0)[None, :]
        q_y = tl.load(q_weight_ptr + HALF + columns, mask=columns < HALF, other=0.0)[None, :]
        k_x = tl.load(k_weight_ptr + columns, mask=columns < HALF, other=0.0)[None, :]
        k_y = tl.load(k_weight_ptr + HALF + columns, mask=columns < HALF, other=0.0)[None, :]
        x = ((x * scale).to(first.dtype) * tl.where(is_query[:, None], q_x, k_x)).to(tl.float32)
        y = ((y * scale).to(first.dtype) * tl.where(is_query[:, None], q_y, k_y)).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + columns, mask=columns < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + columns, mask=columns < HALF, other=0.0)[None, :]
    turned_x = (x * cos - y * sin).to(first.dtype)
    turned_y = (y * cos + x * sin).to(first.dtype)
    q_offsets = token * num_q_heads * (2 * HALF) + offsets
    q_mask = mask & is_query[:, None]
    tl.store(q_ptr + q_offsets, turned_x, mask=q_mask)
    tl.store(q_ptr + HALF + q_offsets, turned_y, mask=q_mask)
    k_offsets = (slot * num_kv_heads - num_q_heads) * (2 * HALF) + offsets
    k_mask = mask & ~is_query[:, None] & ~is_value[:, None] & (slot >= 0)
    tl.store(k_cache_ptr + k_offsets, turned_x, mask=k_mask)
    tl.store(k_cache_ptr + HALF + k_offsets, turned_y, mask=k_mask)


def norm_rope_store(
    qkv: Tensor,
    num_q_heads: int,
    cos_sin: tuple[Tensor, Tensor],
    kv_cache_layer: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    qk_weights: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Normalise (if there are weights) and turn the heads of q and k, write k and v into their slots; returns q.

    qkv (T, (H + 2 K) * D) contiguous -> q (T, H, D). cos and sin (T, 1, D/2) float32; slot -1 is not written.
    """
    k_cache, v_cache = kv_cache_layer
    num_kv_heads, head_dim = k_cache.shape[-2:]
    num_tokens = qkv.shape[0]
    q = qkv.new_empty(num_tokens, num_q_heads, head_dim)
    cos, sin = cos_sin
    q_weight, k_weight = qk_weights if qk_weights is not None else (None, None)
    block_heads = 8
    overlap = can_overlap(qkv.device)
    _norm_rope_store_kernel[(num_tokens, triton.cdiv(num_q_heads + 2 * num_kv_heads, block_heads))](
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        q,
        k_cache,
        v_cache,
        slot_mapping,
        num_q_heads,
        num_kv_heads,
        eps,
        HAS_NORM=qk_weights is not None,
        HALF=head_dim // 2,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block_heads,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return q
