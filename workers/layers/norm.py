"""RMS normalisation (arXiv 1910.07467), rounded exactly where transformers rounds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.layers.parameter import CheckpointSlice, ParameterFactory


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32. Every rank holds all of it."""

    def __init__(self, size: int, eps: float, new_parameter: ParameterFactory) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Of x + residual: (the norm, the sum)."""
        total = x + residual
        return self(total), total

    def checkpoint_slices(self, name: str) -> Iterator[CheckpointSlice]:
        yield CheckpointSlice.whole(f"{name}.weight", self.weight)
