"""One simulated engine: the real scheduler, a GPU that takes as long as `StepTimes` says, and the engine's step loop.

As in `raytp.engine`, one step runs while the next is scheduled and sent, so that the driver's time is hidden behind the
GPU's unless it is longer. A replica is driven by events: `next_s` is when something happens in it next; then the fleet
calls `complete`, may add rows, and calls `go_on`. Called by `raytp.simulator.cluster`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import cast

import numpy as np

from raytp.simulator.plain_steps import SAMPLED_ID, PlainScheduler, PlainSteps, SimulatedSequence
from raytp.simulator.sparse_blocks import SparseBlockManager
from raytp.simulator.step_time import Floats, StepTimes, load_of, max_times, plain_load
from scheduler.config import SchedulerConfig
from scheduler.step import IntArray, StepResult

_MAX_IN_FLIGHT = 2
"""As the engine has it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Of a sequence."""

    seq_id: int
    num_output_tokens: int
    error: str | None
    """Why it could not be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a replica's sequences came to at one moment."""

    first_tokens: list[int]
    """Ids of sequences that have their first token."""
    finished: list[Ending]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step on its way to the GPU's end."""

    step_id: int
    num_sampled: int
    finish_s: float
    gpu_s: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """Steps that are taken at once, or as many of them as are over when something arrives."""

    steps: PlainSteps
    gpu_s: Floats
    """(n,) of each step that is still to be sent."""
    ends_s: Floats
    """(n + 1,) the driver's time before the first step, and after each."""


class SimulatedReplica:
    """Time moves only by `complete` and `go_on`, and what they leave behind depends on nothing but the calls."""

    def __init__(self, config: SchedulerConfig, times: StepTimes, ready_s: float, *, takes_plain_steps: bool) -> None:
        """`takes_plain_steps`: many at once where possible; the results are the same, later."""
        blocks = SparseBlockManager(config.num_kv_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = PlainScheduler(config, blocks)
        self.next_s = math.inf
        """When `complete` is due; infinite while there is nothing to do."""
        self.busy_s = 0.0
        """Of the GPU, in steps that are over."""
        self.num_output_tokens = 0
        """Sampled in steps that are over."""
        self.num_rows = 0
        """Taken and not finished."""
        self._times = times
        self._takes_plain_steps = takes_plain_steps
        self._now_s = ready_s
        self._gpu_free_s = ready_s
        self._sent: deque[_Sent] = deque()
        self._has_sent_now = False
        """Whether the newest turn of the step loop has sent a step."""
        self._plan: _Plan | None = None
        self._num_new = 0
        """Sequences added since the last step was scheduled."""
        self._rows: dict[int, SimulatedSequence] = {}
        """By id: those that have not ended."""
        self._without_token: set[int] = set()

    def add(self, seq: SimulatedSequence, now_s: float) -> None:
        """Take a row. `go_on` must follow if the replica had nothing to do. Raises RequestError."""
        self._interrupt(now_s)
        self.scheduler.add(seq)
        if self.next_s == math.inf:
            self._now_s = max(self._now_s, now_s)
        self.num_rows += 1
        self._rows[seq.seq_id] = seq
        self._num_new += 1
        self._without_token.add(seq.seq_id)

    def complete(self) -> News:
        """What is due at `next_s`; `go_on` must follow."""
        assert self.next_s < math.inf
        self._now_s = self.next_s
        if self._plan is not None:
            self._take(self._plan.steps.num_steps)
        elif self._is_waiting_for_result:
            self._take_result()
        return self._news()

    def go_on(self) -> None:
        """Send the next step, if there is one, and find out when something happens next."""
        if self._takes_plain_steps and self._start_plan():
            return
        self._send_step()

    def output_tokens_by(self, now_s: float) -> int:
        """Tokens sampled until now, which must not be later than the next event."""
        if self._plan is None:
            return self.num_output_tokens
        return self.num_output_tokens + self._num_over(now_s) * self._plan.steps.num_rows

    def busy_s_by(self, now_s: float) -> float:
        """Seconds of steps that are over by now, which must not be later than the next event."""
        if self._plan is None:
            return self.busy_s
        num_over = self._num_over(now_s)
        return self._busy_s_after(self._plan, num_over)

    @property
    def _is_waiting_for_result(self) -> bool:
        return len(self._sent) == _MAX_IN_FLIGHT or (bool(self._sent) and not self._has_sent_now)

    def _num_over(self, now_s: float) -> int:
        """Steps of the plan that have ended before now."""
        assert self._plan is not None
        return int(np.searchsorted(self._plan.ends_s[1:], now_s, side="left"))

    def _start_plan(self) -> bool:
        if len(self._sent) != 1 or self._num_new:  # taking requests in makes the next step late
            return False
        steps = self.scheduler.plan()
        if steps is None:
            return False
        last = self._sent[0]
        load = plain_load(steps.num_rows, steps.kv_tokens)
        gpu_s = cast(Floats, self._times.gpu_s(load, steps.num_used_blocks))
        driver_s = float(self._times.driver_s(load, 0))
        first_end = max(self._now_s + driver_s, last.finish_s)
        ends_s = np.concatenate(([self._now_s], max_times(first_end, driver_s, gpu_s[:-1])))
        self._plan = _Plan(steps, gpu_s, ends_s)
        self.next_s = float(ends_s[-1])
        return True

    def _interrupt(self, now_s: float) -> None:
        """Something arrives in the midst of a plan: take what is over of it, and send the step that is under way."""
        if self._plan is None:
            return
        num_over = self._num_over(now_s)
        self._now_s = float(self._plan.ends_s[num_over])
        self._take(num_over)
        self._send_step()

    def _take(self, num_steps: int) -> None:
        """End the plan after so many of its steps."""
        plan = self._plan
        assert plan is not None
        self._plan = None
        if num_steps == 0:
            return
        self.scheduler.take(num_steps)
        self.num_output_tokens += num_steps * plan.steps.num_rows
        self.busy_s = self._busy_s_after(plan, num_steps)
        last_s = float(plan.gpu_s[num_steps - 1])
        finish_s = float(plan.ends_s[num_steps]) + last_s
        newest = self._sent.pop()
        self._sent.append(_Sent(newest.step_id + num_steps, newest.num_sampled, finish_s, last_s))
        self._gpu_free_s = finish_s

    def _busy_s_after(self, plan: _Plan, num_steps: int) -> float:
        """With the step that was under way when the plan began, and all of the plan's steps but the newest."""
        return float(np.cumsum(np.concatenate(([self.busy_s, self._sent[0].gpu_s], plan.gpu_s)))[num_steps])

    def _send_step(self) -> None:
        step = self.scheduler.schedule()
        self._has_sent_now = step is not None
        if step is not None:
            load = load_of(step)
            self._now_s += float(self._times.driver_s(load, self._num_new))
            self._num_new = 0
            gpu_s = float(self._times.gpu_s(load, len(self.scheduler.block_manager.used_block_ids)))
            self._gpu_free_s = max(self._now_s, self._gpu_free_s) + gpu_s
            self._sent.append(_Sent(step.step_id, int(load.num_samples), self._gpu_free_s, gpu_s))
        if self._is_waiting_for_result:
            self.next_s = max(self._now_s, self._sent[0].finish_s)
        else:
            self.next_s = self._now_s if self._sent or self.scheduler.has_news else math.inf

    def _take_result(self) -> None:
        sent = self._sent.popleft()
        sampled: IntArray = np.full(sent.num_sampled, SAMPLED_ID, dtype=np.int32)
        self.scheduler.postprocess(StepResult(step_id=sent.step_id, token_ids=sampled))
        self.busy_s += sent.gpu_s
        self.num_output_tokens += sent.num_sampled

    def _news(self) -> News:
        first_tokens, finished = [], []
        for update in self.scheduler.take_updates():
            if update.seq_id in self._without_token and update.token_id is not None:
                self._without_token.discard(update.seq_id)
                first_tokens.append(update.seq_id)
            if update.finish_reason is not None:
                num_tokens = self._rows.pop(update.seq_id).num_output_tokens
                finished.append(Ending(update.seq_id, num_tokens, update.error))
                self._without_token.discard(update.seq_id)
        self.num_rows -= len(finished)
        return News(first_tokens=first_tokens, finished=finished)
