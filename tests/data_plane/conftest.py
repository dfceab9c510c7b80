"""Small random checkpoints of every supported kind, and what transformers makes of them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any test imports one

_SIZES: dict[str, Any] = {
    "vocab_size": 211,  # prime: no world size divides it
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "qwen3-bias": ("Qwen3", {"attention_bias": True}),
    "qwen2": ("Qwen2", {"hidden_size": 72, "head_dim": None}),
    "llama-llama3": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "hidden_size": 54}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN_ROPE, "hidden_size": 54}),
    "llama-linear": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_size": 54,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "hidden_size": 54}),
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder as transformers saved it, and the logits that transformers computes from it in float32."""

    path: Path
    prompts: list[list[int]]
    logits: list[Tensor]
    """Of every token of each prompt, (len(prompt), V)."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices are faster so, and other processes of the test want the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", autouse=True)
def mended_interpreter() -> Iterator[None]:
    """Its scalars are arrays of one element, which numpy 2.4 no longer takes for the bounds of a range."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """One checkpoint of each kind in KINDS."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: _save(folder / kind, *KINDS[kind]) for kind in KINDS}


def _save(path: Path, family: str, settings: dict[str, Any]) -> Checkpoint:
    import transformers

    merged = {**_SIZES, "rope_parameters": _DEFAULT_ROPE, **settings}
    if merged["head_dim"] is None:
        del merged["head_dim"]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**merged)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # transformers starts with zeros and ones, which hide errors
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)
    generator = torch.Generator().manual_seed(1)
    lengths = (7, 40, 23, 64)
    prompts = [torch.randint(0, merged["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return Checkpoint(path, prompts, logits)
