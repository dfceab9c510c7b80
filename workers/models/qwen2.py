"""Qwen2 and Qwen2.5 (dense): always a bias on q, k and v, and on nothing else."""

from __future__ import annotations

from workers.models.architecture import Architecture, RawConfig, always


def uses_sliding_window(raw: RawConfig) -> bool:
    """Qwen2 and Qwen3: layers from `max_window_layers` on, and only if `use_sliding_window` is set."""
    is_set = bool(raw.get("use_sliding_window")) and raw["sliding_window"] is not None
    return is_set and bool(raw["num_hidden_layers"] > raw["max_window_layers"])


QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    has_qkv_bias=always,
    uses_sliding_window=uses_sliding_window,
)
