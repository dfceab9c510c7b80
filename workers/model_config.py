"""What a checkpoint's config.json and generation_config.json say, checked and in one form.

Reads the JSON files directly: importing transformers takes seconds in each rank. Needs no torch, so that the control
plane can call it too. Called by each worker, by the engine at start-up, and by what only counts: `raytp info`, the
benchmark and the simulator. `workers.models` is built from the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from workers.errors import ModelNotFoundError, UnsupportedModelError
from workers.models.architecture import Architecture, RawConfig
from workers.models.registry import ARCHITECTURES

RopeType: TypeAlias = Literal["default", "linear", "llama3", "yarn"]
_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, independent of the head size. Fields that a type does not use keep their defaults."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    """How far the context is stretched: linear, llama3, yarn."""
    original_max_position_embeddings: int = 0
    """The context length before stretching: llama3, yarn."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low_freq_factor are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high_freq_factor are left alone."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the original context are left alone."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched in full."""
    truncate: bool = True
    """yarn: whether those two bounds are rounded outwards to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: scales cos and sin, and so the attention scores by its square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes and features of one decoder, in the words of config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: RopeConfig
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    """The checkpoint's: bfloat16, float16 or float32."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a text, from config.json and generation_config.json."""


def load_model_config(path: Path) -> ModelConfig:
    """Read the config of the checkpoint folder `path`.

    Raises ModelNotFoundError if there is no config.json, UnsupportedModelError if it asks for what raytp has not.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{path} holds no config.json: give the folder of a Hugging Face checkpoint")
    written = _read_json(file)
    architecture = _find_architecture(written)
    raw: dict[str, Any] = {**architecture.defaults, **written}
    _refuse_unsupported(raw, architecture)
    try:
        return _build(raw, architecture, load_generation_config(path))
    except KeyError as error:
        raise UnsupportedModelError(f"{file} does not say {error.args[0]!r}, which {architecture.name} needs") from None


def load_generation_config(path: Path) -> dict[str, Any]:
    """The defaults for sampling in the checkpoint folder `path`, without unset (null) fields; empty if it has none.

    Raises UnsupportedModelError if the file is no JSON object.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    return {name: value for name, value in _read_json(file).items() if value is not None}


def num_parameters(config: ModelConfig) -> int:
    """How many numbers the whole model holds; a tied head is counted once."""
    hidden, columns = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    layer = hidden * (2 * q_size + 2 * kv_size) + 3 * hidden * columns + 2 * hidden
    layer += (q_size + 2 * kv_size) * config.qkv_bias + hidden * config.attention_output_bias
    layer += (2 * columns + hidden) * config.mlp_bias + 2 * config.head_dim * config.qk_norm
    num_vocab_matrices = 1 if config.tie_word_embeddings else 2
    return num_vocab_matrices * config.vocab_size * hidden + config.num_hidden_layers * layer + hidden


def kv_bytes_per_token(config: ModelConfig, num_kv_heads: int, dtype_bytes: int) -> int:
    """Bytes of KV cache that one token takes on a rank that holds `num_kv_heads` kv heads."""
    return 2 * config.num_hidden_layers * num_kv_heads * config.head_dim * dtype_bytes


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{file} holds a {type(content).__name__}, not an object")
    return content


def _find_architecture(raw: RawConfig) -> Architecture:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(map(str, names)) or "none"
    raise UnsupportedModelError(f"architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(raw: RawConfig, architecture: Architecture) -> None:
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"quantization_config (quant_method={method!r}) is not supported; supported: unquantized weights"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act={raw['hidden_act']!r} is not supported; supported: 'silu'")
    layer_types = raw.get("layer_types") or []
    unknown = sorted({str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(f"layer_types holds {unknown[0]!r}; supported: 'full_attention'")
    window = raw.get("sliding_window")
    longest = _size(raw, "max_position_embeddings")
    is_active = "sliding_attention" in layer_types if layer_types else architecture.uses_sliding_window(raw)
    if is_active and (window is None or window < longest):
        raise UnsupportedModelError(
            f"sliding_window={window} is active and not supported; supported: no window, or one of at least "
            f"max_position_embeddings={longest}"
        )


def _build(raw: RawConfig, architecture: Architecture, generation: Mapping[str, Any]) -> ModelConfig:
    num_heads, hidden_size = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    eos_ids = {*_as_ids(raw.get("eos_token_id")), *_as_ids(generation.get("eos_token_id"))}
    bos = _as_ids(raw.get("bos_token_id")) or _as_ids(generation.get("bos_token_id"))
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_hidden_layers=_size(raw, "num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or hidden_size // num_heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        rope=_read_rope(raw),
        qkv_bias=architecture.has_qkv_bias(raw),
        attention_output_bias=architecture.has_output_bias(raw),
        mlp_bias=architecture.has_mlp_bias(raw),
        qk_norm=architecture.qk_norm,
        dtype=_read_dtype(raw),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(sorted(eos_ids)),
    )


def _size(raw: RawConfig, name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json's {name} is {value!r}; it must be a positive integer")
    return value


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids, which a config gives as one, as a list or not at all."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _read_dtype(raw: RawConfig) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"dtype={dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def _read_rope(raw: RawConfig) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in _ROPE_TYPES or any(isinstance(value, dict) for value in given.values()):
        kind = repr(rope_type) if rope_type not in _ROPE_TYPES else "one for each layer type"
        raise UnsupportedModelError(f"rope type {kind} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    part = given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor={part} is not supported; supported: 1.0")
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if rope_type == "default":
        return RopeConfig(rope_type="default", theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=given["factor"])
    original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = original or raw["max_position_embeddings"]
    if rope_type == "llama3":
        return RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=given["factor"],
            original_max_position_embeddings=original,
            low_freq_factor=given["low_freq_factor"],
            high_freq_factor=given["high_freq_factor"],
        )
    factor = given.get("factor") or raw["max_position_embeddings"] / original
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        truncate=given.get("truncate", True),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Equation 22 of the YaRN paper (arXiv 2309.00071), with DeepSeek's two multipliers, as in transformers."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def temperature(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
