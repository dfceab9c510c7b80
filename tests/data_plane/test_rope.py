"""Rotary frequencies and their scaling factor equal transformers', for both ways of writing a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.errors import UnsupportedModelError
from workers.kernels.reference_ops import apply_rotary
from workers.layers.rotary import RotaryEmbedding, inverse_frequencies
from workers.model_config import RopeConfig, load_model_config

_MAX_POSITIONS = 4096
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1_000_000.0},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    {"rope_type": "llama3", "rope_theta": 500_000.0, **_LLAMA3},
    {"rope_type": "llama3", "rope_theta": 10_000.0, **_LLAMA3, "high_freq_factor": 32.0},
    {"rope_type": "yarn", "rope_theta": 1_000_000.0, **_YARN},
    {"rope_type": "yarn", "rope_theta": 10_000.0, **_YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "rope_theta": 10_000.0, **_YARN, "attention_factor": 0.7},
    {"rope_type": "yarn", "rope_theta": 10_000.0, **_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    {"rope_type": "yarn", "rope_theta": 150_000.0, **_YARN, "truncate": False},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 1.0, "original_max_position_embeddings": _MAX_POSITIONS},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0},
]


def _config(head_dim: int, **rope_fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": _MAX_POSITIONS,
        **rope_fields,
    }


def _load_rope(folder: Path, config: dict[str, Any]) -> RopeConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder).rope


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("given", ROPES, ids=lambda given: given["rope_type"])
def test_equals_transformers(given: dict[str, Any], head_dim: int, tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            max_position_embeddings=_MAX_POSITIONS,
            rope_parameters=dict(given),
        )
    )
    rope = _load_rope(tmp_path, _config(head_dim, rope_parameters=given))
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), theirs.inv_freq, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)

    positions = torch.tensor([0, 1, 511, 4095, 100_000])
    cos, sin = RotaryEmbedding(rope, head_dim, torch.device("cpu")).cos_sin(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions.unsqueeze(0))
    # An angle of 1e5 radians carries its frequency's last bit as 1e-2.
    torch.testing.assert_close(cos[:, 0], their_cos[0, :, : head_dim // 2], rtol=0, atol=2e-2)
    torch.testing.assert_close(sin[:4, 0], their_sin[0, :4, : head_dim // 2], rtol=0, atol=1e-3)


@pytest.mark.parametrize("given", ROPES, ids=lambda given: given["rope_type"])
def test_the_old_form_means_the_same(given: dict[str, Any], tmp_path: Path) -> None:
    """rope_theta beside rope_scaling, whose type may be called `type` and be missing."""
    new = _load_rope(tmp_path, _config(64, rope_parameters=given))
    scaling = {name: value for name, value in given.items() if name not in ("rope_type", "rope_theta")}
    scaling["type"] = given["rope_type"]
    is_default = given["rope_type"] == "default"
    old = _config(64, rope_theta=given["rope_theta"], rope_scaling=None if is_default else scaling)
    assert _load_rope(tmp_path, old) == new


def test_without_any_field_theta_is_ten_thousand(tmp_path: Path) -> None:
    assert _load_rope(tmp_path, _config(64)) == RopeConfig(rope_type="default", theta=10_000.0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one for each layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        _load_rope(tmp_path, _config(64, **fields))


def test_rotation_depends_on_distance_alone() -> None:
    """The property that the embedding exists for: <R_m q, R_n k> is a function of m - n."""
    rotary = RotaryEmbedding(RopeConfig(rope_type="default", theta=10_000.0), 64, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def score(q_position: int, k_position: int) -> float:
        turned = [apply_rotary(x, *rotary.cos_sin(torch.tensor([at]))) for x, at in ((q, q_position), (k, k_position))]
        return float((turned[0] * turned[1]).sum())

    assert score(17, 5) == pytest.approx(score(112, 100), abs=1e-3)
    assert score(17, 5) != pytest.approx(score(17, 6), abs=1e-3)
