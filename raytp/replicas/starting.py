"""Starts the engines of a pool, each with a driver actor, ranks and placement group. Called by `engine_choice`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from raytp.config import EngineConfig
from raytp.connection import start_engine
from raytp.llm import LLM
from raytp.ray_runtime import choose_device, ensure_ray
from raytp.replicas.replica import ProgressCallback, Start
from workers.faults import Fault


def prepare_start(
    model: str | os.PathLike[str] | None,
    config: EngineConfig,
    num_replicas: int,
    faults_of: Callable[[int], tuple[Fault, ...]] = lambda number: (),
    on_progress: ProgressCallback | None = None,
) -> Start:
    """Find Ray, or start one with room for `num_replicas`, and settle what must be the same for all of them.

    `faults_of` a replica's number: what is to go wrong in that one. `on_progress` is told if Ray is waited for. Raises
    EngineError.
    """
    ensure_ray(config.tensor_parallel_size * num_replicas, on_progress)
    if config.device == "auto":
        config = replace(config, device=choose_device())

    def start(number: int, on_progress: ProgressCallback) -> LLM:
        own = replace(config, faults=config.faults + faults_of(number))
        return LLM.of(start_engine(model, own, on_progress))

    return start
