"""What `raytp.LLM` is built around: an engine that is ready, and what its callers need of its model.

It comes from a model and settings, by starting an engine, or from the name of one that runs. Called by `raytp.llm`
and by `raytp serve-engine`. Next hop: `raytp.driver_client`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from raytp.config import EngineConfig
from raytp.driver import SharedModel
from raytp.driver_client import DriverClient
from raytp.errors import EngineError
from raytp.model_files import ModelFiles
from raytp.model_source import resolve_model
from raytp.outputs import EngineDescription, EngineInfo, ProgressCallback
from raytp.ray_runtime import check_room, ensure_ray, join_ray
from raytp.shared_engines import check_name, find_engine
from raytp.tokenizer import Tokenizer, TokenizerLoading
from raytp.worker_settings import make_worker_config
from workers.model_config import ModelConfig, load_generation_config, load_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An engine that is ready, as a caller uses it."""

    driver: DriverClient
    info: EngineInfo
    model_name: str
    model_config: ModelConfig
    generation_config: dict[str, Any]
    tokenizer: Tokenizer | None


def start_engine(
    model: str | os.PathLike[str] | None,
    config: EngineConfig,
    on_progress: ProgressCallback,
    name: str | None = None,
) -> Connection:
    """Resolve a model and start an engine, of the caller's own or, with a `name`, a shared one. Raises RaytpError."""
    if name is not None:  # before a model is downloaded in vain
        on_progress("finding the cluster", 0.0)
        join_ray(on_progress)
        check_name(name)
    source = resolve_model(model, on_progress=on_progress)
    model_config = load_model_config(source.path)
    generation_config = load_generation_config(source.path)
    on_progress("starting Ray", 0.0)
    loading = TokenizerLoading(source.path)
    ensure_ray(config.tensor_parallel_size, on_progress)
    tokenizer = loading.result()
    num_token_ids = None if tokenizer is None else tokenizer.num_ids
    worker_config = make_worker_config(config, model_config, source.path, num_token_ids)
    check_room(config.min_tensor_parallel_size or config.tensor_parallel_size, worker_config.device)
    shared = None if name is None else SharedModel(name, ModelFiles.read(source.path, source.name))
    driver, info = DriverClient.start(config, worker_config, model_config.vocab_size, on_progress, shared)
    return Connection(
        driver=driver,
        info=info,
        model_name=source.name,
        model_config=model_config,
        generation_config=generation_config,
        tokenizer=tokenizer,
    )


def describe_engine(name: str, on_progress: ProgressCallback | None = None) -> EngineDescription:
    """A shared engine, whatever its state. Raises EngineNotFoundError."""
    join_ray(on_progress)
    return find_engine(name).describe()


def connect_engine(name: str, on_progress: ProgressCallback | None = None) -> Connection:
    """A shared engine that has started. Raises EngineNotFoundError, or EngineError if it has not yet, or has failed.

    The model's folder may not exist here; what callers need of it comes from the driver.
    """
    join_ray(on_progress)
    driver = find_engine(name)
    description = driver.describe()
    if description.error is not None:
        raise EngineError(f"engine {name} has failed, and raytp stop {name} removes it: {description.error}")
    if description.info is None:
        raise EngineError(f"engine {name} is not ready yet ({description.stage}): raytp engines shows how far it is")
    files = driver.model_files()
    with files.unpacked() as folder:
        return Connection(
            driver=driver,
            info=description.info,
            model_name=files.model_name,
            model_config=load_model_config(folder),
            generation_config=load_generation_config(folder),
            tokenizer=TokenizerLoading(folder).result(),
        )
