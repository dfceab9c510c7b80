"""Decides what each step computes, and takes in what it sampled.

There are no phases: tokens catch up. A sequence has a number of computed tokens and a length, and each step moves the
first towards the second within a token budget; running sequences come first, then waiting ones, and a long prompt is
computed in chunks. When the pool is full the youngest running sequence is preempted: it loses its blocks, keeps its
tokens, and is computed again from the head of the queue.

One step ahead: `schedule` may be called again before `postprocess` has seen the previous step's tokens. They are then
pending: they count, but their ids stay on the ranks. A sequence that has stopped has its extra token dropped.

Called by `raytp.engine`. Knows nothing of torch, Ray, sockets or text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from scheduler.admission import check_admission
from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.step import Step, StepResult
from scheduler.step_builder import StepBuilder
from scheduler.suspects import Suspects, Verdict
from scheduler.updates import SchedulerStats, SequenceUpdate, TokenLogprobs, split_logprobs

_FINISHED = SequenceStatus.FINISHED  # to look it up costs more than to compare, and there is one for every token


class Scheduler:
    """Continuous batching over paged blocks. Not thread-safe: one thread calls it."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager | None = None) -> None:
        self.config = config
        self.block_manager = block_manager or BlockManager(
            config.num_kv_blocks, config.block_size, config.enable_prefix_caching
        )
        self._block_size = config.block_size
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        """By seq_id, oldest first."""
        self._sequences: dict[int, Sequence] = {}
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._in_flight: deque[StepBuilder] = deque()
        self._next_step_id = 0
        """Counted from 0 again for new ranks."""
        self._suspects = Suspects()
        self._updates: list[SequenceUpdate] = []
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_cached_tokens = 0
        self._num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises RequestError (see `check_admission`)."""
        check_admission(seq, self.config)
        seq.max_length = min(seq.max_length, self.config.max_model_len)
        self._sequences[seq.seq_id] = seq
        self.waiting.append(seq)

    def abort(self, seq_id: int, finish_reason: str = "abort") -> None:
        """End a sequence now, if it has not ended; its blocks are free at once."""
        seq = self._sequences.get(seq_id)
        if seq is not None:
            self._finish(seq, finish_reason)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._sequences)

    @property
    def num_in_flight(self) -> int:
        """Steps sent whose results have not come in."""
        return len(self._in_flight)

    def schedule(self) -> Step | None:
        """Choose the next step and count it as sent; None if there is nothing to compute now."""
        builder = StepBuilder(self.config.max_num_batched_tokens)
        num_preemptions = self._num_preemptions
        for seq in list(self.running.values()):
            if builder.token_budget == 0:
                break
            if seq.slot is not None:  # else a row before it has preempted it
                self._schedule_running(seq, builder)
        if self._num_preemptions == num_preemptions:
            self._schedule_waiting(builder)
        if builder.num_rows == 0:
            return None
        self._in_flight.append(builder)
        self._num_steps += 1
        self._num_computed_tokens += builder.num_tokens
        self._next_step_id += 1
        return builder.build(self._next_step_id - 1)

    def postprocess(self, result: StepResult) -> None:
        """Take in the tokens that the oldest sent step sampled."""
        assert result.step_id == self._next_step_id - len(self._in_flight)
        sampled = self._in_flight.popleft().sampled
        assert len(sampled) == len(result.token_ids)
        logprobs = split_logprobs(result, sampled)
        for row, (seq, token_id) in enumerate(zip(sampled, result.token_ids.tolist(), strict=True)):
            seq.num_pending_tokens -= 1
            if seq.status is not _FINISHED:
                self._append_token(seq, token_id, logprobs.get(row))
        acquitted = self._suspects.acquit()
        if acquitted is not None and acquitted.status is SequenceStatus.RUNNING:
            self._preempt(acquitted)  # the next one to be tried runs alone, too

    def lose_ranks(self, report: str, *, is_accident: bool = False) -> bool:
        """The ranks have died: every sequence is computed again, oldest first, in a pool of the same size.

        Returns whether one sequence was alone, and so may be to blame, which none is for an accident, such as a lost
        node. If it is, it ends with `report` as its error (see `scheduler.suspects`).
        """
        in_flight = {seq.seq_id: seq for builder in self._in_flight for seq in builder.sequences}
        verdict = Verdict(was_trial=False)
        if is_accident:
            self._suspects.excuse()
        else:
            verdict = self._suspects.record_death(seq for seq in in_flight.values() if seq.status is not _FINISHED)
        self._in_flight.clear()
        self._next_step_id = 0
        for seq in reversed(list(self.running.values())):
            self._requeue(seq)
        for seq in self._sequences.values():
            seq.num_pending_tokens = 0
        self.replace_pool(self.config.num_kv_blocks)
        if verdict.culprit is not None:
            error = f"the ranks died each time that they computed this request: {report}"
            self._finish(verdict.culprit, "error", error=error)
        self.waiting = deque(seq for seq in self.waiting if seq not in self._suspects.to_try)
        return verdict.was_trial

    def replace_pool(self, num_kv_blocks: int) -> None:
        """New ranks have a pool of this size, and nothing in it. No sequence may run."""
        assert not self.running
        self.config = replace(self.config, num_kv_blocks=num_kv_blocks)
        self.block_manager = self.block_manager.emptied(num_kv_blocks)

    def take_updates(self) -> list[SequenceUpdate]:
        """What has happened to sequences since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    def stats(self) -> SchedulerStats:
        """Counts and load as of now."""
        return SchedulerStats(
            num_waiting=len(self.waiting) + len(self._suspects.to_try),
            num_running=len(self.running),
            num_free_blocks=self.block_manager.num_free_blocks,
            num_kv_blocks=self.config.num_kv_blocks,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=self._num_preemptions,
        )

    def _schedule_running(self, seq: Sequence, builder: StepBuilder) -> None:
        length = seq.num_tokens + seq.num_pending_tokens
        if length >= seq.max_length:
            return  # its last token is on its way
        num_tokens = min(length - seq.num_computed_tokens, builder.token_budget)
        num_wanted = seq.num_computed_tokens + num_tokens
        if num_wanted <= len(seq.block_table) * self._block_size or self._grow(seq, num_wanted, builder):
            self._add_row(seq, num_tokens, builder)

    def _grow(self, seq: Sequence, num_tokens: int, builder: StepBuilder) -> bool:
        """Make room for `num_tokens` of a running sequence, at the cost of the youngest; False if it cannot go on."""
        if num_tokens > self.config.num_kv_tokens:
            self._fail_outgrown(seq)
            return False
        while not self.block_manager.can_append(seq, num_tokens):
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is seq:
                return False
        num_blocks = len(seq.block_table)
        self.block_manager.may_append(seq, num_tokens)
        builder.add_blocks(seq, num_blocks)
        return True

    def _schedule_waiting(self, builder: StepBuilder) -> None:
        suspect = self._suspects.begin_trial()
        if suspect is not None:
            self.waiting.appendleft(suspect)
        while self.waiting and self._free_slots and builder.token_budget > 0:
            seq = self.waiting[0]
            if self._suspects.on_trial not in (None, seq):
                return
            if seq.num_pending_tokens:
                return  # preempted with its last token still on its way: it can't be laid out yet
            if seq.num_tokens > self.config.num_kv_tokens:
                self._fail_outgrown(seq)
                continue
            if not self.block_manager.can_allocate(seq):
                return
            self.waiting.popleft()
            num_cached = self.block_manager.allocate(seq)
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = num_cached
                self._num_cached_tokens += num_cached
            seq.num_computed_tokens = num_cached
            seq.status = SequenceStatus.RUNNING
            seq.slot = self._free_slots.pop()
            self.running[seq.seq_id] = seq
            builder.take_slot(seq)
            self._add_row(seq, min(seq.num_tokens - num_cached, builder.token_budget), builder)

    def _add_row(self, seq: Sequence, num_tokens: int, builder: StepBuilder) -> None:
        builder.add_row(seq, num_tokens)
        # The step writes keys and values before any of its queries attend, so its own later rows may share them.
        if seq.num_computed_tokens // self._block_size > seq.num_hashed_blocks:
            self.block_manager.hash_blocks(seq)

    def _append_token(self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        seq.append(token_id)
        if token_id in seq.stop_token_ids and seq.num_output_tokens >= seq.sampling.min_tokens:
            self._finish(seq, "stop", token_id=token_id, logprobs=logprobs)
        elif seq.num_tokens >= seq.max_length:
            self._finish(seq, "length", token_id=token_id, logprobs=logprobs)
        else:
            num_cached = seq.num_cached_tokens or 0
            self._updates.append(SequenceUpdate(seq.seq_id, token_id, logprobs, num_cached_tokens=num_cached))
            if seq.num_computed_tokens // self._block_size > seq.num_hashed_blocks:
                self.block_manager.hash_blocks(seq)

    def _fail_outgrown(self, seq: Sequence) -> None:
        """The next token of a sequence does not fit the pool, not even alone."""
        if seq.num_pending_tokens:
            return  # it may yet stop with the token on its way
        config = self.config
        self._finish(
            seq,
            "error",
            error=f"the sequence grew to {seq.num_tokens} tokens, but the KV cache holds {config.num_kv_tokens} "
            f"({config.num_kv_blocks} blocks of {config.block_size}): lower max_tokens or give the KV cache more "
            f"memory",
        )

    def _preempt(self, seq: Sequence) -> None:
        self._num_preemptions += 1
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        """Back to the head of the queue, to be computed from its tokens."""
        self._leave_running(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        self.waiting.appendleft(seq)

    def _finish(
        self,
        seq: Sequence,
        finish_reason: str,
        *,
        token_id: int | None = None,
        logprobs: TokenLogprobs | None = None,
        error: str | None = None,
    ) -> None:
        was_to_be_tried = self._suspects.discard(seq)
        if seq.status is SequenceStatus.RUNNING:
            self.block_manager.hash_blocks(seq)
            self._leave_running(seq)
        elif not was_to_be_tried:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        del self._sequences[seq.seq_id]
        self._updates.append(
            SequenceUpdate(
                seq.seq_id,
                token_id,
                logprobs,
                finish_reason,
                stop_token_id=token_id if finish_reason == "stop" else None,
                error=error,
                num_cached_tokens=seq.num_cached_tokens or 0,
            )
        )

    def _leave_running(self, seq: Sequence) -> None:
        assert seq.slot is not None
        del self.running[seq.seq_id]
        self.block_manager.deallocate(seq)
        self._free_slots.append(seq.slot)
        seq.slot = None
        seq.has_sampled_in_slot = False
