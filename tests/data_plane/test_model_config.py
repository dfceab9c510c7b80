"""What config.json and generation_config.json may say, and what is refused with the value's name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data_plane.conftest import Checkpoint
from workers.errors import ModelNotFoundError, UnsupportedModelError
from workers.model_config import (
    ModelConfig,
    kv_bytes_per_token,
    load_generation_config,
    load_model_config,
    num_parameters,
)

_SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}


def _load(folder: Path, architecture: str, generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **_SIZES, **fields}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(folder)


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "union"),
    [(5, None, (5,)), ([5, 6], 7, (5, 6, 7)), (None, [3, 5], (3, 5)), (5, [5], (5,)), (None, None, ()), (0, 2, (0, 2))],
)
def test_eos_is_the_union(config_eos: Any, generation_eos: Any, union: tuple[int, ...], tmp_path: Path) -> None:
    config = _load(tmp_path, "Qwen3ForCausalLM", {"eos_token_id": generation_eos}, eos_token_id=config_eos)
    assert config.eos_token_ids == union


def test_generation_config_is_optional_and_null_means_unset(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": null, "do_sample": false}')
    assert load_generation_config(tmp_path) == {"temperature": 0.6, "do_sample": False}


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"])
def test_head_dim_and_kv_heads_follow_from_the_others(architecture: str, tmp_path: Path) -> None:
    config = _load(tmp_path, architecture, sliding_window=None)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("GPT2LMHeadModel", {}, "GPT2LMHeadModel.*supported: Qwen3ForCausalLM"),
        ("MistralForCausalLM", {"sliding_window": 512}, "sliding_window=512"),
        ("MistralForCausalLM", {"max_position_embeddings": 8192}, "sliding_window=4096"),  # transformers' default
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 3}, "=512"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 512}, "=512"),
        ("Qwen3ForCausalLM", {"layer_types": ["linear_attention"]}, "linear_attention"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'"),
        ("LlamaForCausalLM", {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ("LlamaForCausalLM", {"vocab_size": None}, "vocab_size is None"),
        ("LlamaForCausalLM", {"hidden_size": "64"}, "hidden_size is '64'"),
    ],
)
def test_what_is_not_supported_is_named(architecture: str, fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        _load(tmp_path, architecture, **fields)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": 1024}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 0}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 4}),
    ],
)
def test_a_window_that_never_closes_is_none(architecture: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert _load(tmp_path, architecture, **fields).architecture == architecture


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="not valid JSON"):
        load_model_config(tmp_path)


def test_num_parameters_equals_transformers(checkpoints: dict[str, Checkpoint]) -> None:
    from transformers import AutoModelForCausalLM

    for checkpoint in checkpoints.values():
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint.path).num_parameters()
        assert num_parameters(load_model_config(checkpoint.path)) == theirs


def test_kv_bytes_per_token(tmp_path: Path) -> None:
    # Keys and values of 4 layers, 3 heads of 16, 2 bytes each.
    assert kv_bytes_per_token(_load(tmp_path, "LlamaForCausalLM"), num_kv_heads=3, dtype_bytes=2) == 2 * 4 * 3 * 16 * 2


def test_the_control_plane_reads_it_without_torch() -> None:
    code = "import sys, workers.model_config, workers.shard_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
