"""Rotary position embedding (arXiv 2104.09864) and its three ways of stretching the context.

Frequencies, angles, cos and sin are float32, equal to transformers' ROPE_INIT_FUNCTIONS. The angles are computed once a
step for all layers; there is no table, so no longest position either.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.model_config import RopeConfig


class RotaryEmbedding:
    """The angles of one model's positions."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self.attention_factor = rope.attention_factor

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) integer positions -> cos and sin, each (T, 1, D/2) float32."""
        angles = (positions.unsqueeze(-1).float() * self.inv_freq).unsqueeze(1)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each of the D/2 pairs, (D/2,) float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq)
    if rope.rope_type == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return inv_freq


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Stretch long waves in full, short ones not at all, and those between by degrees (Llama 3.1's own code)."""
    num_turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = (num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(rope: RopeConfig, inv_freq: Tensor, head_dim: int) -> Tensor:
    """Stretch by degrees between two dimensions, found by their turns over the original context (arXiv 2309.00071)."""

    def dimension_of(num_turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretched * inv_freq / rope.factor + (1 - stretched) * inv_freq
