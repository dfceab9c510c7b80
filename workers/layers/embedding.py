"""The two ends of a decoder, split over the ranks by vocabulary rows: token embedding and language-model head."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from workers.kernels.ops import LayerOps
from workers.layers.parameter import CheckpointSlice, ParameterFactory
from workers.parallel import TensorParallel
from workers.shard_plan import Span


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the ids it holds, and has zeros for the others: (T,) -> partial sums of (T, hidden)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, span: Span, tp: TensorParallel, new_parameter: ParameterFactory
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.span = span
        self.tp = tp
        self.weight = vocab_weight(vocab_size, hidden_size, span, new_parameter)

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.tp.world_size == 1:
            return F.embedding(input_ids, self.weight)
        local_ids = input_ids - self.span.start
        is_elsewhere = (local_ids < 0) | (local_ids >= self.span.size)
        rows = F.embedding(local_ids.masked_fill(is_elsewhere, 0), self.weight)
        return rows.masked_fill(is_elsewhere.unsqueeze(-1), 0)

    def checkpoint_slices(self, name: str) -> Iterator[CheckpointSlice]:
        yield vocab_slice(f"{name}.weight", self.vocab_size, self.span, self.weight)


class ParallelLMHead(nn.Module):
    """Each rank's logits of its own part of the vocabulary: (S, hidden) -> (S, V/R).

    A tied head is given the embedding's weight, and then reads nothing from the checkpoint.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        span: Span,
        tp: TensorParallel,
        ops: LayerOps,
        new_parameter: ParameterFactory,
        tied_weight: nn.Parameter | None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.span = span
        self.tp = tp
        self.ops = ops
        self.is_tied = tied_weight is not None
        if tied_weight is None:
            self.weight = vocab_weight(vocab_size, hidden_size, span, new_parameter)
        else:
            self.weight = tied_weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.weight)

    def gather(self, logits: Tensor) -> Tensor | None:
        """All ranks' logits on rank 0, without the vocabulary's padding; None elsewhere."""
        gathered = self.tp.gather_last_dim(logits)
        return None if gathered is None else gathered[..., : self.vocab_size]

    def checkpoint_slices(self, name: str) -> Iterator[CheckpointSlice]:
        if not self.is_tied:
            yield vocab_slice(f"{name}.weight", self.vocab_size, self.span, self.weight)


def vocab_weight(vocab_size: int, hidden_size: int, span: Span, new_parameter: ParameterFactory) -> nn.Parameter:
    """(span.size, hidden); the rows past the vocabulary, which no checkpoint fills, are zero."""
    weight = new_parameter(span.size, hidden_size)
    weight[_held(vocab_size, span).size :] = 0
    return weight


def vocab_slice(source: str, vocab_size: int, span: Span, weight: Tensor) -> CheckpointSlice:
    """What the checkpoint has for `span`: its rows in the vocabulary."""
    held = _held(vocab_size, span)
    return CheckpointSlice(source, (vocab_size, weight.shape[1]), 0, held, weight[: held.size])


def _held(vocab_size: int, span: Span) -> Span:
    start = min(span.start, vocab_size)
    return Span(start, min(span.stop, vocab_size) - start)
