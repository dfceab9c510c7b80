"""Parts that tests share: a small model, round coefficients, a small engine, what a policy sees of a job at rest."""

from __future__ import annotations

from raytp.scaling import Observation
from raytp.simulator.fleet import ReplicaConfig
from raytp.simulator.hardware import ShardSizes
from raytp.simulator.step_time import Coefficients, StepTimes
from scheduler.config import SchedulerConfig

COEFFICIENTS = Coefficients(
    bytes_per_s=4e12,
    flop_per_s=7e14,
    layer_s=3e-5,
    eager_layer_s=1e-4,
    eager_parallel_layer_s=1e-4,
    shared_byte_s=1e-13,
    pair_flop_s=3e-15,
    all_reduce_layer_s=5e-6,
    all_reduce_byte_s=1e-12,
    request_s=5e-4,
    driver_step_s=1e-4,
    driver_row_s=5e-6,
    driver_prompt_token_s=3e-7,
    memory_bytes=1e11,
)
SIZES = ShardSizes(
    num_ranks=1,
    num_layers=28,
    weight_bytes=1.2e9,
    resident_bytes=1.2e9,
    kv_bytes_per_token=114688,
    flop_per_token=9e8,
    flop_per_sample=3e8,
    flop_per_pair=2.3e5,
    reduced_bytes_per_token=0,
)


def small_replica(*, startup_s: float = 0.0, max_num_seqs: int = 16, takes_plain_steps: bool = True) -> ReplicaConfig:
    """An engine that has enough to do with a few rows."""
    scheduler = SchedulerConfig(
        num_kv_blocks=2000,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        vocab_size=1000,
    )
    times = StepTimes(COEFFICIENTS, SIZES, 16)
    return ReplicaConfig(
        scheduler=scheduler, times=times, num_gpus=1, startup_s=startup_s, takes_plain_steps=takes_plain_steps
    )


SEEN = Observation(
    now_s=100.0,
    rows_waiting=0,
    rows_running=0,
    arrival_rows_per_s=0.0,
    tokens_per_row=100.0,
    tokens_per_s_per_replica=100.0,
    rows_per_replica=4,
    startup_s=10.0,
    num_ready=1,
    num_pending=0,
    num_nodes_pending=0,
    target=1,
    seconds_since_change=100.0,
    min_replicas=0,
    max_replicas=100,
)
