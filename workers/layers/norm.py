"""RMS normalisation (arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from workers.kernels.ops import LayerOps
from workers.layers.parameter import CheckpointSlice, ParameterFactory


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32. Every rank holds all of it."""

    def __init__(self, size: int, eps: float, ops: LayerOps, new_parameter: ParameterFactory) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.weight = new_parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Of x + residual: (the norm, the sum). The residual may be overwritten."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def checkpoint_slices(self, name: str) -> Iterator[CheckpointSlice]:
        yield CheckpointSlice.whole(f"{name}.weight", self.weight)
