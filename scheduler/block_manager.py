"""Owns the physical blocks of the KV cache: which are free, which are used, and which hold a known prefix.

Only ids are managed here; the memory itself lives in each rank's pool, at the same ids. Called by `Scheduler`, and by
nobody else. Every operation costs O(blocks touched).

Prefix cache. A full block is named by xxh64 over its parent's hash and its own tokens. The hash is only a hint: a hit
is confirmed by the token ids and by the identity of the parent's content, so that even a constant hash function gives
right output. A freed block keeps its content until it is taken again, and the least recently used is taken first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

import xxhash

from scheduler.sequence import Sequence

HashFunction = Callable[[int, bytes], int]


def hash_block(parent_hash: int, token_bytes: bytes) -> int:
    """xxh64 over a block's tokens, seeded with the hash of the block before it."""
    return xxhash.xxh64_intdigest(token_bytes, seed=parent_hash)


class Block:
    """One physical block. `content_id` is unique to (parent content, tokens) for as long as the block holds them."""

    __slots__ = ("content_id", "hash", "parent", "ref_count", "token_bytes")

    def __init__(self) -> None:
        self.ref_count = 0
        self.forget()

    def forget(self) -> None:
        """The content is about to be overwritten."""
        self.hash: int | None = None
        self.token_bytes = b""
        self.parent: int | str = ""
        """`content_id` of the block before; the cache salt for a first block."""
        self.content_id = 0


class BlockManager:
    """Allocates blocks to sequences, shares those that hold the same prefix, and takes them back."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = hash_block,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hash = hash_function
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """In order of reuse: those without content, then the least recently used."""
        self.used_block_ids: set[int] = set()
        self.hash_to_block_id: dict[int, int] = {}
        self._next_content_id = 1

    def emptied(self, num_blocks: int) -> BlockManager:
        """One for a fresh pool of this size, otherwise alike."""
        return BlockManager(num_blocks, self.block_size, self.enable_prefix_caching, self._hash)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence refers to, with or without cached content."""
        return len(self.free_block_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq: Sequence) -> bool:
        """Whether blocks for every known token of a waiting sequence are there, cached ones included."""
        num_blocks = self.num_blocks_for(seq.num_tokens)
        if num_blocks <= self.num_free_blocks:
            return True
        hits = self._find_cached_blocks(seq)
        num_free_hits = sum(self.blocks[block_id].ref_count == 0 for block_id in hits)
        return num_blocks - len(hits) + num_free_hits <= self.num_free_blocks

    def allocate(self, seq: Sequence) -> int:
        """Give a waiting sequence blocks for all its known tokens; returns how many of the tokens are cached.

        At least one token is left to compute. `can_allocate` must hold.
        """
        assert not seq.block_table
        hits = self._find_cached_blocks(seq)
        for block_id in hits:
            self._refer(block_id)
        seq.block_table = hits
        seq.num_hashed_blocks = len(hits)
        num_cached_tokens = len(hits) * self.block_size
        self.may_append(seq, seq.num_tokens)
        return num_cached_tokens

    def can_append(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether a running sequence can grow to `num_tokens`."""
        return self.num_blocks_for(num_tokens) - len(seq.block_table) <= self.num_free_blocks

    def may_append(self, seq: Sequence, num_tokens: int) -> None:
        """Extend the block table to hold `num_tokens`, if it does not yet. `can_append` must hold."""
        for _ in range(self.num_blocks_for(num_tokens) - len(seq.block_table)):
            seq.block_table.append(self._take_free_block())

    def hash_blocks(self, seq: Sequence) -> None:
        """Publish the full blocks of a running sequence whose tokens are known and whose step has been sent."""
        if not self.enable_prefix_caching:
            return
        num_full = min(seq.num_computed_tokens, seq.num_tokens) // self.block_size
        for index in range(seq.num_hashed_blocks, num_full):
            self._publish(seq, index)
        seq.num_hashed_blocks = max(seq.num_hashed_blocks, num_full)

    def deallocate(self, seq: Sequence) -> None:
        """Take back a sequence's blocks. The end of a prefix becomes reusable before its beginning."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
                if block.hash is None:
                    self.free_block_ids.move_to_end(block_id, last=False)
        seq.block_table = []
        seq.num_hashed_blocks = 0

    def check_invariants(self, block_tables: Iterable[list[int]]) -> None:
        """Assert what must hold after any operation, given the block tables of all sequences that have one."""
        free, used = set(self.free_block_ids), self.used_block_ids
        assert not free & used
        assert free | used == set(range(len(self.blocks)))
        references = Counter(block_id for table in block_tables for block_id in table)
        for block_id, block in enumerate(self.blocks):
            assert block.ref_count == references[block_id]
            assert (block_id in used) == (block.ref_count > 0)
            assert (block.hash is None) == (block.content_id == 0)
        for block_hash, block_id in self.hash_to_block_id.items():
            assert self.blocks[block_id].hash == block_hash

    def _find_cached_blocks(self, seq: Sequence) -> list[int]:
        """Ids of the leading blocks that hold this sequence's tokens already."""
        if not self.enable_prefix_caching:
            return []
        hits: list[int] = []
        parent: int | str = seq.cache_salt
        for index in range((seq.num_tokens - 1) // self.block_size):
            block_id = self.hash_to_block_id.get(self._block_hash(seq, index))
            if block_id is None or not self._holds(block_id, parent, seq.block_token_bytes(index, self.block_size)):
                break
            hits.append(block_id)
            parent = self.blocks[block_id].content_id
        return hits

    def _holds(self, block_id: int, parent: int | str, token_bytes: bytes) -> bool:
        block = self.blocks[block_id]
        return block.parent == parent and block.token_bytes == token_bytes

    def _block_hash(self, seq: Sequence, index: int) -> int:
        hashes = seq.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else xxhash.xxh64_intdigest(seq.cache_salt.encode())
            hashes.append(self._hash(parent, seq.block_token_bytes(len(hashes), self.block_size)))
        return hashes[index]

    def _publish(self, seq: Sequence, index: int) -> None:
        block = self.blocks[seq.block_table[index]]
        block.hash = self._block_hash(seq, index)
        block.token_bytes = seq.block_token_bytes(index, self.block_size)
        block.parent = self.blocks[seq.block_table[index - 1]].content_id if index else seq.cache_salt
        present = self.hash_to_block_id.get(block.hash)
        if present is not None and self._holds(present, block.parent, block.token_bytes):
            # Same content in two blocks: they share an identity, so that either can be the parent of a hit.
            block.content_id = self.blocks[present].content_id
            return
        block.content_id = self._next_content_id
        self._next_content_id += 1
        self.hash_to_block_id[block.hash] = seq.block_table[index]

    def _refer(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_block_ids[block_id]
            self.used_block_ids.add(block_id)
        block.ref_count += 1

    def _take_free_block(self) -> int:
        block_id = next(iter(self.free_block_ids))
        block = self.blocks[block_id]
        if block.hash is not None and self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.forget()
        self._refer(block_id)
        return block_id
