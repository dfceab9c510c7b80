"""FlashAttention behind the backend interface: version 3 (Hopper) and the `flash_attn` 2.x package.

Imported only when one of them was chosen. Both read the paged cache in place, and align the causal mask to the last
key, as a step needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.kernels.triton_backend import TritonAttention

if TYPE_CHECKING:
    from workers.layers.attention import AttentionMetadata


_MOSTLY_DECODING = 64
"""Rows a sequence, on average, below which a step is mostly decoding."""


class FlashAttention3:
    """FlashAttention-3 for prompts, with any block size, and this project's own kernels for steps that mostly decode:
    those read ragged batches faster (`benchmarks/results/`), and for captured ones, whose lengths the host has not."""

    name = "flash_attn_3"
    fits_graph = True

    def __init__(self) -> None:
        import flash_attn_interface  # noqa: F401, registers the operator

        # Not the package's Python function: that one imports torch's compiler at its first call, which takes 5 s.
        self._attend = torch.ops.flash_attn_3.fwd
        self._own = TritonAttention()

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        if metadata.max_seqlen_q is None or len(q) < _MOSTLY_DECODING * len(metadata.seq_lens):
            return self._own.forward(q, k_cache, v_cache, metadata, scale)
        out: Tensor = self._attend(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            seqused_k=metadata.seq_lens,
            max_seqlen_q=metadata.max_seqlen_q,
            page_table=metadata.block_tables.contiguous(),
            softmax_scale=scale,
            is_causal=True,
        )[0]
        return out


class FlashAttention2:
    """Decode-only steps use the split-key kernel, others the ragged one; block sizes are multiples of 256.

    Captured steps of any lengths use this project's own kernels, which read the lengths on the device.
    """

    name = "flash_attn"
    fits_graph = True

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._attend_ragged = flash_attn_varlen_func
        self._attend_decode = flash_attn_with_kvcache
        self._own = TritonAttention()

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        if metadata.max_seqlen_q is None or metadata.num_shared_blocks is not None:
            return self._own.forward(q, k_cache, v_cache, metadata, scale)
        if metadata.max_seqlen_q == 1:
            return self._attend_decode(
                q.unsqueeze(1),
                k_cache,
                v_cache,
                cache_seqlens=metadata.seq_lens,
                block_table=metadata.block_tables,
                softmax_scale=scale,
                causal=True,
            ).squeeze(1)
        return self._attend_ragged(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=F.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            block_table=metadata.block_tables,
        )
