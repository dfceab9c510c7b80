"""GGUF files of small random models, written as llama.cpp's converter does. Called by the tests of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

TINY = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 2048}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def tiny_vocabulary() -> dict[str, Any]:
    return json.loads((TINY / "tokenizer.json").read_text())["model"]


class FileBuilder:
    """Writes GGUF files as llama.cpp's converter does, from random transformers models."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.path = path
        self.architecture = architecture
        self.writer = gguf.GGUFWriter(path, architecture)

    def add_config(self, config: Any) -> None:
        writer = self.writer
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if getattr(config, "head_dim", None):
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)

    def add_tokenizer(self, *, pre: str = "gpt-2", add_bos: bool | None = None, num_unused: int = 0) -> None:
        vocabulary = tiny_vocabulary()
        tokens = [*sorted(vocabulary["vocab"], key=vocabulary["vocab"].get), *(f"[PAD{i}]" for i in range(num_unused))]
        types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 2045 + [gguf.TokenType.UNUSED] * num_unused
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre(pre)
        self.writer.add_token_list(tokens)
        self.writer.add_token_types(types)
        self.writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
        self.writer.add_bos_token_id(1)
        self.writer.add_eos_token_id(2)
        self.writer.add_eot_token_id(0)
        if add_bos is not None:
            self.writer.add_add_bos_token(add_bos)

    def add_weights(self, model: PreTrainedModel) -> None:
        config = model.config
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], config.num_hidden_layers)
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = tensor.numpy()
            if self.architecture == "llama" and ".q_proj." in name:
                values = interleave_rotary_halves(values, config.num_attention_heads)
            if self.architecture == "llama" and ".k_proj." in name:
                values = interleave_rotary_halves(values, config.num_key_value_heads)
            self.writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)

    def write(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


def interleave_rotary_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def random_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # biases and norms too, which start as zeros and ones
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def rope(**parameters: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6} | parameters}


CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, **HEADS, **rope(), head_dim=32, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**SIZES, **HEADS, **rope(), head_dim=32, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, **HEADS, **rope(), tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, **HEADS, **rope(), tie_word_embeddings=True),
    "llama-head-size": LlamaConfig(**SIZES, **HEADS, **rope(), head_dim=24),
    "llama-biases": LlamaConfig(**SIZES, **HEADS, **rope(), attention_bias=True),
    "qwen2-linear": Qwen2Config(**SIZES, **HEADS, **rope(rope_type="linear", factor=4.0)),
    "qwen3-yarn": Qwen3Config(
        **SIZES, **HEADS, **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), head_dim=32
    ),
    "llama-llama3": LlamaConfig(
        **SIZES,
        **HEADS,
        max_position_embeddings=16384,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}
