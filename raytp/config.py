"""The engine's settings as users give them.

Made by whoever starts an engine: `raytp.llm`, for most. Read by `raytp.worker_settings` and the driver's side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from scheduler.errors import ConfigError, shown
from workers.faults import Fault

_CHOICES = {
    "device": ("auto", "cuda", "cpu"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_format": ("auto", "dummy"),
    "attention_backend": ("auto", "flash_attn_3", "flash_attn", "triton", "torch"),
    "transport": ("socket", "ray"),
    "placement_strategy": ("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"),
}

_LEAST_HEARTBEAT_TIMEOUT_S = 2.0
_MAX_COUNT = 2**31 - 1
"""What counts travel as."""
_MAX_NUMBER = 1e6
"""Seconds, of which sockets count the milliseconds in 32 bits; and GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run a model. Raises ConfigError for a value out of its range."""

    tensor_parallel_size: int = 1
    """Ranks that share the model, one GPU each."""
    min_tensor_parallel_size: int | None = None
    """Go on with as few ranks as that if the cluster has no more in time; default: wait for all of them."""
    device: str = "auto"
    """"cuda" if the cluster has GPUs, else "cpu"."""
    dtype: str = "auto"
    """Of weights and KV cache: the checkpoint's on a GPU, float32 on a CPU."""
    load_format: str = "auto"
    """"dummy" fills the model with random weights, from its config.json alone."""
    attention_backend: str = "auto"
    """The fastest that is installed, or one by name."""
    enforce_eager: bool = False
    """No CUDA graphs: slower, for comparison and for debugging."""
    max_model_len: int | None = None
    """Tokens of one sequence, prompt and output; default: what the model was trained for, if the KV cache holds it."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int | None = None
    """Tokens in one step; default 8192 on a GPU, 512 on a CPU."""
    block_size: int = 16
    """Tokens in a KV-cache block, the grain of prefix sharing."""
    num_kv_blocks: int | None = None
    """KV-cache blocks; default: what the memory holds."""
    memory_fraction: float = 0.9
    """Share of a GPU's memory for weights, KV cache and work space together."""
    cpu_kv_cache_gib: float = 2.0
    """KV cache of a rank on a CPU."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of prompts that begin alike."""
    transport: str = "socket"
    """How frames reach the ranks: "socket", or "ray" for networks that close ports."""
    placement_strategy: str = "STRICT_PACK"
    """Ray's placement strategy for the ranks; STRICT_PACK keeps them on one node."""
    placement_timeout_s: float = 900.0
    """How long to wait for room for all ranks, the time that a new node takes to come up included."""
    startup_timeout_s: float = 600.0
    """How long each step of the start-up may take, loading weights included."""
    step_timeout_s: float = 120.0
    """How long one step of the model may take before the ranks count as stuck."""
    heartbeat_timeout_s: float = 10.0
    """How long a rank's process may say nothing, not even that it is alive, before it counts as dead."""
    max_restarts: int = 5
    """How often in a row the ranks may die, or fail to start, without a step between, before the engine gives up."""
    faults: tuple[Fault, ...] = ()
    """What is to go wrong on purpose; see `workers.faults`."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_numbers()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise ConfigError(f"{name}={shown(value)} must be one of {', '.join(choices)}")
        for name in ("enforce_eager", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={shown(getattr(self, name))} must be True or False")
        if not isinstance(self.faults, tuple) or not all(isinstance(fault, Fault) for fault in self.faults):
            raise ConfigError(f"faults={shown(self.faults)} must be a tuple of workers.faults.Fault")
        for fault in self.faults:
            if fault.rank >= self.tensor_parallel_size:
                raise ConfigError(
                    f"a fault of rank {fault.rank} cannot happen with tensor_parallel_size={self.tensor_parallel_size}"
                )

    def _check_counts(self) -> None:
        for name in (
            "tensor_parallel_size",
            "min_tensor_parallel_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "num_kv_blocks",
        ):
            value = getattr(self, name)
            if value is None and name not in ("tensor_parallel_size", "max_num_seqs", "block_size"):
                continue
            if not _is_integer(value) or not 1 <= value <= _MAX_COUNT:
                raise ConfigError(f"{name}={shown(value)} must be an integer of at least 1 and at most {_MAX_COUNT}")
        if (self.min_tensor_parallel_size or 1) > self.tensor_parallel_size:
            raise ConfigError(
                f"min_tensor_parallel_size={self.min_tensor_parallel_size} exceeds tensor_parallel_size="
                f"{self.tensor_parallel_size}: lower it, or leave it out"
            )
        if not _is_integer(self.max_restarts) or self.max_restarts < 0:
            raise ConfigError(f"max_restarts={shown(self.max_restarts)} must be an integer of at least 0")

    def _check_numbers(self) -> None:
        for name in (
            "placement_timeout_s",
            "startup_timeout_s",
            "step_timeout_s",
            "heartbeat_timeout_s",
            "cpu_kv_cache_gib",
        ):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= _MAX_NUMBER:
                raise ConfigError(f"{name}={shown(value)} must be a number above 0 and at most {_MAX_NUMBER:g}")
        if self.heartbeat_timeout_s < _LEAST_HEARTBEAT_TIMEOUT_S:
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s!r} must be at least {_LEAST_HEARTBEAT_TIMEOUT_S:g}: "
                f"ranks say once a second that they are alive"
            )
        if not _is_number(self.memory_fraction) or not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction={shown(self.memory_fraction)} must be above 0 and at most 1")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)


def check_shared_alone(engine: str, model: object, tensor_parallel_size: int, options: Mapping[str, Any]) -> None:
    """Raises ConfigError if a shared engine is named, and with it the settings of one to be started."""
    if model is not None or tensor_parallel_size != 1 or options:
        raise ConfigError(f"engine {engine} runs already, with its own model and settings: leave out all others")


def make_engine_config(tensor_parallel_size: int, options: dict[str, Any]) -> EngineConfig:
    """The other settings by name. Raises ConfigError for a name that is none."""
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"{name} is no setting of an engine; the settings are {', '.join(known)}")
    return EngineConfig(tensor_parallel_size=tensor_parallel_size, **options)
