"""What sets one architecture apart from the decoder that all of them share.

Plain data without torch, so that a config can be read by the control plane. Filled in by `qwen3`, `llama` and `qwen2`,
listed by `registry`, applied by `workers.model_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

RawConfig = Mapping[str, Any]
"""The content of config.json, with the architecture's defaults filled in."""


def never(_: RawConfig) -> bool:
    """The architecture does not have this."""
    return False


def always(_: RawConfig) -> bool:
    """The architecture always has this."""
    return True


def attention_bias(raw: RawConfig) -> bool:
    """As config.json's `attention_bias` says."""
    return bool(raw.get("attention_bias", False))


def mlp_bias(raw: RawConfig) -> bool:
    """As config.json's `mlp_bias` says."""
    return bool(raw.get("mlp_bias", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One entry of `architectures` in config.json. Each predicate reads the raw config."""

    name: str
    defaults: RawConfig
    """What transformers assumes of fields that config.json leaves out, where it differs between architectures."""
    qk_norm: bool = False
    """Whether each head of q and k is RMS-normalised before the rotary embedding."""
    has_qkv_bias: Callable[[RawConfig], bool] = never
    has_output_bias: Callable[[RawConfig], bool] = never
    """Of the attention's output projection."""
    has_mlp_bias: Callable[[RawConfig], bool] = never
    uses_sliding_window: Callable[[RawConfig], bool] = never
    """Whether some layer attends only to a window of recent tokens."""
