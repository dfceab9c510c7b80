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

_MIN_SPARED_BYTES = 256_000_000
"""Of a layer's keys and values. To read them takes an H200 60 us, or 25 where its L2 cache has them; the kernel that
reads shared ones, and rows more that pad a step, take some 8 each, and in mixed steps batches gained from here on."""
_CHUNK = 64
"""Blocks that are compared at a time."""


def min_spared_keys(model: ModelConfig, num_ranks: int) -> int:
    """For `SharedBlocks`, of 16-bit elements. By an equal share of the heads, not a rank's own: all ranks must run the
    same steps."""
    return -(-_MIN_SPARED_BYTES * num_ranks // (4 * model.num_key_value_heads * model.head_dim))


class SharedBlocks:
    """The block tables of all slots, and what the rows of the last step had in common, if they were compared."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, min_spared_keys: int) -> None:
        """`min_spared_keys`: those that reading shared ones once spares the decoding rows of a step together; with
        fewer, none count as shared."""
        self._block_size = block_size
        self._min_spared_keys = min_spared_keys
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._slots: IntArray = np.zeros(0, dtype=np.int32)
        self._num_blocks = 0

    def count(self, step: Step) -> int:
        """Enter the step's new blocks; how many blocks all of its rows begin with, each of them having a key more."""
        self._tables.reshape(-1)[changed_entries(step, self._tables.shape[1])] = step.block_ids
        limit = (int(step.seq_lens.min()) - 1) // self._block_size
        num_sparing = int(np.count_nonzero(step.num_scheduled_tokens == 1)) - 1
        if limit * self._block_size * num_sparing < self._min_spared_keys:
            self._slots = step.slots[:0]
            return 0
        # The tables of rows that stay differ where they have differed before: what grows is each row's own.
        if step.new_slots or not np.array_equal(step.slots, self._slots):
            self._num_blocks = self._compare(step.slots, limit)
        self._slots = step.slots
        num_spared_keys = self._num_blocks * self._block_size * num_sparing
        return self._num_blocks if num_spared_keys >= self._min_spared_keys else 0

    def _compare(self, slots: IntArray, limit: int) -> int:
        for start in range(0, limit, _CHUNK):
            tables = self._tables[slots, start : min(start + _CHUNK, limit)]
            is_same = (tables == tables[0]).all(axis=0)
            if not is_same.all():
                return start + int(is_same.argmin())
        return limit
