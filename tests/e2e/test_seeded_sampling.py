"""Seeded sampling gives the same tokens whatever runs beside it, and extreme settings give the tokens they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytp import LLM, SamplingParams
from tests.e2e.checkpoints import NUM_TOKENS, VOCAB_SIZE, Greedy, prompts_as_bytes
from tests.e2e.conftest import EngineCache

_NUM_SAMPLED = 40
_PROMPTS = prompts_as_bytes()
_PARAMS = [
    SamplingParams(temperature=1.3, max_tokens=_NUM_SAMPLED, ignore_eos=True, seed=seed, top_p=top_p, top_k=top_k)
    for seed, (top_p, top_k) in enumerate([(1.0, 0), (0.9, 0), (1.0, 20), (0.8, 50)] * 2)
]


@pytest.fixture
def llm(random_checkpoints: dict[str, Path], engines: EngineCache) -> LLM:
    """One rank, everything at its default."""
    return engines.get(random_checkpoints["qwen3"])


_alone: list[list[int]] = []


@pytest.fixture
def alone(llm: LLM) -> list[list[int]]:
    """The tokens of each seeded request when nothing runs beside it."""
    if not _alone:
        _alone.extend(llm.generate([prompt], each)[0].token_ids for prompt, each in zip(_PROMPTS, _PARAMS, strict=True))
    return _alone


def test_seeds_matter(llm: LLM, alone: list[list[int]]) -> None:
    other = llm.generate(_PROMPTS, [params.replace(seed=100 + i) for i, params in enumerate(_PARAMS)])
    assert all(output.token_ids != ids for output, ids in zip(other, alone, strict=True))


def test_without_a_seed_each_run_differs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.3, max_tokens=_NUM_SAMPLED)
    runs = llm.generate([_PROMPTS[0]] * 4, params)
    assert len({tuple(output.token_ids) for output in runs}) == 4


def test_same_among_31_others(llm: LLM, alone: list[list[int]]) -> None:
    crowd = SamplingParams(temperature=1.0, max_tokens=_NUM_SAMPLED)
    for index, (prompt, params) in enumerate(zip(_PROMPTS, _PARAMS, strict=True)):
        others = [[(i * 37) % VOCAB_SIZE] * (1 + i) for i in range(31)]
        place = 4 * index
        prompts = [*others[:place], prompt, *others[place:]]
        all_params = [crowd] * 31
        all_params.insert(place, params)
        assert llm.generate(prompts, all_params)[place].token_ids == alone[index]


def test_same_in_another_order(llm: LLM, alone: list[list[int]]) -> None:
    outputs = llm.generate(_PROMPTS[::-1], _PARAMS[::-1])
    assert [output.token_ids for output in outputs[::-1]] == alone


def test_same_after_preemption(
    random_checkpoints: dict[str, Path], engines: EngineCache, alone: list[list[int]]
) -> None:
    longest = max(len(prompt) for prompt in _PROMPTS) + NUM_TOKENS
    llm = engines.get(
        random_checkpoints["qwen3"],
        block_size=4,
        num_kv_blocks=-(-longest // 4) + 1,
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
    )
    before = llm.stats().num_preemptions
    outputs = llm.generate(_PROMPTS * 3, _PARAMS * 3)
    assert llm.stats().num_preemptions - before > 5
    assert [output.token_ids for output in outputs] == alone * 3


def test_same_with_two_ranks(random_checkpoints: dict[str, Path], engines: EngineCache, alone: list[list[int]]) -> None:
    outputs = engines.get(random_checkpoints["qwen3"], 2).generate(_PROMPTS, _PARAMS)
    assert [output.token_ids for output in outputs] == alone


@pytest.mark.parametrize("fields", [{"temperature": 1.3, "top_p": 1e-9}, {"temperature": 1e-5}, {"top_k": 1}])
def test_extremes_that_leave_the_likeliest(
    fields: dict[str, Any], llm: LLM, random_references: dict[str, list[Greedy]]
) -> None:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": NUM_TOKENS, "seed": 3} | fields)
    outputs = llm.generate(_PROMPTS, params)
    assert [output.token_ids for output in outputs] == [each.token_ids for each in random_references["qwen3"]]


@pytest.mark.parametrize("fields", [{"top_p": 0.9999999}, {"top_k": 10 * VOCAB_SIZE}, {"min_p": 0.0}])
def test_extremes_that_leave_everything(fields: dict[str, Any], llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=_NUM_SAMPLED, seed=11)
    expected = [output.token_ids for output in llm.generate(_PROMPTS, params)]
    assert [output.token_ids for output in llm.generate(_PROMPTS, params.replace(**fields))] == expected


def test_completions_of_one_prompt(llm: LLM, alone: list[list[int]]) -> None:
    """The first is what n=1 gives; each has noise of its own; asked again, they are the same."""
    params = _PARAMS[0].replace(n=3)
    first, again = llm.generate([_PROMPTS[0]] * 2, params)
    assert [each.index for each in first.outputs] == [0, 1, 2]
    assert first.outputs[0].token_ids == alone[0]
    assert len({tuple(each.token_ids) for each in first.outputs}) == 3
    assert [each.token_ids for each in again.outputs] == [each.token_ids for each in first.outputs]
