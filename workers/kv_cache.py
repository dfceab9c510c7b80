"""The rank's pool of KV-cache blocks: one tensor, of which each layer sees its part.

Called by the model runner, which decides how many blocks fit. Which block holds which tokens is the control plane's
business alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of `num_blocks` blocks: [2, layers, N, P, K, D]."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        keys, values = data.unbind(0)
        self._layers = list(zip(keys.unbind(0), values.unbind(0), strict=True))

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """A fresh pool. Every slot is written before its value counts."""
        shape = (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        data = torch.empty(shape, dtype=dtype, device=device)
        if device.type != "cpu":
            data.zero_()  # a kernel that loads whole blocks multiplies unused slots by zero, which keeps a NaN
        return cls(data)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The layer's (k_cache, v_cache), each (N, P, K, D)."""
        return self._layers[index]
