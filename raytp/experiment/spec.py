"""What an experiment is: plain values, as they stand in its file. Made by `reading`; read by everything beside it.

Knows nothing of YAML, of Ray or of how a run is made.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from raytp.simulator.requests import SimulatedRequest


class ClusterKind(enum.Enum):
    """Where the runs take place."""

    SIMULATED = "simulated"
    FAKE = "fake"
    """Ray's own autoscaler, with fake nodes on this machine."""
    RAY = "ray"
    """The cluster that `ray.init()` finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The nodes. A replica's rank takes one GPU; where ranks run on CPUs, "GPU" means a CPU core."""

    kind: ClusterKind = ClusterKind.SIMULATED
    gpu: str = "h200"
    """Whose speed is simulated: a kind that `raytp.simulator.measured` knows."""
    gpus_per_node: int = 8
    min_nodes: int = 0
    max_nodes: int = 1
    provisioning_s: float = 0.0
    """From asking for a node until it is there; of simulated nodes."""
    startup_s: float = 0.0
    """From having its GPUs until a replica takes rows; of simulated replicas."""
    idle_timeout_s: float = 60.0
    """How long a node stays with nothing on it; of simulated and fake nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseNode:
    """A node is lost: the `node`th that has come, counted from 0, at `at_s`. A fake node's raylet is killed."""

    at_s: float
    node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStart:
    """The `replica`th that is asked for, counted from 0, takes `seconds` longer to start; None is every replica."""

    seconds: float
    replica: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSteps:
    """Every step of the `replica`th takes `seconds` longer; None is every replica.

    Of every replica it gives CPU engines the pace of larger models without their work: several then share few cores.
    """

    seconds: float
    replica: int | None = None


Failure: TypeAlias = LoseNode | SlowStart | SlowSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What arrives. A trace, or lengths drawn by the run's seed; see `raytp.experiment.workloads`."""

    trace: Path | None = None
    num_requests: int = 1000
    prompt_tokens: int = 512
    """On average."""
    output_tokens: int = 256
    """On average."""
    rate: float | None = None
    """Requests a second that arrive at random; None: all are there from the beginning."""
    burst_rate: float | None = None
    """Requests a second during bursts; `rate` holds between them. Each period of `burst_every_s` ends with a burst."""
    burst_s: float = 60.0
    """How long a burst lasts."""
    burst_every_s: float = 300.0
    """From the beginning of a burst to that of the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSpec:
    """Policies times seeds are its runs."""

    name: str
    model: str | None
    """As `LLM` takes it, a path being absolute; None is the default model. Simulated, also a shape that `raytp bench`
    knows."""
    tensor_parallel_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `LLM`, such as max_num_seqs."""
    workload: WorkloadSpec
    cluster: ClusterSpec
    min_replicas: int = 1
    max_replicas: int = 1
    policies: tuple[str, ...]
    """As `raytp.scaling.load_policy` takes them."""
    seeds: tuple[int, ...] = (0,)
    failures: tuple[Failure, ...] = ()
    decide_every_s: float = 5.0
    """How often a policy is asked."""
    price_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy with one seed."""

    spec: ExperimentSpec
    policy: str
    seed: int
    requests: tuple[SimulatedRequest, ...]
    """By arrival."""
