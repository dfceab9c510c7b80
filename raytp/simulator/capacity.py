"""Capacity questions: what one model on one kind of GPU does, and how many replicas a target needs.

Called by `raytp.cli.simulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from raytp.errors import ConfigError
from raytp.scaling import FixedPolicy
from raytp.simulator.cluster import ClusterConfig, simulate
from raytp.simulator.fleet import ReplicaConfig
from raytp.simulator.hardware import ShardSizes, num_kv_blocks, shard_sizes
from raytp.simulator.nodes import NodeConfig
from raytp.simulator.requests import SimulatedRequest
from raytp.simulator.results import Results
from raytp.simulator.seconds import check_seconds
from raytp.simulator.step_time import Coefficients, StepTimes
from scheduler.config import SchedulerConfig
from workers.model_config import ModelConfig
from workers.shard_plan import plan_shards

_LIMITS = {"block_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
"""As `EngineConfig` has them on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is wanted; None does not matter. The limits are for the 99th percentile."""

    ttft_s: float | None = None
    per_token_s: float | None = None
    finish_s: float | None = None
    """Until all requests are done."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_seconds(field.name, value, may_be_zero=False)

    @property
    def is_given(self) -> bool:
        """Whether anything is wanted."""
        return (self.ttft_s, self.per_token_s, self.finish_s) != (None, None, None)

    def is_met(self, results: Results) -> bool:
        """Whether a run was good enough."""
        latencies = results.latencies()
        pairs = [
            (self.ttft_s, latencies["ttft"].get("p99", 0.0)),
            (self.per_token_s, latencies["per_token"].get("p99", 0.0)),
            (self.finish_s, results.seconds),
        ]
        return all(limit is None or value <= limit for limit, value in pairs)


def make_replica(
    model: ModelConfig,
    coefficients: Coefficients,
    tensor_parallel_size: int,
    requests: Sequence[SimulatedRequest],
    startup_s: float = 0.0,
    limits: Mapping[str, int] | None = None,
) -> ReplicaConfig:
    """A replica with an engine's default limits, but for those in `limits`, by `SchedulerConfig`'s names.

    Raises ConfigError if the model cannot be split so, or it, or the KV blocks that are asked for, do not fit.
    """
    plan_shards(
        num_q_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        world_size=tensor_parallel_size,
    )
    sizes = shard_sizes(model, tensor_parallel_size, int(coefficients.dtype_bytes))
    wanted = {**_LIMITS, "max_model_len": model.max_position_embeddings, **(limits or {})}
    wanted["num_kv_blocks"] = _num_blocks(sizes, coefficients.memory_bytes, wanted)
    scheduler = SchedulerConfig(
        **wanted,
        vocab_size=model.vocab_size,
        # Blocks that nobody can share need no hashes; what is scheduled is the same.
        enable_prefix_caching=any(request.prefix_id is not None for request in requests),
    )
    times = StepTimes(coefficients, sizes, scheduler.block_size)
    return ReplicaConfig(scheduler=scheduler, times=times, num_gpus=tensor_parallel_size, startup_s=startup_s)


def _num_blocks(sizes: ShardSizes, memory_bytes: float, limits: Mapping[str, int]) -> int:
    """As many as are asked for, or as fit."""
    fitting = num_kv_blocks(sizes, memory_bytes, limits["block_size"])
    if fitting == 0:
        raise ConfigError(
            f"a rank's weights take {sizes.resident_bytes / 1e9:.1f} GB, and the GPU has room for "
            f"{memory_bytes / 1e9:.1f} GB: raise the tensor-parallel size"
        )
    wanted = limits.get("num_kv_blocks", fitting)
    if wanted > fitting:
        raise ConfigError(f"num_kv_blocks={wanted} exceeds the {fitting} blocks that fit beside the weights")
    return wanted


def fixed_cluster(replica: ReplicaConfig, num_replicas: int) -> ClusterConfig:
    """So many replicas, ready from the beginning, on nodes that hold one each."""
    return ClusterConfig(
        replica=replace(replica, startup_s=0.0),
        nodes=NodeConfig(gpus_per_node=replica.num_gpus, min_nodes=num_replicas, max_nodes=num_replicas),
        policy=FixedPolicy(num_replicas),
        min_replicas=num_replicas,
        max_replicas=num_replicas,
    )


def least_replicas(
    replica: ReplicaConfig,
    requests: Sequence[SimulatedRequest],
    target: Target,
    max_replicas: int,
    on_progress: Callable[[int, float], None] = lambda count, share: None,
) -> tuple[int, Results]:
    """The least number that meets the target, and its run: doubled until it is met, then halved in between.

    More replicas are taken to be no worse. `on_progress` is told the number that is tried, and the share of its
    requests that have ended. Raises ConfigError if `max_replicas` are too few.
    """

    def run(count: int) -> Results:
        return simulate(fixed_cluster(replica, count), requests, lambda share: on_progress(count, share))

    too_few, count = 0, 1
    results = run(count)
    while not target.is_met(results):
        if count == max_replicas:
            all_of_them = "1 replica does" if max_replicas == 1 else f"{max_replicas} replicas do"
            raise ConfigError(f"{all_of_them} not meet the target either: raise --max-replicas or relax it")
        too_few, count = count, min(2 * count, max_replicas)
        results = run(count)
    while count - too_few > 1:
        middle = (too_few + count) // 2
        tried = run(middle)
        if target.is_met(tried):
            count, results = middle, tried
        else:
            too_few = middle
    return count, results
