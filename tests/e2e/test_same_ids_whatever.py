"""Greedy ids do not depend on how the engine is set up, nor on what else runs; shared prefixes are computed once."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raytp import LLM, SamplingParams
from tests.e2e.checkpoints import NUM_TOKENS, TRIVIA, Greedy, first_difference, questions
from tests.e2e.conftest import EngineCache

_QUESTIONS = questions()[::2]
_GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
_NUM_COPIES = 3

_ROOMY: dict[str, dict[str, Any]] = {
    "blocks-of-1-budget-of-7": {"block_size": 1, "max_num_batched_tokens": 7, "max_num_seqs": 3},
    "blocks-of-3-no-cache": {"block_size": 3, "max_num_seqs": 16, "enable_prefix_caching": False},
    "blocks-of-256-one-big-step": {"block_size": 256, "max_num_batched_tokens": 8192},
    "ray-transport-one-at-a-time": {"transport": "ray", "max_num_seqs": 1, "max_num_batched_tokens": 32},
}
_CROWDED: dict[str, dict[str, Any]] = {
    "no-cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
    "ray-transport-two-ranks": {"transport": "ray", "tensor_parallel_size": 2},
}


def _ask_trivia(llm: LLM, seed: int = 0) -> None:
    """Ask in an order of its own; every answer is right."""
    asked = random.Random(seed).sample(_QUESTIONS, len(_QUESTIONS))
    outputs = llm.chat([[{"role": "user", "content": question}] for question, _ in asked], _GREEDY)
    answers = [(question, output.text) for (question, _), output in zip(asked, outputs, strict=True)]
    assert answers == asked


def _generate_random(llm: LLM, references: list[Greedy], seed: int = 0) -> None:
    """Complete each prompt several times, in an order of its own; every token is that of transformers."""
    asked = random.Random(seed).sample(references * _NUM_COPIES, len(references) * _NUM_COPIES)
    outputs = llm.generate([each.prompt_token_ids for each in asked], _GREEDY)
    differences = [first_difference(output.token_ids, each) for output, each in zip(outputs, asked, strict=True)]
    assert differences == [None] * len(asked)


@pytest.mark.parametrize("variant", _ROOMY)
def test_trivia(variant: str, engines: EngineCache) -> None:
    _ask_trivia(engines.get(TRIVIA, **_ROOMY[variant]), seed=len(variant))


@pytest.mark.parametrize("variant", _ROOMY)
def test_random_checkpoint(
    variant: str, random_checkpoints: dict[str, Path], random_references: dict[str, list[Greedy]], engines: EngineCache
) -> None:
    llm = engines.get(random_checkpoints["qwen3"], **_ROOMY[variant])
    _generate_random(llm, random_references["qwen3"], seed=len(variant))


@pytest.mark.parametrize("variant", _CROWDED)
def test_trivia_with_many_preemptions(variant: str, engines: EngineCache) -> None:
    llm = engines.get(TRIVIA, block_size=1, num_kv_blocks=70, max_num_seqs=32, **_CROWDED[variant])
    _ask_trivia(llm)
    assert llm.stats().num_preemptions > 5


@pytest.mark.parametrize("variant", _CROWDED)
def test_random_checkpoint_with_many_preemptions(
    variant: str, random_checkpoints: dict[str, Path], random_references: dict[str, list[Greedy]], engines: EngineCache
) -> None:
    longest = max(len(each.prompt_token_ids) for each in random_references["qwen3"]) + NUM_TOKENS
    llm = engines.get(
        random_checkpoints["qwen3"], block_size=4, num_kv_blocks=-(-longest // 4) + 1, **_CROWDED[variant]
    )
    _generate_random(llm, random_references["qwen3"])
    assert llm.stats().num_preemptions > 5


def test_order_of_arrival(engines: EngineCache) -> None:
    """Callers come one after another, while those before them are being served."""
    llm = engines.get(TRIVIA)
    are_right: list[bool] = []

    def ask(seed: int) -> None:
        time.sleep(0.05 * seed)
        for question, answer in random.Random(seed).sample(_QUESTIONS, 6):
            output = llm.chat([{"role": "user", "content": question}], _GREEDY)[0]
            are_right.append(output.text == answer)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert are_right == [True] * 8 * 6


@pytest.mark.parametrize("num_tokens", [95, 96, 97, 100])
def test_identical_prompts_compute_their_prefix_once(num_tokens: int, engines: EngineCache) -> None:
    """Together, each but the first computes only what is after the last full block, and at least one token."""
    llm = engines.get(TRIVIA)
    num_prompts, max_tokens = 8, 5
    prompt = [(7 * i + num_tokens) % 2000 + 3 for i in range(num_tokens)]
    num_shared = (num_tokens - 1) // llm.info.block_size * llm.info.block_size
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    before = llm.stats()
    first = llm.generate([prompt] * num_prompts, params)
    between = llm.stats()
    again = llm.generate([prompt] * num_prompts, params)
    after = llm.stats()
    num_decoded = num_prompts * (max_tokens - 1)  # the last token of each is never computed
    num_own = num_tokens - num_shared
    computed = between.num_computed_tokens - before.num_computed_tokens
    assert computed == num_tokens + (num_prompts - 1) * num_own + num_decoded
    assert after.num_computed_tokens - between.num_computed_tokens == num_prompts * num_own + num_decoded
    assert [output.num_cached_tokens for output in first] == [0] + [num_shared] * (num_prompts - 1)
    assert [output.num_cached_tokens for output in again] == [num_shared] * num_prompts
    assert after.num_cached_tokens - between.num_cached_tokens == num_prompts * num_shared
    assert {tuple(output.token_ids) for output in first + again} == {tuple(first[0].token_ids)}


def test_completions_of_one_prompt_share_it(engines: EngineCache) -> None:
    llm = engines.get(TRIVIA)
    before = llm.stats().num_computed_tokens
    llm.generate([list(range(3, 53))], SamplingParams(n=4, max_tokens=1), cache_salt="n=4")
    assert llm.stats().num_computed_tokens - before == 50 + 3 * 2


def test_prompts_of_another_salt_share_nothing(engines: EngineCache) -> None:
    llm = engines.get(TRIVIA)
    prompt, params = list(range(100, 164)), SamplingParams(max_tokens=1)
    cached = [llm.generate([prompt], params, cache_salt=salt)[0].num_cached_tokens for salt in ("a", "b", "a", "")]
    assert cached == [0, 0, 48, 0]


def test_without_prefix_cache_everything_is_computed(engines: EngineCache) -> None:
    llm = engines.get(TRIVIA, **_ROOMY["blocks-of-3-no-cache"])
    before = llm.stats().num_computed_tokens
    outputs = llm.generate([list(range(3, 53))] * 4, SamplingParams(max_tokens=1))
    assert llm.stats().num_computed_tokens - before == 4 * 50
    assert {output.num_cached_tokens for output in outputs} == {0}
