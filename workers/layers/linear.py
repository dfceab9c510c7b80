"""Linear layers whose weight is split over the ranks.

Column-parallel layers split the output features and need no communication; the row-parallel layer that follows splits
its input features the same way, and its results are to be summed over the ranks: one sum for each pair (Megatron-LM,
arXiv 1909.08053), which the norm behind it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from workers.kernels.ops import LayerOps
from workers.layers.parameter import CheckpointSlice, ParameterFactory
from workers.parallel import TensorParallel
from workers.shard_plan import RankShard, Span


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """One checkpoint tensor of a column-parallel layer, and this rank's span of its output features."""

    name: str
    """Of its module, which stands beside the layer's own in the checkpoint."""
    num_features: int
    span: Span


class ColumnParallelLinear(nn.Module):
    """This rank's output features of one or more linear layers with the same input, one below the other.

    (T, in_features) -> (T, sum of the parts' span sizes).
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[ColumnPart, ...],
        bias: bool,
        ops: LayerOps,
        new_parameter: ParameterFactory,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.parts = parts
        out_features = sum(part.span.size for part in parts)
        self.weight = new_parameter(out_features, in_features)
        self.bias = new_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def checkpoint_slices(self, name: str) -> Iterator[CheckpointSlice]:
        siblings = name.rpartition(".")[0]
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is None:
                continue
            targets = parameter.split([part.span.size for part in self.parts])
            for part, target in zip(self.parts, targets, strict=True):
                shape = (part.num_features, *parameter.shape[1:])
                yield CheckpointSlice(f"{siblings}.{part.name}.{kind}", shape, 0, part.span, target)


class GatedColumnParallelLinear(ColumnParallelLinear):
    """silu(gate) * up of two layers of equal size, of which this rank holds the same features: (T, in) -> (T, span)."""

    def __init__(
        self,
        in_features: int,
        num_features: int,
        names: tuple[str, str],
        span: Span,
        bias: bool,
        ops: LayerOps,
        new_parameter: ParameterFactory,
    ) -> None:
        """`names`: of the gate, then of up."""
        parts = tuple(ColumnPart(name, num_features, span) for name in names)
        super().__init__(in_features, parts, bias, ops, new_parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.gated_linear(x, self.weight, self.bias)


class QKVParallelLinear(ColumnParallelLinear):
    """The projections to this rank's q, k and v heads: (T, in) -> (T, (H + 2 K) * D), H and K being the rank's."""

    def __init__(
        self,
        in_features: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        shard: RankShard,
        bias: bool,
        ops: LayerOps,
        new_parameter: ParameterFactory,
    ) -> None:
        q = Span(shard.q_heads.start * head_dim, shard.q_heads.size * head_dim)
        kv = Span(shard.kv_heads.start * head_dim, shard.kv_heads.size * head_dim)
        parts = (
            ColumnPart("q_proj", num_q_heads * head_dim, q),
            ColumnPart("k_proj", num_kv_heads * head_dim, kv),
            ColumnPart("v_proj", num_kv_heads * head_dim, kv),
        )
        super().__init__(in_features, parts, bias, ops, new_parameter)


class RowParallelLinear(nn.Module):
    """A linear layer over this rank's input features: (T, span) -> its part of the sum over the ranks, (T, out).

    That part may itself be in S parts, (S, T, out) float32.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        span: Span,
        bias: bool,
        tp: TensorParallel,
        ops: LayerOps,
        new_parameter: ParameterFactory,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.span = span
        self.tp = tp
        self.ops = ops
        self.weight = new_parameter(out_features, span.size)
        self.bias = new_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.tp.rank == 0 else None  # added once, before the sum
        return self.ops.linear(x, self.weight, bias, may_split=True)

    def checkpoint_slices(self, name: str) -> Iterator[CheckpointSlice]:
        shape = (self.weight.shape[0], self.in_features)
        yield CheckpointSlice(f"{name}.weight", shape, 1, self.span, self.weight)
        if self.bias is not None:
            yield CheckpointSlice.whole(f"{name}.bias", self.bias)
