"""Ranks without a model: they keep a KV cache and slots as the real ones do, and whatever is wrong changes the tokens.

The "key and value" of a token is a hash over the token and the key and value before it, read through the block table,
so that it depends on the whole prefix as in a real model. The next token is a hash over all keys and values that the
row can see. A wrong block, stale content, a prefix shared with the wrong sequence or a wrong position gives another
token than `expected_tokens`, which uses no blocks at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import xxhash

from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.sampling_params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.step import TOKEN_ON_DEVICE, SlotSampling, Step, StepResult
from scheduler.updates import SequenceUpdate

_NOWHERE = -1


def _key_value(previous: int, token_id: int) -> int:
    return xxhash.xxh64_intdigest(int(token_id).to_bytes(4, "little"), seed=previous)


def _next_token(keys_values: np.ndarray, banned: Iterable[int], vocab_size: int) -> int:
    token_id = xxhash.xxh64_intdigest(keys_values.astype(np.uint64).tobytes()) % vocab_size
    banned = set(banned)
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


def expected_tokens(prompt: Items[int], sampling: ResolvedSampling, config: SchedulerConfig) -> tuple[list[int], str]:
    """(generated ids, finish reason) of a request that is left alone; "error" if it outgrows the pool."""
    keys_values: list[int] = []
    for token_id in prompt:
        keys_values.append(_key_value(keys_values[-1] if keys_values else 0, token_id))
    output: list[int] = []
    while len(keys_values) <= config.num_kv_tokens:
        banned = sampling.stop_token_ids if len(output) < sampling.min_tokens else ()
        token_id = _next_token(np.array(keys_values, dtype=np.uint64), banned, config.vocab_size)
        output.append(token_id)
        if token_id in sampling.stop_token_ids:
            return output, "stop"
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == config.max_model_len:
            return output, "length"
        keys_values.append(_key_value(keys_values[-1], token_id))
    return output, "error"


class FakeRanks:
    """Applies steps to a KV cache and slots of its own, as `workers.batch` and the model do."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        shape = (config.num_kv_blocks, config.block_size)
        self._keys_values = np.zeros(shape, dtype=np.uint64)
        self._positions = np.full(shape, _NOWHERE)
        max_num_blocks = -(-config.max_model_len // config.block_size)
        self._block_tables = np.full((config.max_num_seqs, max_num_blocks), _NOWHERE)
        self._last_tokens = np.full(config.max_num_seqs, _NOWHERE)
        self._settings: dict[int, SlotSampling] = {}
        self._next_step_id = 0

    def execute(self, step: Step) -> StepResult:
        """Write every row's keys and values, then sample."""
        assert step.step_id == self._next_step_id
        self._next_step_id += 1
        assert len(set(step.slots.tolist())) == len(step.slots), "a slot has two rows"
        assert len(step.token_ids) == step.num_scheduled_tokens.sum() <= self._config.max_num_batched_tokens
        assert step.num_scheduled_tokens.min() > 0
        self._settings |= {settings.slot: settings for settings in step.new_slots}
        self._change_block_tables(step)
        self._write(step)
        sampled = np.flatnonzero(step.samples)
        token_ids = np.array(
            [self._sample(int(step.slots[row]), int(step.seq_lens[row])) for row in sampled], dtype=np.int32
        )
        self._last_tokens[step.slots[sampled]] = token_ids
        return StepResult(step_id=step.step_id, token_ids=token_ids)

    def _change_block_tables(self, step: Step) -> None:
        offset = 0
        for slot, start, count in zip(step.block_slots, step.block_starts, step.block_counts, strict=True):
            self._block_tables[slot, start : start + count] = step.block_ids[offset : offset + count]
            offset += count
        assert offset == len(step.block_ids)

    def _write(self, step: Step) -> None:
        written = set()
        offset = 0
        for slot, count, seq_len in zip(step.slots, step.num_scheduled_tokens, step.seq_lens, strict=True):
            for position in range(seq_len - count, seq_len):
                token_id = int(step.token_ids[offset])
                if token_id == TOKEN_ON_DEVICE:
                    token_id = int(self._last_tokens[slot])
                assert 0 <= token_id < self._config.vocab_size
                place = self._place(slot, position)
                assert place not in written, "two rows write to one place"
                written.add(place)
                previous = int(self._keys_values[self._place(slot, position - 1)]) if position else 0
                self._keys_values[place] = _key_value(previous, token_id)
                self._positions[place] = position
                offset += 1

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        block, offset = divmod(int(position), self._config.block_size)
        block_id = int(self._block_tables[slot, block])
        assert block_id != _NOWHERE
        return block_id, offset

    def _sample(self, slot: int, seq_len: int) -> int:
        block_ids = self._block_tables[slot, : -(-seq_len // self._config.block_size)]
        positions = self._positions[block_ids].reshape(-1)[:seq_len]
        assert (positions == np.arange(seq_len)).all(), "a block holds other positions than its place in the table says"
        settings = self._settings[slot]
        banned = settings.stop_token_ids if seq_len - settings.num_prompt_tokens < settings.min_tokens else ()
        keys_values = self._keys_values[block_ids].reshape(-1)[:seq_len]
        return _next_token(keys_values, map(int, banned), self._config.vocab_size)


def make_config(**changes: int | bool) -> SchedulerConfig:
    """Limits that nothing small runs into."""
    values: dict[str, int | bool] = {
        "num_kv_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "vocab_size": 50,
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def make_sequence(
    seq_id: int,
    prompt: Items[int],
    *,
    max_tokens: int = 8,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    cache_salt: str = "",
) -> Sequence:
    """A greedy request."""
    sampling = ResolvedSampling(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
    return Sequence(seq_id, np.array(prompt, dtype=np.int32), sampling, cache_salt)


@dataclass
class Story:
    """What a sequence's updates said."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0


class Harness:
    """A scheduler and its fake ranks, moved by hand; the invariants are checked after every operation."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager | None = None) -> None:
        self.config = config
        self.scheduler = Scheduler(config, block_manager)
        self.ranks = FakeRanks(config)
        self.results: deque[StepResult] = deque()
        """Of steps that have run, not yet seen by the scheduler."""
        self.stories: dict[int, Story] = {}
        self.sequences: dict[int, Sequence] = {}
        self.steps: list[Step] = []

    def add(self, seq: Sequence) -> None:
        """Submit a sequence."""
        self.sequences[seq.seq_id] = seq
        self.scheduler.add(seq)
        self.stories[seq.seq_id] = Story()
        self.check()

    def abort(self, seq_id: int) -> None:
        """End a sequence."""
        self.scheduler.abort(seq_id)
        self.check()

    def schedule(self) -> Step | None:
        """Send the next step, if there is one."""
        step = self.scheduler.schedule()
        if step is not None:
            self.steps.append(step)
            self.results.append(self.ranks.execute(step))
        self.check()
        return step

    def lose_ranks(self, *, is_accident: bool = False) -> None:
        """The ranks die, with the results on their way, and are built again."""
        self.results.clear()
        self.ranks = type(self.ranks)(self.config)
        self.scheduler.lose_ranks("killed", is_accident=is_accident)
        self.check()

    def postprocess(self) -> None:
        """Let the oldest result arrive."""
        self.scheduler.postprocess(self.results.popleft())
        self.check()

    def advance(self, max_in_flight: int) -> None:
        """One turn of the engine's loop."""
        step = self.schedule()
        assert step or self.results or not self.scheduler.has_unfinished, "sequences wait, and nothing can run"
        if len(self.results) == max_in_flight or (step is None and self.results):
            self.postprocess()

    def run(self, max_in_flight: int = 2) -> None:
        """Until nothing is left to do. Fails if that takes more turns than there can be work for."""
        live = len(self.stories) + 1
        longest = self.config.max_model_len + 2
        # At any time the oldest sequence advances; all may have to wait for it, and be computed in chunks of 1.
        for _ in range(live * longest * 40):
            if not self.scheduler.has_unfinished and not self.results:
                break
            self.advance(max_in_flight)
        else:
            raise AssertionError("the scheduler spins")
        assert self.scheduler.num_in_flight == 0
        assert self.scheduler.stats().num_free_blocks == self.config.num_kv_blocks
        assert not self.scheduler.block_manager.used_block_ids

    def check(self) -> None:
        """The scheduler's own invariants, and what the updates tell."""
        check_invariants(self.scheduler)
        self._take(self.scheduler.take_updates())

    def _take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            story = self.stories[update.seq_id]
            assert story.finish_reason is None, "news of a sequence that has ended"
            if update.token_id is not None:
                story.token_ids.append(update.token_id)
            story.finish_reason = update.finish_reason
            story.error = update.error
            story.stop_token_id = update.stop_token_id
            story.num_cached_tokens = update.num_cached_tokens

    def assert_as_expected(self, seq_id: int) -> None:
        """The sequence ended with the tokens and for the reason that it would have had alone."""
        seq, story = self.sequences[seq_id], self.stories[seq_id]
        prompt = seq.token_ids[: seq.num_prompt_tokens].tolist()
        token_ids, finish_reason = expected_tokens(prompt, seq.sampling, self.config)
        assert (story.token_ids, story.finish_reason) == (token_ids, finish_reason)
        assert (story.error is None) == (finish_reason != "error")
        assert story.stop_token_id == (token_ids[-1] if finish_reason == "stop" else None)


def check_invariants(scheduler: Scheduler) -> None:
    """Assert what must hold between any two calls."""
    manager, sequences = scheduler.block_manager, scheduler._sequences.values()
    manager.check_invariants(seq.block_table for seq in sequences)
    slots = [seq.slot for seq in scheduler.running.values()]
    used_slots = [slot for slot in slots if slot is not None]
    assert sorted([*scheduler._free_slots, *used_slots]) == list(range(scheduler.config.max_num_seqs))
    waiting = [*scheduler.waiting, *scheduler._suspects.to_try]
    assert sorted(map(id, sequences)) == sorted(map(id, [*waiting, *scheduler.running.values()]))
    for seq in waiting:
        assert not seq.block_table
        assert seq.slot is None
        assert seq.num_computed_tokens == 0
    for seq in scheduler.running.values():
        assert seq.num_computed_tokens <= seq.length
        assert len(seq.block_table) >= manager.num_blocks_for(seq.num_computed_tokens)
        unpublished = seq.block_table[seq.num_hashed_blocks :]
        assert all(manager.blocks[block_id].hash is None for block_id in unpublished)


def run_all(
    sequences: Iterable[Sequence],
    config: SchedulerConfig,
    *,
    max_in_flight: int = 2,
    block_manager: BlockManager | None = None,
) -> Harness:
    """Submit everything at once, run to the end, and hold each sequence against the oracle."""
    harness = Harness(config, block_manager)
    for seq in sequences:
        harness.add(seq)
    harness.run(max_in_flight)
    for seq_id in harness.stories:
        harness.assert_as_expected(seq_id)
    return harness
