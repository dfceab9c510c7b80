"""Turns the arguments of `raytp bench` into what to start and what to run. Called by `raytp.cli.bench`.

Whatever can be refused is refused here, before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytp.bench.workloads import WORKLOADS, Case, make_cases
from raytp.errors import ConfigError
from raytp.model_source import resolve_model
from raytp.progress import ProgressBar
from raytp.shapes import find_shape
from workers.model_config import load_model_config

_ALL = "all"
_MAX_MODEL_LEN = 4096
"""nano-vLLM's benchmark sets it, and every workload fits into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One engine, and the workloads that it is to run."""

    path: Path
    name: str
    tensor_parallel_size: int
    options: Mapping[str, Any]
    """Fields of `raytp.config.EngineConfig`."""
    cases: Mapping[str, list[Case]]
    """By workload."""


def make_plan(
    model: str, workload: str, num_prompts: int | None, tensor_parallel_size: int, options: Mapping[str, Any]
) -> Plan:
    """`model` is a shape, which gets random weights, or whatever `LLM` takes. Raises RaytpError."""
    if workload not in (*WORKLOADS, _ALL):
        raise ConfigError(f"workload={workload!r} must be one of {', '.join((*WORKLOADS, _ALL))}")
    shape = find_shape(model)
    with ProgressBar("finding the model", None) as bar:
        source = resolve_model(shape or model, bar.update)
    config = load_model_config(source.path)
    cases = {name: make_cases(name, num_prompts, config.vocab_size) for name in WORKLOADS if workload in (name, _ALL)}
    max_model_len = options.get("max_model_len", min(_MAX_MODEL_LEN, config.max_position_embeddings))
    for name, cases_of_workload in cases.items():
        longest = max(case.longest_sequence for case in cases_of_workload)
        if longest > max_model_len:
            raise ConfigError(
                f"the workload {name} has sequences of {longest} tokens, more than max_model_len={max_model_len}: "
                f"raise it, or choose another workload or model"
            )
    return Plan(
        path=source.path,
        name=source.name,
        tensor_parallel_size=tensor_parallel_size,
        options={**options, "max_model_len": max_model_len, "load_format": "auto" if shape is None else "dummy"},
        cases=cases,
    )
