"""What must hold of any shard plan, and the splits that the design names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.errors import ConfigError
from workers.shard_plan import RankShard, Span, plan_shards


def _plan(num_q_heads: int, num_kv_heads: int, world_size: int, intermediate: int = 1536) -> tuple[RankShard, ...]:
    return plan_shards(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate,
        vocab_size=49_152,
        world_size=world_size,
    )


def _heads(plan: tuple[RankShard, ...]) -> list[tuple[int, int]]:
    return [(shard.q_heads.size, shard.kv_heads.size) for shard in plan]


def _assert_tiles(spans: list[Span], total: int) -> None:
    """The spans follow each other, none is empty, and together they are [0, total)."""
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == total
    assert all(span.size > 0 for span in spans)


@given(data=st.data(), num_kv_heads=st.integers(1, 16), group=st.integers(1, 12), vocab_size=st.integers(1, 300_000))
def test_plan(data: st.DataObject, num_kv_heads: int, group: int, vocab_size: int) -> None:
    num_q_heads = num_kv_heads * group
    intermediate = data.draw(st.integers(1, 20_000))
    world_size = data.draw(st.integers(1, min(num_q_heads, intermediate)))
    plan = plan_shards(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab_size,
        world_size=world_size,
    )
    assert [shard.rank for shard in plan] == list(range(world_size))
    _assert_tiles([shard.q_heads for shard in plan], num_q_heads)
    _assert_tiles([shard.intermediate for shard in plan], intermediate)
    for shard in plan:
        read = {head // group for head in range(shard.q_heads.start, shard.q_heads.stop)}
        assert read == set(range(shard.kv_heads.start, shard.kv_heads.stop))
        # The rank's own kernels find kv head h // (H / K) of its own heads: it must be the same one.
        local_group, rest = divmod(shard.q_heads.size, shard.kv_heads.size)
        assert rest == 0
        for local in range(shard.q_heads.size):
            assert shard.kv_heads.start + local // local_group == (shard.q_heads.start + local) // group
    if world_size <= num_kv_heads:
        _assert_tiles([shard.kv_heads for shard in plan], num_kv_heads)

    rows = plan[0].vocab.size
    assert [shard.vocab for shard in plan] == [Span(rank * rows, rows) for rank in range(world_size)]
    assert rows * world_size >= vocab_size


@pytest.mark.parametrize(
    ("world_size", "heads"),
    [
        (1, [(9, 3)]),
        (2, [(6, 2), (3, 1)]),
        (3, [(3, 1), (3, 1), (3, 1)]),
        (4, [(2, 1), (1, 1), (3, 1), (3, 1)]),
        (9, [(1, 1)] * 9),
    ],
)
def test_nine_query_and_three_kv_heads(world_size: int, heads: list[tuple[int, int]]) -> None:
    assert _heads(_plan(9, 3, world_size)) == heads


def test_kv_heads_are_replicated_only_when_too_few() -> None:
    assert _heads(_plan(32, 8, 8)) == [(4, 1)] * 8
    assert _heads(_plan(32, 8, 16)) == [(2, 1)] * 16
    assert [shard.kv_heads.start for shard in _plan(32, 8, 16)] == [head for head in range(8) for _ in range(2)]


@pytest.mark.parametrize(
    ("intermediate", "world_size", "sizes"),
    [
        (1536, 2, [768, 768]),
        (1536, 5, [384, 384, 256, 256, 256]),
        (11008, 3, [3712, 3712, 3584]),
        (90, 4, [32, 32, 16, 10]),  # 128, 64 and 32 leave a rank with nothing
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_intermediate_is_split_in_large_units(intermediate: int, world_size: int, sizes: list[int]) -> None:
    assert [shard.intermediate.size for shard in _plan(16, 4, world_size, intermediate)] == sizes


@pytest.mark.parametrize("world_size", [0, 10])
def test_too_many_ranks_is_an_error_that_names_the_most(world_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={world_size} .* 1 to 9 ranks"):
        _plan(9, 3, world_size)


def test_head_counts_that_do_not_fit_together() -> None:
    with pytest.raises(ConfigError, match="9 query heads cannot share 4 kv heads"):
        _plan(9, 4, 1)
