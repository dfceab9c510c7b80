"""From the engine's settings and the model to what each rank is told: every default is decided here.

Called by `raytp.connection`, once Ray runs.
"""

from __future__ import annotations

import os
from pathlib import Path

from raytp.config import EngineConfig
from raytp.errors import ConfigError
from raytp.ray_runtime import choose_device
from workers.config import WorkerConfig
from workers.model_config import ModelConfig
from workers.shard_plan import plan_shards

_MAX_NUM_BATCHED_TOKENS = {"cuda": 8192, "cpu": 512}


def make_worker_config(config: EngineConfig, model: ModelConfig, path: Path, num_token_ids: int | None) -> WorkerConfig:
    """`path`: the checkpoint's folder. `num_token_ids`: the tokenizer's ids are below it; None if there is none.

    Raises ConfigError if the model cannot be run or split as the settings ask.
    """
    device = choose_device() if config.device == "auto" else config.device
    dtype = config.dtype
    if dtype == "auto":
        dtype = model.dtype if device == "cuda" else "float32"
    _check_shards(config, model)
    return WorkerConfig(
        model_path=str(path.absolute()),  # a rank's working directory may be another one
        world_size=config.tensor_parallel_size,
        device=device,
        dtype=dtype,
        load_format=config.load_format,
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        memory_fraction=config.memory_fraction,
        cpu_kv_cache_bytes=int(config.cpu_kv_cache_gib * 2**30),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS[device],
        max_model_len=_max_model_len(config, model),
        num_valid_tokens=num_token_ids,
        num_threads=max(1, ((os.cpu_count() or 1) - 1) // config.tensor_parallel_size),  # one core for the driver
        timeout_s=config.startup_timeout_s,
        faults=config.faults,
    )


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={wanted} exceeds the model's {model.max_position_embeddings} positions: lower it"
        )
    return wanted


def _check_shards(config: EngineConfig, model: ModelConfig) -> None:
    """The ranks plan their shards by the same function; here it says early what cannot be split."""
    plan_shards(
        num_q_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        world_size=config.tensor_parallel_size,
    )
