"""Checkpoints, and what transformers generates from them greedily in float32: the oracle of the end-to-end tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.e2e.prompts import PROMPTS

TRIVIA = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
"""Answers each of `questions()` word for word; any other word means a wrong engine."""

NUM_TOKENS = 64
VOCAB_SIZE = 257  # the bytes of a prompt are its tokens; prime, so that no number of ranks divides it

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": None}),
    "llama": (
        "Llama",
        {"rope_parameters": _LLAMA3_ROPE, "hidden_size": 60, "num_attention_heads": 10, "num_key_value_heads": 5},
    ),
}
"""Head counts that two, three or four ranks share unevenly."""


@dataclass(frozen=True)
class Greedy:
    """What transformers' generate makes of one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logits: torch.Tensor
    """(NUM_TOKENS, V) float32, from which each token was chosen."""


def save_random(path: Path, kind: str) -> Path:
    """Save a small random checkpoint of a kind in KINDS, in the folder `path`."""
    import transformers

    family, settings = KINDS[kind]
    merged = {name: value for name, value in {**_SIZES, **settings}.items() if (name, value) != ("head_dim", None)}
    torch.manual_seed(2)
    config = getattr(transformers, f"{family}Config")(**merged)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # transformers starts with zeros and ones, which hide errors
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def prompts_as_bytes() -> list[list[int]]:
    """The prompts for models that have no tokenizer."""
    return [list(prompt.encode()) for prompt in PROMPTS]


def generate_greedily(path: Path, prompts: list[list[int]]) -> list[Greedy]:
    """Run transformers' generate on one prompt at a time, since padding changes the arithmetic."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    torch.set_num_threads(1)  # small matrices are faster so, and the engines want the cores
    results = []
    for prompt in prompts:
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = generated.sequences[0, len(prompt) :].tolist()
        results.append(Greedy(prompt, ids, torch.cat(generated.logits)))
    return results


def smallest_gap(references: list[Greedy]) -> float:
    """The smallest distance between the best and the second-best logit over all tokens."""
    return min(float(-each.logits.topk(2).values.diff().max()) for each in references)


def first_difference(got: list[int], reference: Greedy) -> str | None:
    """None if the ids are those of the reference; else where they part, with the logits that say how near a tie is."""
    if got == reference.token_ids:
        return None
    pairs = zip(got, reference.token_ids, strict=False)
    index = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(got), NUM_TOKENS))
    best = reference.logits[index].topk(3) if index < NUM_TOKENS else None
    return f"{len(got)} tokens; the first that differs is number {index}; the best logits there: {best}"


def questions() -> list[tuple[str, str]]:
    """(question, answer) pairs that the trivia model knows."""
    return [(each["question"], each["answer"]) for each in json.loads((TRIVIA / "questions.json").read_text())]
