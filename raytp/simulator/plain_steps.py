"""The real scheduler, which can also take many steps at once while nothing happens in them.

In long stretches of decoding each step gives every running sequence one token, and no sequence comes or goes. What so
many calls of `schedule` and `postprocess` would leave behind is then known: counts that have risen, and blocks taken
and published in a known order. `tests/simulator/test_plain_steps.py` compares both ways. Driven by
`raytp.simulator.replica`.
"""

from __future__ import annotations

import numpy as np

from raytp.simulator.step_time import Floats
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence

SAMPLED_ID = 0
"""The token that a simulated GPU samples, always."""


class SimulatedSequence(Sequence):
    """A sequence that can grow by many tokens at once."""

    __slots__ = ()

    def extend(self, num_tokens: int) -> None:
        """Append SAMPLED_ID so many times."""
        end = self.num_tokens + num_tokens
        if end > len(self._tokens):
            grown = np.full(2 * end, SAMPLED_ID, dtype=np.int32)
            grown[: self.num_tokens] = self._tokens[: self.num_tokens]
            self._tokens = grown
        else:
            self._tokens[self.num_tokens : end] = SAMPLED_ID
        self.num_tokens = end


class PlainSteps:
    """The next steps of a scheduler, of which each computes one token of every running sequence.

    A step means here: `schedule`, then `postprocess` of the step that was in flight before.
    """

    def __init__(self, lengths: np.ndarray[tuple[int], np.dtype[np.int64]], num_used_blocks: Floats) -> None:
        self.num_rows = len(lengths)
        self.num_steps = len(num_used_blocks)
        self.num_used_blocks = num_used_blocks
        """(num_steps,) after each step was scheduled."""
        self.kv_tokens: Floats = lengths.sum() + self.num_rows * np.arange(1.0, self.num_steps + 1)
        """(num_steps,) tokens that each step's rows read."""


class PlainScheduler(Scheduler):
    """A scheduler of `SimulatedSequence`s."""

    @property
    def has_news(self) -> bool:
        """Whether `take_updates` would return any."""
        return bool(self._updates)

    def plan(self) -> PlainSteps | None:
        """The steps before the next one in which something else happens; None if that is the very next one."""
        running = list(self.running.values())
        if len(self._in_flight) != 1 or not running or self._in_flight[0].sampled != running:
            return None
        if len(running) > self.config.max_num_batched_tokens or self._admits_next():
            return None
        if any(seq.num_tokens == seq.num_prompt_tokens for seq in running):
            return None  # somebody waits for its first token
        num_steps = min(seq.max_length - seq.num_tokens for seq in running) - 1
        if num_steps < 2:
            return None
        block_size = self._block_size
        lengths = np.array([seq.num_tokens for seq in running], dtype=np.int64)
        # Step j (from 1) needs a new block for a sequence of n tokens where n + j - 1 is a multiple of the block size.
        num_new = np.bincount((1 - lengths) % block_size, minlength=block_size)
        taken = np.cumsum(num_new[np.arange(1, num_steps + 1) % block_size])
        num_steps = int(np.searchsorted(taken, self.block_manager.num_free_blocks, side="right"))
        if num_steps < 2:
            return None
        num_used = len(self.block_manager.used_block_ids)
        return PlainSteps(lengths, num_used + taken[:num_steps].astype(np.float64))

    def take(self, num_steps: int) -> None:
        """Take the first `num_steps` of what `plan` has found; leaves what as many single steps would."""
        if num_steps == 0:
            return
        self._change_blocks(num_steps)
        for seq in self.running.values():
            assert isinstance(seq, SimulatedSequence)
            seq.extend(num_steps)
            seq.num_computed_tokens += num_steps
        self._num_steps += num_steps
        self._next_step_id += num_steps
        self._num_computed_tokens += num_steps * len(self.running)

    def _change_blocks(self, num_steps: int) -> None:
        """Take and publish blocks, in the order of the steps; within one, all are taken before any is published."""
        block_size = self._block_size
        changes = []
        for row, seq in enumerate(self.running.values()):
            length = seq.num_tokens
            first = -length % block_size + 1  # the first step j >= 1 for which length + j - 1 is a multiple
            changes += [(step, 0, row, seq) for step in range(first, num_steps + 1, block_size)]
            if self.block_manager.enable_prefix_caching:
                first = (-length - 1) % block_size + 1
                changes += [(step, 1, row, seq) for step in range(first, num_steps + 1, block_size)]
        changes.sort(key=_order)
        for step, is_full, _, seq in changes:
            num_tokens = seq.num_tokens + step
            if is_full:
                self._publish(seq, num_tokens)
            else:
                self.block_manager.may_append(seq, num_tokens)

    def _publish(self, seq: Sequence, num_tokens: int) -> None:
        """Publish a sequence's blocks as they are once it has `num_tokens`."""
        assert isinstance(seq, SimulatedSequence)
        num_before, num_computed_before = seq.num_tokens, seq.num_computed_tokens
        seq.extend(num_tokens - num_before)
        seq.num_computed_tokens = num_tokens
        self.block_manager.hash_blocks(seq)
        seq.num_tokens, seq.num_computed_tokens = num_before, num_computed_before

    def _admits_next(self) -> bool:
        """Whether the next step might take in a waiting sequence, or wait for one's token."""
        if not self.waiting or not self._free_slots:
            return False
        seq = self.waiting[0]
        if seq.num_pending_tokens or seq.num_tokens > self.config.num_kv_tokens:
            return True
        return self.block_manager.can_allocate(seq)


def _order(change: tuple[int, int, int, Sequence]) -> tuple[int, int, int]:
    return change[:3]
