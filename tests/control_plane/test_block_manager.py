"""The prefix cache: what is a hit, what is not, and which block is taken next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items

import numpy as np
import pytest

from scheduler.block_manager import BlockManager
from scheduler.sequence import Sequence
from tests.control_plane.fake_model import Harness, make_config, make_sequence, run_all

BLOCK_SIZE = 4
BLOCK_A, BLOCK_B, BLOCK_C, BLOCK_D = ([first, 1, 2, 3] for first in (10, 20, 30, 40))

_seq_ids = itertools.count()


def compute(manager: BlockManager, prompt: Items[int], cache_salt: str = "") -> tuple[Sequence, int]:
    """Allocate and compute a prompt: (the sequence, its cached tokens)."""
    seq = make_sequence(next(_seq_ids), prompt, cache_salt=cache_salt)
    assert manager.can_allocate(seq)
    num_cached = manager.allocate(seq)
    seq.num_computed_tokens = seq.num_tokens
    manager.hash_blocks(seq)
    return seq, num_cached


def free_order(manager: BlockManager) -> list[int]:
    return list(manager.free_block_ids)


def test_a_block_taken_again_forgets_its_content() -> None:
    manager = BlockManager(2, BLOCK_SIZE)
    seq, _ = compute(manager, [*BLOCK_A, 0])
    manager.deallocate(seq)
    seq, num_cached = compute(manager, [*BLOCK_B, 0])  # evicts A
    assert num_cached == 0
    manager.deallocate(seq)
    seq, num_cached = compute(manager, [*BLOCK_A, 0])
    assert num_cached == 0
    manager.deallocate(seq)
    seq, num_cached = compute(manager, [*BLOCK_A, 0])  # its entry is there again
    assert num_cached == BLOCK_SIZE
    manager.check_invariants([seq.block_table])


def test_the_least_recently_used_is_taken_first_and_a_prefix_from_its_end() -> None:
    manager = BlockManager(6, BLOCK_SIZE)
    assert free_order(manager) == [0, 1, 2, 3, 4, 5]
    first, _ = compute(manager, [*BLOCK_A, *BLOCK_B, 0])
    second, _ = compute(manager, BLOCK_C + BLOCK_D)
    assert (first.block_table, second.block_table) == ([0, 1, 2], [3, 4])
    assert free_order(manager) == [5]
    manager.deallocate(second)
    assert free_order(manager) == [5, 4, 3]
    manager.deallocate(first)
    assert free_order(manager) == [2, 5, 4, 3, 1, 0], "block 2 has no content, so it comes first"
    again, num_cached = compute(manager, [*BLOCK_C, 0])
    assert (again.block_table, num_cached) == ([3, 2], BLOCK_SIZE)
    manager.deallocate(again)
    assert free_order(manager) == [2, 5, 4, 1, 0, 3], "used again, so it goes last"


def test_a_hit_moves_a_block_out_of_the_free_list_and_is_counted_by_can_allocate() -> None:
    manager = BlockManager(3, BLOCK_SIZE)
    seq, _ = compute(manager, BLOCK_A + BLOCK_B)
    manager.deallocate(seq)
    other, _ = compute(manager, [0])
    assert manager.num_free_blocks == 2
    assert not manager.can_allocate(make_sequence(-1, [*BLOCK_A, *BLOCK_B, 0])), (
        "two hits, both free: three blocks needed"
    )
    assert manager.can_allocate(make_sequence(-1, [*BLOCK_A, 0]))
    sharer, num_cached = compute(manager, [*BLOCK_A, 0])
    assert num_cached == BLOCK_SIZE
    assert manager.can_allocate(make_sequence(-1, BLOCK_A)) is False, "A may not serve all of a prompt"
    manager.deallocate(other)
    assert manager.can_allocate(make_sequence(-1, [*BLOCK_A, 7])), "A is in use and shared: one needed"
    manager.check_invariants([sharer.block_table])


def test_a_shared_block_is_free_when_its_last_user_is_gone() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    first, _ = compute(manager, [*BLOCK_A, 0])
    second, _ = compute(manager, [*BLOCK_A, 9])
    assert first.block_table[0] == second.block_table[0]
    manager.deallocate(first)
    manager.check_invariants([second.block_table])
    assert second.block_table[0] in manager.used_block_ids
    manager.deallocate(second)
    manager.check_invariants([])
    assert manager.num_free_blocks == 4


def test_the_same_tokens_after_another_prefix_are_no_hit() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    compute(manager, [*BLOCK_A, *BLOCK_B, 0])
    assert compute(manager, [*BLOCK_B, *BLOCK_B, 0])[1] == 0
    assert compute(manager, [*BLOCK_A, *BLOCK_B, 0])[1] == 2 * BLOCK_SIZE


def test_a_hash_collision_is_no_hit() -> None:
    manager = BlockManager(16, BLOCK_SIZE, hash_function=lambda *_: 0)
    compute(manager, [*BLOCK_A, *BLOCK_B, 0])  # B has taken the only entry
    assert compute(manager, [*BLOCK_A, 0])[1] == 0
    assert compute(manager, [*BLOCK_A, 0])[1] == BLOCK_SIZE
    assert compute(manager, [*BLOCK_A, *BLOCK_B, 0])[1] == BLOCK_SIZE
    assert compute(manager, [*BLOCK_B, 0])[1] == 0, "the entry's tokens fit, but not its parent"


def test_two_blocks_of_one_content_are_one_parent() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    first, _ = compute(manager, BLOCK_A)
    second, num_cached = compute(manager, BLOCK_A)
    assert num_cached == 0, "a prompt of one block has to compute it"
    assert first.block_table != second.block_table
    for token_id in BLOCK_B:
        second.append(token_id)
    manager.may_append(second, second.num_tokens)
    second.num_computed_tokens = second.num_tokens
    manager.hash_blocks(second)
    third, num_cached = compute(manager, [*BLOCK_A, *BLOCK_B, 0])
    assert num_cached == 2 * BLOCK_SIZE
    assert third.block_table[:2] == [first.block_table[0], second.block_table[1]]
    manager.check_invariants([first.block_table, second.block_table, third.block_table])


def test_a_salt_never_shares() -> None:
    manager = BlockManager(32, BLOCK_SIZE)
    salts = ["", "a", "b", ""]
    cached = [compute(manager, [*BLOCK_A, *BLOCK_B, 0], salt)[1] for salt in salts]
    assert cached == [0, 0, 0, 2 * BLOCK_SIZE]
    constant = BlockManager(32, BLOCK_SIZE, hash_function=lambda *_: 0)
    cached = [compute(constant, [*BLOCK_A, 0], salt)[1] for salt in ["", "a", "b", "b"]]
    assert cached == [0, 0, 0, BLOCK_SIZE]


def test_without_the_cache_nothing_is_kept() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    compute(manager, [*BLOCK_A, 0])
    assert compute(manager, [*BLOCK_A, 0])[1] == 0
    assert not manager.hash_to_block_id


@pytest.mark.parametrize(
    ("block_size", "length"),
    [(size, size * n + extra) for size in (1, 3, 4) for n in (1, 2, 3) for extra in (-1, 0, 1) if size * n + extra > 0],
)
def test_prompts_around_whole_blocks_asked_twice(block_size: int, length: int) -> None:
    manager = BlockManager(64, block_size)
    prompt = list(range(1, length + 1))
    assert compute(manager, prompt)[1] == 0
    # All whole blocks, but one token is left to compute.
    brute_force = max(n for n in range(length) if n % block_size == 0)
    assert compute(manager, prompt)[1] == brute_force


def test_cached_tokens_are_what_a_brute_force_count_says() -> None:
    """Random prompts of few different tokens, each alone, in a pool that evicts nothing."""
    rng = np.random.default_rng(0)
    config = make_config(num_kv_blocks=4000, block_size=2, vocab_size=3, enable_prefix_caching=True)
    harness = Harness(config)
    known: set[tuple[int, ...]] = set()
    """Every whole-block prefix whose keys and values have been computed."""
    total = 0
    for seq_id in range(60):
        prompt = rng.integers(0, 3, rng.integers(1, 14)).tolist()
        harness.add(make_sequence(seq_id, prompt, max_tokens=int(rng.integers(1, 9))))
        harness.run()
        harness.assert_as_expected(seq_id)
        expected = max(n for n in range(0, len(prompt), 2) if n == 0 or tuple(prompt[:n]) in known)
        assert harness.stories[seq_id].num_cached_tokens == expected
        total += expected
        tokens = prompt + harness.stories[seq_id].token_ids
        known |= {tuple(tokens[:n]) for n in range(2, len(tokens), 2)}  # the last token's have not been computed
    assert total > 50
    assert harness.scheduler.stats().num_cached_tokens == total


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    """Two sequences that together outgrow the pool: one waits, and then computes again only what was evicted."""
    config = make_config(num_kv_blocks=8, block_size=4)
    prompts = [list(range(0, 12)), list(range(20, 32))]
    sequences = [make_sequence(i, prompt, max_tokens=8) for i, prompt in enumerate(prompts)]
    harness = run_all(sequences, config)
    without_cache = make_config(num_kv_blocks=8, block_size=4, enable_prefix_caching=False)
    sequences = [make_sequence(i, prompt, max_tokens=8) for i, prompt in enumerate(prompts)]
    recomputed = run_all(sequences, without_cache)
    stats, other = harness.scheduler.stats(), recomputed.scheduler.stats()
    assert stats.num_preemptions == other.num_preemptions >= 1
    assert stats.num_computed_tokens < other.num_computed_tokens
    assert stats.num_cached_tokens == 0, "recomputation is no cache hit of the caller's"
