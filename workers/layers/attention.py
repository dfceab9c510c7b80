"""Causal attention of one layer over the paged KV cache, and the description of a step that it works from.

Called by `workers.models.decoder`; the metadata is built by `workers.batch`. The arithmetic is in `workers.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.kernels.attention import AttentionBackend, select_store


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Where the T tokens of a step lie among its S sequences and in the cache. Tensors are int32, on the device.

    Row i of a sequence with q_len rows in this step stands at position seq_len - q_len + i, and sees all up to it.
    """

    slot_mapping: Tensor
    """(T,) block id * P + offset where a token's key and value go; -1 writes nothing."""
    cu_seqlens_q: Tensor
    """(S + 1,) where each sequence's rows begin, and T."""
    seq_lens: Tensor
    """(S,) keys of each sequence, this step's included."""
    block_tables: Tensor
    """(S, B) ids of each sequence's blocks; what lies beyond its seq_len is any valid id."""
    max_seqlen_q: int
    max_seqlen_k: int


class Attention(nn.Module):
    """softmax(q k^T / sqrt(D)) v for this rank's heads."""

    def __init__(self, head_dim: int, backend: AttentionBackend, device: torch.device) -> None:
        super().__init__()
        self.scale = head_dim**-0.5
        self.backend = backend
        self.store = select_store(device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache_layer: tuple[Tensor, Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """q (T, H, D), k and v (T, K, D) -> (T, H, D).

        The whole step's keys and values are stored before any query attends: a sequence may read what another one,
        which shares a block with it, writes in this very step.
        """
        k_cache, v_cache = kv_cache_layer
        self.store(k, v, k_cache, v_cache, metadata.slot_mapping)
        return self.backend.forward(q, k_cache, v_cache, metadata, self.scale)
