"""Llama (SmolLM2, Llama 2 and 3.x) and Mistral: the plain decoder; Llama may have biases, Mistral a sliding window."""

from __future__ import annotations

from workers.models.architecture import Architecture, attention_bias, mlp_bias

LLAMA = Architecture(
    name="LlamaForCausalLM",
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    has_qkv_bias=attention_bias,
    has_output_bias=attention_bias,
    has_mlp_bias=mlp_bias,
)

MISTRAL = Architecture(
    name="MistralForCausalLM",
    defaults={"max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 4096},
    uses_sliding_window=lambda raw: raw.get("sliding_window") is not None,
)
