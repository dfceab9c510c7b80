"""Turns what a user writes into what is simulated. Called by `raytp.cli.simulate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytp.errors import ConfigError
from raytp.model_source import resolve_model
from raytp.scaling import load_policy
from raytp.shapes import find_shape
from raytp.simulator.capacity import make_replica
from raytp.simulator.cluster import ClusterConfig
from raytp.simulator.fit import fit
from raytp.simulator.fleet import ReplicaConfig
from raytp.simulator.measured import find_gpu
from raytp.simulator.nodes import NodeConfig
from raytp.simulator.requests import SimulatedRequest, batch, poisson, read_trace
from raytp.simulator.step_time import Coefficients
from workers.model_config import ModelConfig, load_model_config


def load_model(name: str | None) -> ModelConfig:
    """The config of a shape that `raytp bench` knows, or of whatever `LLM` takes. Raises RaytpError."""
    return load_model_config(find_shape(name or "") or resolve_model(name).path)


def load_coefficients(gpu: str, files: Sequence[Path]) -> Coefficients:
    """Of a GPU: those that come with raytp, or fitted to the records in `files`. Raises ConfigError."""
    found = find_gpu(gpu)
    if not files:
        return found.coefficients
    records = [record for file in files for record in _read_records(file)]
    try:
        devices = {name for record in records for name in record["gpu"]}
        if devices != {found.device_name}:
            raise ConfigError(
                f"the records are of {', '.join(sorted(devices))}, and gpu={gpu!r} is {found.device_name}"
            )
        models = {name: load_model(name) for name in {record["model"] for record in records}}
        return fit(records, models, found.rates)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError) as error:
        names = ", ".join(map(str, files))
        raise ConfigError(
            f"the records in {names} are not as raytp bench writes them: {type(error).__name__}: {error}"
        ) from None


def make_requests(
    trace: Path | None, rate: float | None, num_requests: int, prompt_tokens: int, output_tokens: int, seed: int
) -> list[SimulatedRequest]:
    """From a trace; or arriving at random; or all there at once. Raises ConfigError."""
    if trace is not None and rate is not None:
        raise ConfigError("--trace and --rate contradict each other: a trace says when its requests arrive")
    if trace is not None:
        return read_trace(trace)
    if rate is not None:
        return poisson(num_requests, rate, prompt_tokens, output_tokens, seed)
    return batch(num_requests, prompt_tokens, output_tokens, seed)


def load_replica(
    model: str,
    gpu: str,
    records: Sequence[Path],
    tensor_parallel_size: int,
    requests: Sequence[SimulatedRequest],
    startup_s: float,
) -> ReplicaConfig:
    """An engine with its defaults on a kind of GPU; see `load_model` and `load_coefficients`. Raises RaytpError."""
    coefficients = load_coefficients(gpu, records)
    return make_replica(
        load_model(model), coefficients, tensor_parallel_size, requests, startup_s, find_gpu(gpu).limits
    )


def make_cluster(
    replica: ReplicaConfig,
    limits: tuple[int, int],
    policy: str,
    provisioning_s: float,
    gpus_per_node: int | None,
    losses_s: Sequence[float],
) -> ClusterConfig:
    """As many nodes as MAX replicas need; those for MIN are there from the beginning.

    `gpus_per_node`: None is as many as a replica has. `losses_s`: when a node is lost, the first that has come first.
    Raises ConfigError.
    """
    gpus_per_node = replica.num_gpus if gpus_per_node is None else gpus_per_node
    per_node = max(1, gpus_per_node // replica.num_gpus)
    low, high = limits
    nodes = NodeConfig(
        gpus_per_node=gpus_per_node,
        min_nodes=-(-low // per_node),
        max_nodes=-(-high // per_node),
        provisioning_s=provisioning_s,
    )
    return ClusterConfig(
        replica=replica,
        nodes=nodes,
        policy=load_policy(policy),
        min_replicas=low,
        max_replicas=high,
        lost_nodes=tuple((at_s, node) for node, at_s in enumerate(sorted(losses_s))),
    )


def _read_records(file: Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(records, list) or not all(
        isinstance(record, dict) and "workload" in record for record in records
    ):
        raise ConfigError(f"{file} holds no records of raytp bench")
    return records
