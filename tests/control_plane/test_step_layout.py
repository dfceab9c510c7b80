"""The scheduler's steps through `workers.batch` itself, against the layout by hand."""

from __future__ import annotations

import numpy as np
import torch

from scheduler.step import Step
from tests.control_plane.fake_model import make_config, make_sequence, run_all
from workers.batch import SlotState


def _inputs_by_hand(
    step: Step, tables: dict[int, list[int]], last: dict[int, int], block_size: int
) -> dict[str, list[int]]:
    inputs: dict[str, list[int]] = {"input_ids": [], "positions": [], "slot_mapping": []}
    offset = 0
    for slot, count, seq_len in zip(step.slots, step.num_scheduled_tokens, step.seq_lens, strict=True):
        for position in range(seq_len - count, seq_len):
            token_id = int(step.token_ids[offset])
            inputs["input_ids"].append(last[slot] if token_id == -1 else token_id)
            inputs["positions"].append(position)
            inputs["slot_mapping"].append(tables[slot][position // block_size] * block_size + position % block_size)
            offset += 1
    return inputs


def test_the_ranks_lay_out_steps_as_the_fake_does() -> None:
    """Every step of a run with preemptions, through `workers.batch` itself."""
    config = make_config(num_kv_blocks=7, block_size=3, max_num_seqs=4, max_num_batched_tokens=9, max_model_len=32)
    sequences = [make_sequence(i, [i % 3] * (1 + i % 8), max_tokens=9) for i in range(8)]
    harness = run_all(sequences, config)
    assert harness.scheduler.stats().num_preemptions > 2
    state = SlotState(config.max_num_seqs, config.max_model_len, config.block_size, torch.device("cpu"))
    tables: dict[int, list[int]] = {slot: [] for slot in range(config.max_num_seqs)}
    last: dict[int, int] = {}
    rng = np.random.default_rng(0)
    for step in harness.steps:
        offset = 0
        for slot, start, count in zip(step.block_slots, step.block_starts, step.block_counts, strict=True):
            tables[slot][start:] = step.block_ids[offset : offset + count].tolist()
            offset += count
        batch = state.prepare(step)
        by_hand = _inputs_by_hand(step, tables, last, config.block_size)
        assert batch.input_ids.tolist() == by_hand["input_ids"]
        assert batch.positions.tolist() == by_hand["positions"]
        assert batch.metadata.slot_mapping.tolist() == by_hand["slot_mapping"]
        assert batch.metadata.seq_lens.tolist() == step.seq_lens.tolist()
        for row, slot in enumerate(step.slots):
            num_blocks = -(-int(step.seq_lens[row]) // config.block_size)
            assert batch.metadata.block_tables[row, :num_blocks].tolist() == tables[slot][:num_blocks]
        sampled = rng.integers(0, 50, int(step.samples.sum()))
        sampled_slots = step.slots[step.samples.astype(bool)]
        state.remember(sampled_slots, torch.from_numpy(sampled))
        last |= dict(zip(sampled_slots.tolist(), sampled.tolist(), strict=True))
