"""RMS normalisation (arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from workers.layers.parameter import CheckpointSlice, ParameterFactory
from workers.layers.reduction import Reduction


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32. Every rank holds all of the weight."""

    def __init__(self, size: int, eps: float, new_parameter: ParameterFactory) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size)

    def forward(self, x: Tensor, residual: Tensor | None, reduction: Reduction) -> tuple[Tensor, Tensor]:
        """Of the ranks' partial sums x, (T, size) or parts of it, plus the residual stream: (the norm, the sum)."""
        return reduction.add_norm(x, residual, self.weight, self.eps)

    def checkpoint_slices(self, name: str) -> Iterator[CheckpointSlice]:
        yield CheckpointSlice.whole(f"{name}.weight", self.weight)
