"""The blocks that a step's rows have in common, by the scheduler's own steps, against all tables compared by hand."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raytp.bench
from scheduler.config import SchedulerConfig
from scheduler.step import Step
from tests.control_plane.fake_model import make_config, make_sequence, run_all
from workers import shared_blocks
from workers.model_config import load_model_config
from workers.shared_blocks import SharedBlocks


def _steps(config: SchedulerConfig, prompts: list[list[int]]) -> list[Step]:
    sequences = [make_sequence(i, prompt, max_tokens=1 + 5 * i % 19) for i, prompt in enumerate(prompts)]
    return run_all(sequences, config).steps


def _check(config: SchedulerConfig, steps: list[Step], min_spared_keys: int) -> list[int]:
    """Each step's number of shared blocks, by both."""
    shared = SharedBlocks(config.max_num_seqs, config.max_model_len, config.block_size, min_spared_keys)
    tables: dict[int, list[int]] = {slot: [] for slot in range(config.max_num_seqs)}
    counts = []
    for step in steps:
        offset = 0
        for slot, start, count in zip(step.block_slots, step.block_starts, step.block_counts, strict=True):
            tables[slot][start:] = step.block_ids[offset : offset + count].tolist()
            offset += count
        lengths = zip(step.slots, (step.seq_lens - 1) // config.block_size, strict=True)
        rows = [tables[slot][:num_blocks] for slot, num_blocks in lengths]
        by_hand = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False)))
        num_decoding = np.count_nonzero(step.num_scheduled_tokens == 1)
        if by_hand * config.block_size * (num_decoding - 1) < min_spared_keys:
            by_hand = 0
        assert shared.count(step) == by_hand
        counts.append(by_hand)
    return counts


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 24), st.integers(0, 1), st.integers(1, 12)).map(
            lambda each: [9] * each[0] + [each[1]] * each[2]
        ),
        min_size=1,
        max_size=9,
    ),
    num_kv_blocks=st.integers(16, 60),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 40),
    min_spared_keys=st.sampled_from([1, 20]),
)
def test_as_many_as_the_tables_of_all_rows_have_in_common(
    prompts: list[list[int]],
    num_kv_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    min_spared_keys: int,
) -> None:
    """With chunks, preemptions, sequences that come and go, and prefixes of different lengths."""
    config = make_config(
        num_kv_blocks=num_kv_blocks,
        block_size=3,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=60,
    )
    _check(config, _steps(config, prompts), min_spared_keys)


def test_a_prefix_longer_than_what_is_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_blocks, "_CHUNK", 4)
    config = make_config(num_kv_blocks=99, block_size=3, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=90)
    prompts = [[9] * length + [i] * 5 for i, length in enumerate((50, 50, 50, 50, 50, 36, 36, 50))]
    counts = _check(config, _steps(config, prompts), 1)
    assert max(counts) == 16
    assert 12 in counts
    assert np.count_nonzero(counts) > 10


def test_what_a_rank_is_spared_is_counted_by_an_equal_share_of_the_heads() -> None:
    model = load_model_config(Path(raytp.bench.__file__).parent / "shapes" / "qwen3-0.6b")
    assert shared_blocks.min_spared_keys(model, 1) == 256_000_000 // (2 * 2 * 8 * 128)
    assert shared_blocks.min_spared_keys(model, 2) == 2 * shared_blocks.min_spared_keys(model, 1)
