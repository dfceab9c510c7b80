"""Collects the rows that the scheduler chooses and turns them into one immutable `Step`.

Called by `Scheduler` alone; makes no decisions of its own.
"""

from __future__ import annotations

import numpy as np

from scheduler.sequence import Sequence
from scheduler.step import TOKEN_ON_DEVICE, IntArray, SlotSampling, Step

_NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)


class StepBuilder:
    """The rows of a step in the making."""

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self.token_budget = max_num_tokens
        """Tokens that the step has room for."""
        self.sequences: list[Sequence] = []
        """Those of all rows."""
        self.sampled: list[Sequence] = []
        """Those of the rows that sample, in the order of the rows."""
        self._rows: list[tuple[int, int, int, bool]] = []
        """(slot, num_scheduled_tokens, seq_len, samples)"""
        self._tokens: list[tuple[int, IntArray]] = []
        self._new_blocks: list[tuple[int, int, list[int]]] = []
        self._new_slots: list[SlotSampling] = []

    @property
    def num_rows(self) -> int:
        """Sequences in the step so far."""
        return len(self._rows)

    @property
    def num_tokens(self) -> int:
        """Tokens in the step so far."""
        return self._max_num_tokens - self.token_budget

    def take_slot(self, seq: Sequence) -> None:
        """The sequence enters the ranks' state: its settings and its whole block table travel with this step."""
        assert seq.slot is not None
        self._new_slots.append(_slot_sampling(seq, seq.slot))
        self.add_blocks(seq, 0)

    def add_blocks(self, seq: Sequence, start: int) -> None:
        """The block table has grown past `start` entries."""
        if len(seq.block_table) > start:
            assert seq.slot is not None
            self._new_blocks.append((seq.slot, start, seq.block_table[start:]))

    def add_row(self, seq: Sequence, num_tokens: int) -> None:
        """Compute the next `num_tokens` of a sequence; advances it past them."""
        assert seq.slot is not None
        start = seq.num_computed_tokens
        end = start + num_tokens
        samples = end == seq.num_tokens + seq.num_pending_tokens
        if not seq.has_sampled_in_slot:
            self._tokens.append((self.num_tokens, seq.token_ids[start:end]))
        self._rows.append((seq.slot, num_tokens, end, samples))
        self.sequences.append(seq)
        self.token_budget -= num_tokens
        seq.num_computed_tokens = end
        if samples:
            self.sampled.append(seq)
            seq.num_pending_tokens += 1
            seq.has_sampled_in_slot = True

    def build(self, step_id: int) -> Step:
        """The step, with arrays of its own. There must be a row."""
        assert 0 < self.num_tokens <= self._max_num_tokens
        token_ids = np.full(self.num_tokens, TOKEN_ON_DEVICE, dtype=np.int32)
        for start, tokens in self._tokens:
            token_ids[start : start + len(tokens)] = tokens
        slots, num_scheduled_tokens, seq_lens, samples = np.ascontiguousarray(np.array(self._rows, dtype=np.int32).T)
        return Step(
            step_id=step_id,
            slots=slots,
            num_scheduled_tokens=num_scheduled_tokens,
            seq_lens=seq_lens,
            samples=samples,
            token_ids=token_ids,
            block_slots=_int_array([slot for slot, _, _ in self._new_blocks]),
            block_starts=_int_array([start for _, start, _ in self._new_blocks]),
            block_counts=_int_array([len(ids) for _, _, ids in self._new_blocks]),
            block_ids=_int_array([block_id for _, _, ids in self._new_blocks for block_id in ids]),
            new_slots=tuple(self._new_slots),
        )


def _int_array(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int32)


def _slot_sampling(seq: Sequence, slot: int) -> SlotSampling:
    sampling = seq.sampling
    masked_ids = sampling.stop_token_ids if sampling.min_tokens > 0 else ()
    return SlotSampling(
        slot=slot,
        num_prompt_tokens=seq.num_prompt_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        stop_token_ids=np.array(masked_ids, dtype=np.int32),
        history=seq.token_ids.copy() if sampling.has_penalties else _NO_TOKENS,
    )
