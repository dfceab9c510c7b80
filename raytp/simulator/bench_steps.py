"""The steps that the real scheduler takes for a case of `raytp bench`. Called by `raytp.simulator.fit`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

import numpy as np

from raytp.bench.workloads import Case
from raytp.simulator.step_time import Floats, StepLoad, load_of
from scheduler.config import SchedulerConfig
from scheduler.sampling_params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.step import IntArray, StepResult


@dataclass(frozen=True, slots=True)
class BenchSteps:
    """What the time of each of n steps depends on."""

    load: StepLoad
    """Arrays of (n,)."""
    num_used_blocks: Floats
    """(n,)"""

    @property
    def num_steps(self) -> int:
        """n"""
        return len(self.num_used_blocks)


def steps_of(case: Case, config: SchedulerConfig) -> BenchSteps:
    """All steps of a case whose requests are there at once, one step ahead as the engine is."""
    scheduler = Scheduler(config)
    for seq_id, (prompt, length) in enumerate(zip(case.prompts, case.output_lens, strict=True)):
        scheduler.add(Sequence(seq_id, np.array(prompt, dtype=np.int32), ResolvedSampling(max_tokens=length)))
    loads: list[StepLoad] = []
    num_used_blocks: list[int] = []
    sent: deque[tuple[int, int]] = deque()
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        if step is not None:
            load = load_of(step)
            loads.append(load)
            num_used_blocks.append(len(scheduler.block_manager.used_block_ids))
            sent.append((step.step_id, int(load.num_samples)))
        if step is None or len(sent) == 2:
            step_id, num_sampled = sent.popleft()
            sampled: IntArray = np.zeros(num_sampled, dtype=np.int32)
            scheduler.postprocess(StepResult(step_id=step_id, token_ids=sampled))
            scheduler.take_updates()
    return BenchSteps(_stacked(loads), np.array(num_used_blocks, dtype=np.float64))


def _stacked(loads: list[StepLoad]) -> StepLoad:
    names = [field.name for field in fields(StepLoad)]
    return StepLoad(**{name: np.array([getattr(load, name) for load in loads], dtype=np.float64) for name in names})
