"""One bad request among many fails alone, with an error that names the value and the limit."""

from __future__ import annotations

from typing import Any

import pytest

from raytp import LLM, RequestError, SamplingParams
from tests.e2e.checkpoints import TRIVIA, questions
from tests.e2e.conftest import EngineCache

_VOCAB_SIZE = 2048
_POOL = {"block_size": 16, "num_kv_blocks": 10}
_NUM_POOL_TOKENS = 160
_MAX_MODEL_LEN = 200
_IDS = [5, 6, 7]

_BAD_PROMPTS: list[tuple[Any, list[str]]] = [
    ("", ["empty string"]),
    ([], ["empty list"]),
    ([5] * 250, ["250 tokens", "max_model_len=200"]),
    ([5] * 170, ["170 tokens", "160", "10 blocks of 16"]),
    ([5, _VOCAB_SIZE], ["2048", "0 to 2047"]),
    ([-1, 5], ["-1", "0 to 2047"]),
    ([2**31], ["2147483648", "0 to 2047"]),
    ([2**64], ["18446744073709551616", "0 to 2047"]),
    ([10**5000], ["0 to 2047"]),
    ([5, 2.5], ["2.5", "integers"]),
    ([5, None], ["None", "integers"]),
    ([5, "a"], ["'a'", "integers"]),
    ([True, 5], ["True", "integers"]),
    ("half a pair \ud800", ["character 12", "surrogate"]),
    (None, ["NoneType"]),
    (5, ["int"]),
    (b"bytes", ["bytes"]),
    ({"prompt": "a"}, ["dict"]),
]

_BAD_PARAMS: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_tokens": 0}, ["max_tokens=0", "between 1 and"]),
    ({"max_tokens": -3}, ["max_tokens=-3", "between 1 and"]),
    ({"max_tokens": 1.5}, ["max_tokens=1.5", "integer"]),
    ({"temperature": float("nan")}, ["temperature=nan", "at least 0"]),
    ({"temperature": -0.5}, ["temperature=-0.5", "at least 0"]),
    ({"temperature": float("inf")}, ["temperature=inf"]),
    ({"top_p": 0}, ["top_p=0", "above 0 and at most 1"]),
    ({"top_k": -1}, ["top_k=-1", "between 0"]),
    ({"seed": -1}, ["seed=-1", "between 0"]),
    ({"n": 0}, ["n=0", "between 1 and 1024"]),
    ({"logprobs": 101}, ["logprobs=101", "between 0 and 100"]),
    ({"stop": ""}, ["non-empty"]),
    ({"stop_token_ids": [_VOCAB_SIZE]}, ["2048", "0 to 2047"]),
    ({"stop_token_ids": [-1]}, ["-1"]),
    ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens=9", "max_tokens=8"]),
]


@pytest.fixture
def llm(engines: EngineCache) -> LLM:
    """An engine whose pool is smaller than its longest sequence."""
    return engines.get(TRIVIA, max_model_len=_MAX_MODEL_LEN, **_POOL)


@pytest.fixture
def good(llm: LLM) -> list[tuple[list[int], str]]:
    """(prompt, answer) of what the model knows."""
    known = questions()[:40]
    outputs = llm.chat([[{"role": "user", "content": q}] for q, _ in known], SamplingParams(max_tokens=1))
    return [(output.prompt_token_ids, answer) for output, (_, answer) in zip(outputs, known, strict=True)]


def _interleave(bad: list[Any], good: list[Any]) -> list[Any]:
    return [each for pair in zip(bad, good, strict=False) for each in pair]


def test_bad_prompts_among_good_ones(llm: LLM, good: list[tuple[list[int], str]]) -> None:
    prompts = _interleave([prompt for prompt, _ in _BAD_PROMPTS], [prompt for prompt, _ in good])
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60))
    assert len(outputs) == len(prompts)
    assert [output.text for output in outputs[1::2]] == [answer for _, answer in good[: len(_BAD_PROMPTS)]]
    for output, (_, fragments) in zip(outputs[::2], _BAD_PROMPTS, strict=True):
        assert (output.finish_reason, output.token_ids, output.text) == ("error", [], "")
        assert output.error is not None
        assert [fragment for fragment in fragments if fragment not in output.error] == [], output.error


def test_bad_sampling_among_good(llm: LLM, good: list[tuple[list[int], str]]) -> None:
    fine = SamplingParams(temperature=0, max_tokens=60)
    params = _interleave([SamplingParams(**fields) for fields, _ in _BAD_PARAMS], [fine] * len(good))
    prompts = _interleave([prompt for prompt, _ in good], [prompt for prompt, _ in good])[: len(params)]
    outputs = llm.generate(prompts, params)
    assert [output.text for output in outputs[1::2]] == [answer for _, answer in good[: len(_BAD_PARAMS)]]
    for output, (_, fragments) in zip(outputs[::2], _BAD_PARAMS, strict=True):
        assert output.finish_reason == "error"
        assert output.error is not None
        assert [fragment for fragment in fragments if fragment not in output.error] == [], output.error


def test_bad_chats_among_good_ones(llm: LLM) -> None:
    question, answer = questions()[0]
    fine = [{"role": "user", "content": question}]
    bad: list[Any] = [[], [{"role": "user"}], [{"role": "user", "content": "\udfff"}], ["hello"]]
    outputs = llm.chat([fine, *bad, fine], SamplingParams(temperature=0, max_tokens=60))
    assert [output.finish_reason for output in outputs] == ["stop", "error", "error", "error", "error", "stop"]
    assert {outputs[0].text, outputs[-1].text} == {answer}


@pytest.mark.parametrize("fields", [fields for fields, _ in _BAD_PARAMS if "stop_token_ids" not in fields])
def test_bad_sampling_for_all_prompts_raises(fields: dict[str, Any], llm: LLM) -> None:
    bad = SamplingParams(**fields)
    if "min_tokens" in fields:  # depends on the checkpoint's defaults, so each request says so for itself
        assert {output.finish_reason for output in llm.generate([_IDS, _IDS], bad)} == {"error"}
        return
    with pytest.raises(RequestError, match=next(iter(fields))):
        llm.generate([_IDS, _IDS], bad)


@pytest.mark.parametrize("salt", ["\ud800", None, 5])
def test_bad_cache_salt_raises(salt: Any, llm: LLM) -> None:
    with pytest.raises(RequestError, match="cache_salt"):
        llm.generate([_IDS], cache_salt=salt)
    with pytest.raises(RequestError, match="cache_salt"):
        llm.stream(_IDS, cache_salt=salt)


@pytest.mark.parametrize("prompt", ["", [], [_VOCAB_SIZE], "\ud800"])
def test_bad_stream_raises_at_once(prompt: Any, llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.stream(prompt)


def test_stream_of_a_refused_prompt_ends_with_its_error(llm: LLM) -> None:
    chunks = list(llm.stream([5] * 170))
    assert [chunk.finish_reason for chunk in chunks] == ["error"]
    assert chunks[0].error is not None
    assert "170 tokens" in chunks[0].error


def test_sequence_that_outgrows_a_pool_of_two_blocks(engines: EngineCache) -> None:
    """It has the pool to itself at the end, fails alone, and those that waited for it are served."""
    llm = engines.get(TRIVIA, block_size=16, num_kv_blocks=2, max_model_len=512)
    known = [(question, answer) for question, answer in questions() if len(question) + len(answer) < 40][:6]
    assert len(known) == 6
    conversations = [[{"role": "user", "content": question}] for question, _ in known]
    fine = SamplingParams(temperature=0, max_tokens=60)
    endless = fine.replace(ignore_eos=True)
    outputs = llm.chat(conversations, [endless, fine, fine, endless, fine, fine])
    for index, (output, (_, answer)) in enumerate(zip(outputs, known, strict=True)):
        if index in (0, 3):
            assert output.finish_reason == "error"
            assert output.error is not None
            assert "32 (2 blocks of 16)" in output.error
            assert output.num_prompt_tokens + len(output.token_ids) >= 32
        else:
            assert (output.text, output.finish_reason) == (answer, "stop")
