"""This project's own attention kernels behind the backend interface: any block size, head size and group of heads.

Imported only when it was chosen. A step's decoding sequences go to `workers.kernels.triton_decode`, its prompts to
`workers.kernels.triton_prefill`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.kernels.decode_plan import DecodeConfig, DecodeWorkspace, plan_decode
from workers.kernels.shared_prefix import SharedConfig, attend_shared
from workers.kernels.triton_decode import attend_decode
from workers.kernels.triton_prefill import PrefillConfig, attend_prefill

if TYPE_CHECKING:
    from workers.layers.attention import AttentionMetadata


class TritonAttention:
    """For one model and one stream: the steps share a work space, made by the first, which no capture may be."""

    name = "triton"
    fits_graph = True

    def __init__(
        self,
        decode: DecodeConfig | None = None,
        prefill: PrefillConfig | None = None,
        shared: SharedConfig | None = None,
    ) -> None:
        self._decode = decode or DecodeConfig()
        self._prefill = prefill or PrefillConfig()
        self._shared = shared or SharedConfig()
        self._workspace: DecodeWorkspace | None = None
        self._planned: tuple[AttentionMetadata, bool] | None = None

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        """q (T, H, D), k_cache and v_cache (N, P, K, D) -> (T, H, D). A row without keys may hold anything.

        The layers of a step hand over the same metadata object, and the first one plans for all: a captured step
        needs an object of its own, and an object serves one step only.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        keys = (k_cache, v_cache, metadata.seq_lens, metadata.block_tables)
        cu_seqlens_q = None if metadata.max_seqlen_q == 1 else metadata.cu_seqlens_q
        workspace = self._plan(q, k_cache, metadata, cu_seqlens_q)
        shared = None
        if metadata.num_shared_blocks is not None:
            shared = attend_shared(q, *keys, metadata.num_shared_blocks, scale, self._shared, cu_seqlens_q)
        attend_decode(q, *keys, scale, workspace, out, cu_seqlens_q, shared)
        if cu_seqlens_q is not None:
            attend_prefill(q, *keys, cu_seqlens_q, scale, out, self._prefill)
        return out

    def _plan(
        self, q: Tensor, k_cache: Tensor, metadata: AttentionMetadata, cu_seqlens_q: Tensor | None
    ) -> DecodeWorkspace:
        num_kv_heads, head_dim = k_cache.shape[2:]
        if self._workspace is None or not self._workspace.fits(q, k_cache):
            self._workspace = DecodeWorkspace(q.shape[1], num_kv_heads, head_dim, q.device, self._decode)
            self._planned = None
        is_capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._planned is None or self._planned[0] is not metadata or self._planned[1] != is_capturing:
            plan_decode(metadata.seq_lens, self._workspace, cu_seqlens_q, metadata.num_shared_blocks, k_cache.shape[1])
            self._planned = (metadata, is_capturing)
        return self._workspace
