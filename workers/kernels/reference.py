"""Paged attention and the cache write in plain torch: the CPU's backend, and the oracle of the others.

Reads lengths on the host, so it does not fit a CUDA graph. The softmax is float32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from workers.layers.attention import AttentionMetadata


def store_kvcache_torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy k and v (T, K, D) into slots `slot_mapping` (T,) of the caches (N, P, K, D); -1 is skipped."""
    is_written = slot_mapping >= 0
    slots = slot_mapping[is_written].long()
    k_cache.flatten(0, 1).index_copy_(0, slots, k[is_written])
    v_cache.flatten(0, 1).index_copy_(0, slots, v[is_written])


class TorchAttention:
    """Decode rows attend together, padded to the longest; a prompt's rows attend by themselves."""

    name = "torch"
    fits_graph = False

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        """q (T, H, D), k_cache and v_cache (N, P, K, D) -> (T, H, D)."""
        out = torch.empty_like(q)
        starts = metadata.cu_seqlens_q.tolist()
        q_lens = [stop - start for start, stop in pairwise(starts)]
        decoding = [sequence for sequence, q_len in enumerate(q_lens) if q_len == 1]
        groups = [([sequence], q_len) for sequence, q_len in enumerate(q_lens) if q_len > 1]
        if decoding:
            groups.append((decoding, 1))
        for sequences, q_len in groups:
            first = torch.tensor([starts[sequence] for sequence in sequences], device=q.device)
            rows = (first.unsqueeze(1) + torch.arange(q_len, device=q.device)).flatten()
            chosen = torch.tensor(sequences, device=q.device)
            seq_lens, block_tables = metadata.seq_lens[chosen], metadata.block_tables[chosen]
            out[rows] = _attend(q[rows].unflatten(0, (-1, q_len)), k_cache, v_cache, seq_lens, block_tables, scale)
        return out


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, block_tables: Tensor, scale: float
) -> Tensor:
    """S sequences with the same number of rows: q (S, q_len, H, D) -> (S * q_len, H, D).

    The H / K query heads that share a kv head are laid out as further rows of it, so that keys are never repeated.
    """
    num_sequences, q_len, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    slots = _slots(seq_lens, block_tables, k_cache.shape[1])
    k, v = (_gather(cache, slots) for cache in (k_cache, v_cache))
    positions = seq_lens.unsqueeze(1) - q_len + torch.arange(q_len, device=q.device)
    is_seen = torch.arange(k.shape[2], device=q.device) <= positions.unsqueeze(-1)
    is_seen = is_seen.repeat(1, num_q_heads // num_kv_heads, 1).unsqueeze(1)
    grouped = q.float().unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=is_seen, scale=scale)
    out = out.unflatten(2, (-1, q_len)).permute(0, 3, 1, 2, 4)
    return out.reshape(num_sequences * q_len, num_q_heads, head_dim).to(q.dtype)


def _slots(seq_lens: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """Where each sequence's keys lie, (S, longest).

    The padding repeats a sequence's last slot: what unused slots hold may not even be a number.
    """
    positions = torch.arange(int(seq_lens.max()), device=seq_lens.device)
    positions = torch.minimum(positions, seq_lens.unsqueeze(1) - 1)
    return block_tables.gather(1, positions // block_size) * block_size + positions % block_size


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Keys or values at `slots`: (N, P, K, D) -> (S, K, longest, D) float32."""
    rows = cache.flatten(0, 1).index_select(0, slots.flatten())
    return rows.view(*slots.shape, *cache.shape[2:]).transpose(1, 2).float()
