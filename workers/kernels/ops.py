"""The seam between the layers and their arithmetic, but for attention: Triton kernels on a GPU, plain torch elsewhere.

Both sides round at the same places. Plain torch is the oracle, and also runs on a GPU with the "torch" attention
backend. Called by the layers, which choose once when they are built; importing Triton is left to whoever needs it.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor


class LayerOps(Protocol):
    """Arithmetic of a decoder layer over T tokens."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, may_split: bool = False) -> Tensor:
        """x (T, K) @ weight (N, K)^T + bias: (T, N).

        `may_split`, for a norm to come: or (S, T, N) float32 parts of it, which the norm adds up.
        """
        ...

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of a linear layer whose features are gates, then ups: x (T, K), weight (2 I, K) -> (T, I)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Of x + residual: (the norm, the sum). May overwrite the residual with the sum.

        x is (T, size), or (S, T, size) float32 parts of it.
        """
        ...

    def norm_rope_store(
        self,
        qkv: Tensor,
        num_q_heads: int,
        cos_sin: tuple[Tensor, Tensor],
        kv_cache_layer: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        qk_weights: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor:
        """Normalise (if there are weights) and turn q and k, store k and v: qkv (T, (H + 2 K) * D) -> q (T, H, D).

        The whole step's keys and values are stored before any query attends: a sequence may read what another one,
        which shares a block with it, writes in this very step.
        """
        ...


def select_ops(device: torch.device, backend_name: str) -> LayerOps:
    """The fused kernels on a GPU, unless the plain "torch" backend was asked for; plain torch elsewhere."""
    if device.type == "cuda" and backend_name != "torch":
        from workers.kernels import fused

        return cast(LayerOps, fused)
    from workers.kernels import reference_ops

    return cast(LayerOps, reference_ops)
