"""Qwen3 (dense), the reference architecture: RMS norm on each head of q and k, a head size of its own."""

from __future__ import annotations

from workers.models.architecture import Architecture, attention_bias
from workers.models.qwen2 import uses_sliding_window

QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    defaults={"head_dim": 128, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    qk_norm=True,
    has_qkv_bias=attention_bias,
    has_output_bias=attention_bias,
    uses_sliding_window=uses_sliding_window,
)
