"""With how many blocks all sequences of a step begin: as far as their block tables agree.

The driver's prefix cache makes requests that begin alike hold the same blocks, and a rank sees that from what it is
told: every rank comes to the same number. Owns a copy of the block tables on the host. Called by
`workers.model_runner` for each step, in order; knows nothing of the device.
"""

from __future__ import annotations

import numpy as np

from scheduler.step import IntArray, Step
from workers.batch import changed_entries
from workers.model_config import ModelConfig

_MIN_SPARED_BYTES = 64_000_000
"""Of keys and values of a layer. To read them takes an H200 15 us, and what spares it at most half as long."""
_CHUNK = 64
"""Blocks that are compared at a time."""


def min_spared_keys(model: ModelConfig, num_ranks: int) -> int:
    """For `SharedBlocks`. By an equal share of the heads, not a rank's own: all ranks must run the same steps."""
    return -(-_MIN_SPARED_BYTES * num_ranks // (4 * model.num_key_value_heads * model.head_dim))


class SharedBlocks:
    """The block tables of all slots, and what the last step's rows had in common."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, min_spared_keys: int) -> None:
        """`min_spared_keys`: those that reading shared ones once spares a step, all its rows together; with fewer,
        none count as shared."""
        self._block_size = block_size
        self._min_spared_keys = min_spared_keys
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._slots: IntArray = np.zeros(0, dtype=np.int32)
        self._limit = 0
        self._num_blocks = 0

    def count(self, step: Step) -> int:
        """Enter the step's new blocks; how many blocks all of its rows begin with, each of them having a key more."""
        self._tables.reshape(-1)[changed_entries(step, self._tables.shape[1])] = step.block_ids
        limit = (int(step.seq_lens.min()) - 1) // self._block_size
        # The tables of rows that stay differ where they have differed before.
        is_known = not step.new_slots and np.array_equal(step.slots, self._slots)
        if not is_known or self._num_blocks == self._limit < limit:
            self._num_blocks = self._compare(step.slots, limit)
        self._slots, self._limit = step.slots, limit
        num_blocks = min(self._num_blocks, limit)
        num_spared_keys = num_blocks * self._block_size * (len(step.slots) - 1)
        return num_blocks if num_spared_keys >= self._min_spared_keys else 0

    def _compare(self, slots: IntArray, limit: int) -> int:
        for start in range(0, limit, _CHUNK):
            tables = self._tables[slots, start : min(start + _CHUNK, limit)]
            is_same = (tables == tables[0]).all(axis=0)
            if not is_same.all():
                return start + int(is_same.argmin())
        return limit
