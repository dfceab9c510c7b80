"""What `raytp bench` asks of the engine: token ids and lengths, the same in every run and on every machine.

Pure functions of a seed. Called by `raytp.bench.plan`; `raytp.bench.measure` runs the cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_LATENCY_BATCHES = (1, 8, 64, 256)
_LATENCY_TOKENS_IN, _LATENCY_TOKENS_OUT = 128, 129
_SHARED_TOKENS, _OWN_TOKENS = 2000, 100
_SHARED_PREFIX_TOKENS_OUT = 32
_PREFILL_TOKENS = 2048
_LARGEST_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests that are handed to the engine together and timed together."""

    prompts: list[list[int]]
    output_lens: list[int]
    """Tokens to generate, for each prompt."""
    num_shared_tokens: int = 0
    """Tokens at the start of every prompt that all of them have in common."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens in."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens out."""
        return sum(self.output_lens)

    @property
    def longest_sequence(self) -> int:
        """Tokens in and out of the longest request."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))


def make_cases(workload: str, num_prompts: int | None, vocab_size: int) -> list[Case]:
    """The cases of one of `WORKLOADS`. `num_prompts` makes it smaller, or for latency limits the batch size."""
    return WORKLOADS[workload](num_prompts, min(_LARGEST_TOKEN_ID, vocab_size - 1))


def _throughput(num_prompts: int | None, largest_id: int) -> list[Case]:
    """nano-vLLM's bench.py, its calls of `randint` in its order."""
    rng = random.Random(0)
    num_seqs = num_prompts or 256
    prompts = [[rng.randint(0, largest_id) for _ in range(rng.randint(100, 1024))] for _ in range(num_seqs)]
    return [Case(prompts=prompts, output_lens=[rng.randint(100, 1024) for _ in range(num_seqs)])]


def _latency(num_prompts: int | None, largest_id: int) -> list[Case]:
    rng = random.Random(0)
    return [
        Case(
            prompts=[_token_ids(rng, _LATENCY_TOKENS_IN, largest_id) for _ in range(batch)],
            output_lens=[_LATENCY_TOKENS_OUT] * batch,
        )
        for batch in _LATENCY_BATCHES
        if num_prompts is None or batch <= num_prompts
    ]


def _shared_prefix(num_prompts: int | None, largest_id: int) -> list[Case]:
    rng = random.Random(0)
    num_seqs = num_prompts or 256
    shared = _token_ids(rng, _SHARED_TOKENS, largest_id)
    prompts = [shared + _token_ids(rng, _OWN_TOKENS, largest_id) for _ in range(num_seqs)]
    lengths = [_SHARED_PREFIX_TOKENS_OUT] * num_seqs
    return [Case(prompts=prompts, output_lens=lengths, num_shared_tokens=_SHARED_TOKENS)]


def _prefill(num_prompts: int | None, largest_id: int) -> list[Case]:
    rng = random.Random(0)
    num_seqs = num_prompts or 64
    prompts = [_token_ids(rng, _PREFILL_TOKENS, largest_id) for _ in range(num_seqs)]
    return [Case(prompts=prompts, output_lens=[1] * num_seqs)]


def _token_ids(rng: random.Random, num_tokens: int, largest_id: int) -> list[int]:
    return [rng.randint(0, largest_id) for _ in range(num_tokens)]


WORKLOADS: dict[str, Callable[[int | None, int], list[Case]]] = {
    "throughput": _throughput,
    "latency": _latency,
    "shared-prefix": _shared_prefix,
    "prefill": _prefill,
}


def make_steady_decode(vocab_size: int) -> Case:
    """The throughput workload at its mean, 131 sequences of about 840 tokens, for as long as a profile takes."""
    rng = random.Random(0)
    largest_id = min(_LARGEST_TOKEN_ID, vocab_size - 1)
    return Case(prompts=[_token_ids(rng, 640, largest_id) for _ in range(131)], output_lens=[800] * 131)
