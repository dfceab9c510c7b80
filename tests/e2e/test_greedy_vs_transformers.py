"""Greedy ids are those of transformers' generate, token for token, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytp import LLM, SamplingParams
from tests.e2e.checkpoints import KINDS, NUM_TOKENS, Greedy, first_difference, smallest_gap
from tests.e2e.conftest import EngineCache
from tests.e2e.prompts import PROMPTS

_GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
_TIE = 1e-4
"""Below this distance of two logits, float32 arithmetic in another order may choose the other one."""


def _assert_equal(llm: LLM, references: list[Greedy]) -> None:
    outputs = llm.generate([each.prompt_token_ids for each in references], _GREEDY)
    differences = [first_difference(out.token_ids, each) for out, each in zip(outputs, references, strict=True)]
    assert differences == [None] * len(references)
    assert {output.finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_smollm2(
    tensor_parallel_size: int, smollm2: Path, smollm2_references: list[Greedy], engines: EngineCache
) -> None:
    """9 query and 3 kv heads."""
    assert smallest_gap(smollm2_references) > _TIE
    llm = engines.get(smollm2, tensor_parallel_size, max_model_len=1024)
    assert llm.info.dtype == "float32"
    _assert_equal(llm, smollm2_references)


def test_prompts_as_text_are_tokenized_as_transformers_does(
    smollm2: Path, smollm2_references: list[Greedy], engines: EngineCache
) -> None:
    outputs = engines.get(smollm2, max_model_len=1024).generate(PROMPTS, SamplingParams(max_tokens=1))
    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.prompt_token_ids for output in outputs] == [each.prompt_token_ids for each in smollm2_references]


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_random_checkpoint(
    kind: str,
    tensor_parallel_size: int,
    random_checkpoints: dict[str, Path],
    random_references: dict[str, list[Greedy]],
    engines: EngineCache,
) -> None:
    references = random_references[kind]
    assert smallest_gap(references) > _TIE
    assert len({token_id for each in references for token_id in each.token_ids}) > 50  # no loop of a few tokens
    _assert_equal(engines.get(random_checkpoints[kind], tensor_parallel_size), references)
