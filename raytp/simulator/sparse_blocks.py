"""The real block manager, whose blocks come into being when they are first used.

A simulated fleet has tens of millions of blocks and uses few of them. Only the two containers are replaced; what is
done with them is `BlockManager`'s own code. Made by `raytp.simulator.replica`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import cast

from scheduler.block_manager import Block, BlockManager


class _Blocks(dict[int, Block]):
    """By id; a block that is not there yet is a new one."""

    def __missing__(self, block_id: int) -> Block:
        block = self[block_id] = Block()
        return block


class _FreeBlocks:
    """The part of OrderedDict that the block manager uses: empty blocks, then unused ones, then those with content."""

    def __init__(self, num_blocks: int) -> None:
        self._empty: OrderedDict[int, None] = OrderedDict()
        self._first_unused = 0
        self._num_blocks = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._empty) + self._num_blocks - self._first_unused + len(self._cached)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self._empty, range(self._first_unused, self._num_blocks), self._cached)

    def __delitem__(self, block_id: int) -> None:
        if block_id in self._empty:
            del self._empty[block_id]
        elif block_id in self._cached:
            del self._cached[block_id]
        else:
            assert block_id == self._first_unused
            self._first_unused += 1

    def __setitem__(self, block_id: int, value: None) -> None:
        self._cached[block_id] = value

    def move_to_end(self, block_id: int, last: bool) -> None:
        assert not last
        del self._cached[block_id]
        self._empty[block_id] = None
        self._empty.move_to_end(block_id, last=False)


class SparseBlockManager(BlockManager):
    """Decides as `BlockManager` does, in memory that grows with use."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        super().__init__(0, block_size, enable_prefix_caching)
        self.blocks = cast("list[Block]", _Blocks())
        self.free_block_ids = cast("OrderedDict[int, None]", _FreeBlocks(num_blocks))
