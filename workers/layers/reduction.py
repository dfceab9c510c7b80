"""Where the ranks' partial sums become one: on the way into the next norm, which adds them to the residual stream.

Row-parallel layers and the embedding give partial sums; the norm that follows each of them sums over the ranks first.
With few rows on GPUs that reach each other's memory that is one kernel of our own; otherwise it is an all-reduce and a
norm. Made once for a model, and shared by its layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.kernels.ops import LayerOps
from workers.kernels.reference_ops import sum_of_splits
from workers.parallel import TensorParallel

_NUM_TURNS = 3
"""A mailbox fills, the one before it is emptied, and a rank that is ahead already writes into the next one."""


class Reduction:
    """Sums over the ranks, for rows of `size` elements."""

    def __init__(self, tp: TensorParallel, ops: LayerOps) -> None:
        self.tp = tp
        self._ops = ops
        self._mailboxes: tuple[Tensor, ...] = ()
        """In peer memory, if it is used; for up to so many rows:"""
        self._max_rows = 0

    def use_peer_memory(self, max_rows: int, size: int, dtype: torch.dtype) -> None:
        """From now on sum up to `max_rows` rows through shared memory, if the ranks can; all ranks must call it."""
        shape = (_NUM_TURNS, self.tp.world_size, max_rows, size)
        mailboxes = self.tp.share_memory(shape, torch.int16 if dtype.itemsize == 2 else torch.int32)
        if mailboxes is None:
            return
        self._mailboxes = tuple(mailboxes)
        self._turns = torch.zeros(max_rows, dtype=torch.int32, device=mailboxes[self.tp.rank].device)
        self._max_rows = max_rows

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Of the partial sums x (T, size) of all ranks, plus the residual: (the norm, the sum).

        If there is a residual, a rank's x may be in parts, (S, T, size) float32; the residual may be overwritten.
        """
        if self._mailboxes and x.shape[-2] <= self._max_rows:
            from workers.kernels.peer_reduce import reduce_add_norm

            return reduce_add_norm(x, self._mailboxes, self._turns, self.tp.rank, residual, weight, eps)
        if self.tp.world_size > 1:
            x = self.tp.all_reduce(sum_of_splits(x, weight.dtype))
        if residual is None:
            return self._ops.rms_norm(x, weight, eps), x
        return self._ops.add_rms_norm(x, residual, weight, eps)
