"""How a layer makes its parameters, and how it says which part of which checkpoint tensor belongs in them.

The shard of a parameter is decided where the layer is written, not where files are read: `workers.weights` walks over
the `CheckpointSlice`s of a model and needs to know no layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from workers.shard_plan import Span


@dataclass(frozen=True, slots=True)
class ParameterFactory:
    """Makes uninitialised parameters directly where and how they are needed."""

    dtype: torch.dtype
    device: torch.device

    def __call__(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointSlice:
    """The part `span` along `dim` of the checkpoint's tensor `source`, which belongs in `target`."""

    source: str
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    dim: int
    span: Span
    target: Tensor
    """A view of a parameter, of `shape` but with `span.size` along `dim`."""

    @classmethod
    def whole(cls, source: str, target: Tensor) -> CheckpointSlice:
        """All of a tensor that every rank holds."""
        return cls(source, tuple(target.shape), 0, Span(0, target.shape[0]), target)


@runtime_checkable
class CheckpointModule(Protocol):
    """A layer that is filled from a checkpoint."""

    def checkpoint_slices(self, name: str) -> Iterator[CheckpointSlice]:
        """What to read, for the layer whose full name in the model is `name`."""
        ...
