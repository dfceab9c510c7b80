"""Starts the engines of a pool, each with a driver actor, ranks and placement group. Called by `engine_choice`."""

from __future__ import annotations

import os
from dataclasses import replace

from raytp.config import EngineConfig
from raytp.connection import start_engine
from raytp.llm import LLM
from raytp.ray_runtime import choose_device, ensure_ray
from raytp.replicas.replica import ProgressCallback, Start


def prepare_start(model: str | os.PathLike[str] | None, config: EngineConfig, num_replicas: int) -> Start:
    """Find Ray, or start one with room for `num_replicas`, and settle what must be the same for all of them.

    Raises EngineError.
    """
    ensure_ray(config.tensor_parallel_size * num_replicas)
    if config.device == "auto":
        config = replace(config, device=choose_device())

    def start(on_progress: ProgressCallback) -> LLM:
        return LLM.of(start_engine(model, config, on_progress))

    return start
