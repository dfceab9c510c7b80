"""A run in the simulator. Called by `raytp.experiment.running`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from raytp.experiment.spec import ExperimentSpec, LoseNode, Run, SlowStart, SlowSteps
from raytp.scaling import load_policy
from raytp.simulator.capacity import make_replica
from raytp.simulator.cluster import ClusterConfig, simulate
from raytp.simulator.delays import Delay, Delays
from raytp.simulator.fleet import ReplicaConfig
from raytp.simulator.measured import find_gpu
from raytp.simulator.nodes import NodeConfig
from raytp.simulator.requests import SimulatedRequest
from raytp.simulator.results import Results
from raytp.simulator.setup import load_model

_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_kv_blocks")
"""Options of an engine that its scheduler has, too; the others change no simulation."""


def check_simulation(spec: ExperimentSpec) -> None:
    """Raises RaytpError for what no run could be simulated with: no such model, or too little memory for it."""
    _replica(spec, ())


def run_simulated(run: Run, on_progress: Callable[[float, str], None]) -> Results:
    """What becomes of the run's requests; `on_progress` is told the share of them that has ended, and a word.

    The same for the same run, always. Raises RaytpError, and whatever the policy raises.
    """
    return simulate(_cluster(run), run.requests, lambda share: on_progress(share, "simulating"))


def _cluster(run: Run) -> ClusterConfig:
    spec = run.spec
    nodes = NodeConfig(
        gpus_per_node=spec.cluster.gpus_per_node,
        min_nodes=spec.cluster.min_nodes,
        max_nodes=spec.cluster.max_nodes,
        provisioning_s=spec.cluster.provisioning_s,
        idle_timeout_s=spec.cluster.idle_timeout_s,
    )
    return ClusterConfig(
        replica=_replica(spec, run.requests),
        nodes=nodes,
        policy=load_policy(run.policy),
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        decide_every_s=spec.decide_every_s,
        lost_nodes=tuple((each.at_s, each.node) for each in spec.failures if isinstance(each, LoseNode)),
        delays=Delays(start=_delays(spec, SlowStart), step=_delays(spec, SlowSteps)),
    )


def _delays(spec: ExperimentSpec, kind: type[SlowStart] | type[SlowSteps]) -> tuple[Delay, ...]:
    return tuple(Delay(seconds=each.seconds, replica=each.replica) for each in spec.failures if isinstance(each, kind))


def _replica(spec: ExperimentSpec, requests: tuple[SimulatedRequest, ...]) -> ReplicaConfig:
    gpu = find_gpu(spec.cluster.gpu)
    given = {name: spec.options[name] for name in _LIMITS if spec.options.get(name) is not None}
    replica = make_replica(
        load_model(spec.model),
        gpu.coefficients,
        spec.tensor_parallel_size,
        requests,
        spec.cluster.startup_s,
        {**gpu.limits, **given},
    )
    if spec.options.get("enable_prefix_caching", True):
        return replica
    return replace(replica, scheduler=replace(replica.scheduler, enable_prefix_caching=False))
