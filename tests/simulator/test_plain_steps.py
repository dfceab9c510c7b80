"""Many steps at once leave exactly what single steps leave, and blocks made on demand decide as blocks made at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raytp.simulator.plain_steps import PlainScheduler
from raytp.simulator.replica import SimulatedReplica
from raytp.simulator.requests import SequenceMaker, SimulatedRequest
from raytp.simulator.sparse_blocks import SparseBlockManager
from raytp.simulator.step_time import StepTimes
from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.step import StepResult
from tests.simulator.small import COEFFICIENTS, SIZES

BLOCK_SIZE = 4


@st.composite
def requests(draw: st.DrawFn) -> list[SimulatedRequest]:
    """A few requests, some with a common prefix, in the order of their arrival."""
    made = []
    now = 0.0
    for _ in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([0.0, 0.001, 0.01, 0.0371]))
        prefix = draw(st.sampled_from([0, 0, 5, 9]))
        made.append(
            SimulatedRequest(
                arrival_s=now,
                prompt_tokens=prefix + draw(st.integers(1, 20)),
                output_tokens=draw(st.integers(1, 60)),
                prefix_id=f"p{prefix}" if prefix else None,
                prefix_tokens=prefix,
            )
        )
    return made


configs = st.builds(
    SchedulerConfig,
    num_kv_blocks=st.integers(25, 80),
    block_size=st.just(BLOCK_SIZE),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 32),
    max_model_len=st.integers(40, 90),
    vocab_size=st.just(1000),
    enable_prefix_caching=st.booleans(),
)


def run(
    config: SchedulerConfig, arrivals: list[SimulatedRequest], *, takes_plain_steps: bool
) -> tuple[list[tuple[Any, ...]], SimulatedReplica]:
    """Everything that a replica tells, with its times; and the replica afterwards."""
    times = StepTimes(COEFFICIENTS, SIZES, BLOCK_SIZE)
    replica = SimulatedReplica(config, times, 0.0, takes_plain_steps=takes_plain_steps)
    maker = SequenceMaker(config.vocab_size)
    told: list[tuple[Any, ...]] = []
    left = list(enumerate(arrivals))
    while left or replica.next_s < math.inf:
        if left and left[0][1].arrival_s <= replica.next_s:
            index, request = left.pop(0)
            replica.add(maker.make(index, request), request.arrival_s)
            told.append(("state", request.arrival_s, state_of(replica.scheduler)))
            if replica.next_s == math.inf:
                replica.go_on()
            continue
        now_s = replica.next_s
        news = replica.complete()
        if news.first_tokens or news.finished:
            told.append((now_s, news.first_tokens, news.finished, replica.num_output_tokens, replica.busy_s))
            told.append(("state", now_s, state_of(replica.scheduler)))
        replica.go_on()
    return told, replica


def state_of(scheduler: Scheduler) -> tuple[Any, ...]:
    """All that later decisions depend on."""
    manager = scheduler.block_manager
    blocks = [
        (manager.blocks[index].ref_count, manager.blocks[index].hash, manager.blocks[index].content_id)
        for index in range(scheduler.config.num_kv_blocks)
    ]
    return (
        scheduler.stats(),
        [of_sequence(seq) for seq in scheduler.running.values()],
        [of_sequence(seq) for seq in scheduler.waiting],
        list(manager.free_block_ids),
        sorted(manager.used_block_ids),
        dict(manager.hash_to_block_id),
        blocks,
        [[seq.seq_id for seq in step.sampled] for step in scheduler._in_flight],
        scheduler._next_step_id,
        list(scheduler._free_slots),
    )


def of_sequence(seq: Sequence) -> tuple[Any, ...]:
    """A sequence's state, block table and hashes included."""
    return (
        seq.seq_id,
        seq.token_ids.tolist(),
        seq.num_pending_tokens,
        seq.num_computed_tokens,
        seq.num_cached_tokens,
        list(seq.block_table),
        list(seq.block_hashes),
        seq.num_hashed_blocks,
        seq.slot,
        seq.has_sampled_in_slot,
    )


@settings(max_examples=60, deadline=None)
@given(configs, requests())
def test_many_steps_at_once_are_the_same_as_single_ones(
    config: SchedulerConfig, arrivals: list[SimulatedRequest]
) -> None:
    arrivals = [one for one in arrivals if one.prompt_tokens < config.max_model_len]
    at_once, fast = run(config, arrivals, takes_plain_steps=True)
    one_by_one, slow = run(config, arrivals, takes_plain_steps=False)
    assert at_once == one_by_one
    assert fast.busy_s == slow.busy_s
    assert not fast.scheduler.has_unfinished


def test_the_comparison_does_take_many_steps_at_once() -> None:
    config = SchedulerConfig(
        num_kv_blocks=60,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=90,
        vocab_size=1000,
    )
    scheduler = PlainScheduler(config)
    scheduler.add(SequenceMaker(1000).make(0, SimulatedRequest(arrival_s=0, prompt_tokens=5, output_tokens=50)))
    first = scheduler.schedule()
    assert first is not None
    assert scheduler.schedule() is not None
    assert scheduler.plan() is None
    scheduler.postprocess(StepResult(step_id=first.step_id, token_ids=np.zeros(1, dtype=np.int32)))
    steps = scheduler.plan()
    assert steps is not None
    assert steps.num_steps == 48  # of 50 tokens one is there, and the last one is news


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 40), st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=40))
def test_blocks_on_demand_are_chosen_as_blocks_made_at_once(
    num_blocks: int, has_cache: bool, operations: list[tuple[int, int]]
) -> None:
    managers = [kind(num_blocks, BLOCK_SIZE, has_cache) for kind in (BlockManager, SparseBlockManager)]
    histories = [play(manager, operations) for manager in managers]
    assert histories[0] == histories[1]


def play(manager: BlockManager, operations: list[tuple[int, int]]) -> list[Any]:
    """Four sequences are allocated, hashed and given back in turn; what every operation gave."""
    told: list[Any] = []
    live: dict[int, Sequence] = {}
    maker = SequenceMaker(1000)
    for which, num_tokens in operations:
        if which in live:
            manager.deallocate(live.pop(which))
        else:
            request = SimulatedRequest(
                arrival_s=0, prompt_tokens=num_tokens, output_tokens=1, prefix_id="p", prefix_tokens=num_tokens
            )
            seq = maker.make(which, request)
            if manager.can_allocate(seq):
                told.append(manager.allocate(seq))
                seq.num_computed_tokens = seq.num_tokens
                manager.hash_blocks(seq)
                live[which] = seq
        told.append(([seq.block_table[:] for seq in live.values()], list(manager.free_block_ids)))
    return told
