"""Where the ranks' partial sums become one: on the way into the next norm, which adds them to the residual stream.

Row-parallel layers and the embedding give partial sums; the norm that follows each of them sums over the ranks first.
With few rows on GPUs that reach each other's memory that is one kernel of our own; otherwise it is an all-reduce and a
norm. Made once for a model, and shared by its layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.kernels.ops import LayerOps
from workers.parallel import TensorParallel

AFTER_ATTENTION, AFTER_MLP, AFTER_EMBEDDING = 0, 1, 2
_NUM_PLACES = 3
"""Two sums in a row never use one place: a rank that is ahead must not overwrite what another still reads."""


class Reduction:
    """Sums over the ranks, for rows of `size` elements."""

    def __init__(self, tp: TensorParallel, ops: LayerOps) -> None:
        self.tp = tp
        self._ops = ops
        self._own: Tensor | None = None

    def use_peer_memory(self, max_rows: int, size: int, dtype: torch.dtype) -> None:
        """From now on sum up to `max_rows` rows through shared memory, if the ranks can; all ranks must call it."""
        rows = self.tp.share_memory((_NUM_PLACES, max_rows, size), dtype)
        if rows is None:
            return
        from workers.kernels.peer_reduce import FLAG_STRIDE, MAX_PROGRAMS

        flags = self.tp.share_memory((MAX_PROGRAMS, self.tp.world_size, FLAG_STRIDE), torch.int32)
        assert flags is not None
        self._own = rows[self.tp.rank]
        self._parts = [tuple(each[place] for each in rows) for place in range(_NUM_PLACES)]
        self._flags = tuple(flags)

    def place_for(self, which: int, num_rows: int) -> Tensor | None:
        """Where a layer should put its partial sums, (num_rows, size); None if it does not matter."""
        if self._own is None or num_rows > self._own.shape[1]:
            return None
        return self._own[which, :num_rows]

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Of the partial sums x (T, size) of all ranks, plus the residual: (the norm, the sum).

        The residual may be overwritten.
        """
        if self._own is not None and x.untyped_storage().data_ptr() == self._own.untyped_storage().data_ptr():
            from workers.kernels.peer_reduce import reduce_add_norm

            parts = self._parts[int(x.storage_offset()) // self._own[0].numel()]
            return reduce_add_norm(parts, self._flags, self.tp.rank, x.shape[0], residual, weight, eps)
        x = self.tp.all_reduce(x)
        if residual is None:
            return self._ops.rms_norm(x, weight, eps), x
        return self._ops.add_rms_norm(x, residual, weight, eps)
