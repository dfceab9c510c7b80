"""A decoder layer's arithmetic in plain torch, rounded exactly where transformers rounds.

What a CPU runs, and the oracle of `workers.kernels.fused`. See `workers.kernels.ops.LayerOps` for what each does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.kernels.reference import store_kvcache_torch


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, may_split: bool = False) -> Tensor:
    """x @ weight^T + bias, never split."""
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(gate) * up of a linear layer."""
    return silu_mul(F.linear(x, weight, bias))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight (arXiv 1910.07467)."""
    exact = x.float()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return weight * exact.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of x + residual: (the norm, the sum)."""
    total = sum_of_splits(x, residual.dtype) + residual
    return rms_norm(total, weight, eps), total


def sum_of_splits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, N) as it is; (S, T, N) summed over the parts."""
    return x.sum(0).to(dtype) if x.dim() == 3 else x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def norm_rope_store(
    qkv: Tensor,
    num_q_heads: int,
    cos_sin: tuple[Tensor, Tensor],
    kv_cache_layer: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    qk_weights: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Normalise and turn q and k, store k and v; returns q."""
    k_cache, v_cache = kv_cache_layer
    num_kv_heads, head_dim = k_cache.shape[-2:]
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if qk_weights is not None:
        q, k = rms_norm(q, qk_weights[0], eps), rms_norm(k, qk_weights[1], eps)
    q, k = apply_rotary(q, *cos_sin), apply_rotary(k, *cos_sin)
    if qkv.is_cuda:
        from workers.kernels.store_kvcache import store_kvcache

        store_kvcache(k, v, k_cache, v_cache, slot_mapping)
    else:
        store_kvcache_torch(k, v, k_cache, v_cache, slot_mapping)
    return q


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x (T, heads, D) by its position's angle; in float32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
