"""Which part of the model each rank holds: a pure function of the model's sizes and the number of ranks.

Knows nothing of torch or of checkpoints. Called by the workers before they build their layers, by
`raytp.worker_settings` and by `raytp info`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.errors import ConfigError

_LARGEST_UNIT = 128
"""Columns of an MLP that stay together if they can: matrix kernels like multiples of it."""
_VOCAB_UNIT = 8
"""Rows of the vocabulary that stay together: 16 bytes of bf16 logits, which keeps their rows aligned."""


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, start + size)."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank holds, in whole heads, MLP columns and vocabulary rows of the unsharded model."""

    rank: int
    q_heads: Span
    kv_heads: Span
    """Query head h reads kv head h // (H / K); the rank's q heads read exactly these, equally many each."""
    intermediate: Span
    vocab: Span
    """Equally many rows on each rank; may run past the vocabulary, and those rows are padding."""


def plan_shards(
    *, num_q_heads: int, num_kv_heads: int, intermediate_size: int, vocab_size: int, world_size: int
) -> tuple[RankShard, ...]:
    """Split a decoder over `world_size` ranks, as evenly as whole heads allow; lower ranks get what is left over.

    Every q head is on exactly one rank. A kv head is on several ranks only if there are fewer kv heads than ranks:
    then the q heads that share it are split over them.

    Raises ConfigError if some rank would have no q head or no MLP column, or if the head counts do not fit together.
    """
    if num_q_heads % num_kv_heads:
        raise ConfigError(f"{num_q_heads} query heads cannot share {num_kv_heads} kv heads equally")
    largest = min(num_q_heads, intermediate_size)
    if not 1 <= world_size <= largest:
        raise ConfigError(
            f"tensor_parallel_size={world_size} is out of range: this model can be split over 1 to {largest} ranks "
            f"({num_q_heads} query heads, {intermediate_size} MLP columns)"
        )
    heads = _split_heads(num_q_heads, num_kv_heads, world_size)
    columns = _split_intermediate(intermediate_size, world_size)
    rows = _round_up(-(-vocab_size // world_size), _VOCAB_UNIT)
    return tuple(RankShard(rank, *heads[rank], columns[rank], Span(rank * rows, rows)) for rank in range(world_size))


def _split_heads(num_q_heads: int, num_kv_heads: int, world_size: int) -> list[tuple[Span, Span]]:
    """Each rank's (q heads, kv heads)."""
    group = num_q_heads // num_kv_heads
    if world_size <= num_kv_heads:
        kv_spans = _consecutive(_even(num_kv_heads, world_size))
        return [(Span(kv.start * group, kv.size * group), kv) for kv in kv_spans]
    ranks_of_kv_head = _even(world_size, num_kv_heads)
    q_spans = _consecutive([size for num_ranks in ranks_of_kv_head for size in _even(group, num_ranks)])
    return [(q, Span(q.start // group, 1)) for q in q_spans]


def _split_intermediate(intermediate_size: int, world_size: int) -> list[Span]:
    unit = _LARGEST_UNIT
    while -(-intermediate_size // unit) < world_size:
        unit //= 2
    sizes = [units * unit for units in _even(-(-intermediate_size // unit), world_size)]
    sizes[-1] -= sum(sizes) - intermediate_size
    return _consecutive(sizes)


def _even(total: int, num_parts: int) -> list[int]:
    """`total` in `num_parts` sizes that differ by at most one, larger ones first."""
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]


def _consecutive(sizes: Sequence[int]) -> list[Span]:
    spans, start = [], 0
    for size in sizes:
        spans.append(Span(start, size))
        start += size
    return spans


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
