"""Whatever is handed to the public interface: an answer, or an error of raytp's own, and the engine goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from typer.testing import CliRunner

from raytp import LLM, SamplingParams
from raytp.cli import app
from raytp.config import EngineConfig, make_engine_config
from raytp.errors import ConfigError, RaytpError, RequestError
from tests.e2e.checkpoints import TRIVIA, questions
from tests.e2e.conftest import EngineCache

_VOCAB_SIZE = 2048
_FINISH_REASONS = {"stop", "length", "error"}
_MAX_ERROR_CHARS = 2000


def fuzz(max_examples: int) -> settings:
    """So many examples, however long each takes."""
    return settings(max_examples=max_examples, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))


numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, True, False, 2**31, 2**63, 2**64, -(2**70), 10**400, -(10**400)]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 5e-324, 1e-40, 1e308, 0.5, 1.0, 1e-8]),
    st.integers(-3, 130),
    st.floats(),
    st.sampled_from([np.float32(0.5), np.float64("nan"), np.int64(3), np.int32(-1), np.bool_(True)]),
)
texts = st.one_of(st.text(max_size=12), st.sampled_from(["", "\ud800", "a\udfffb", "\0", "<|im_end|>", "x" * 3000]))
things = st.one_of(
    st.none(), numbers, texts, st.binary(max_size=5), st.just(object()), st.just(...), st.just(range(3)),
    st.sampled_from([np.array(5), np.array([1.5, 2.5]), np.zeros((2, 2), dtype=int), np.array([]), np.array(["a"])]),
)  # fmt: skip
anything = st.recursive(
    things,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
ids = st.lists(st.integers(0, _VOCAB_SIZE - 1), min_size=1, max_size=70)
prompts = st.one_of(ids, texts, anything, ids.map(np.array), st.lists(st.integers(-2, 2**33), max_size=5))
tokens = st.one_of(numbers, st.integers(0, _VOCAB_SIZE - 1))
params = st.builds(
    SamplingParams,
    temperature=st.none() | numbers,
    top_k=st.none() | numbers,
    top_p=st.none() | numbers,
    min_p=st.none() | numbers,
    repetition_penalty=st.none() | numbers,
    presence_penalty=st.none() | numbers,
    frequency_penalty=st.none() | numbers,
    seed=st.none() | numbers,
    max_tokens=st.none() | numbers,
    min_tokens=st.none() | numbers,
    stop=st.none() | texts | st.lists(texts, max_size=3) | anything,
    stop_token_ids=st.none() | st.lists(tokens, max_size=3) | anything,
    ignore_eos=st.booleans() | anything,
    logprobs=st.none() | numbers,
    n=st.just(1) | numbers.filter(lambda n: not (isinstance(n, int) and 3 < n <= 1024)),
)
legal_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 5e-324, 1e-40, 1e-30, 0.7, 1e30, 1e308, 10**300]) | st.floats(0, 1e308),
    top_k=st.none() | st.integers(0, 2**31 - 1) | st.integers(0, 5),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.none() | st.floats(0.01, 100),
    presence_penalty=st.none() | st.floats(-2, 2),
    frequency_penalty=st.none() | st.floats(-2, 2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    max_tokens=st.integers(1, 8) | st.just(2**31 - 1),
    min_tokens=st.none() | st.integers(0, 8),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=3), max_size=3) | st.just(["x" * 100_000] * 50),
    stop_token_ids=st.none()
    | st.lists(st.integers(0, _VOCAB_SIZE - 1), max_size=5)
    | st.just(list(range(_VOCAB_SIZE))),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 100),
    n=st.integers(1, 3),
)
ALL_BANNED = SamplingParams(stop_token_ids=list(range(_VOCAB_SIZE)), min_tokens=5, max_tokens=8)
GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture
def llm(engines: EngineCache) -> LLM:
    """One engine for the module: none of its answers can be longer than 100 tokens."""
    return engines.get(TRIVIA, max_model_len=100)


def assert_answers_as_before(llm: LLM) -> None:
    known = questions()[:4]
    outputs = llm.chat([[{"role": "user", "content": question}] for question, _ in known], GREEDY)
    assert [output.text for output in outputs] == [answer for _, answer in known]


def assert_in_order(output: Any) -> None:
    """An answer, or an error that a person can read."""
    assert output.finish_reason in _FINISH_REASONS
    assert (output.error is None) == (output.finish_reason != "error")
    assert output.error is None or 0 < len(output.error) < _MAX_ERROR_CHARS
    assert all(0 <= token_id < _VOCAB_SIZE for token_id in output.token_ids)


@fuzz(30)
@given(pairs=st.lists(st.tuples(prompts, params | legal_params), min_size=1, max_size=12))
def test_bad_requests_among_good_ones(llm: LLM, pairs: list[tuple[Any, SamplingParams]]) -> None:
    """Each ends by itself, and the one that is known to be good has its answer."""
    question, answer = questions()[5]
    good = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    outputs = llm.generate([good, *(prompt for prompt, _ in pairs)], [GREEDY, *(each for _, each in pairs)])
    assert outputs[0].text == answer
    for output in outputs[1:]:
        for completion in output.outputs:
            assert_in_order(completion)


@fuzz(20)
@example(some=[ALL_BANNED, ALL_BANNED.replace(temperature=1.0, top_p=0.5), ALL_BANNED.replace(temperature=1.0)])
@given(some=st.lists(legal_params, min_size=1, max_size=8))
def test_what_is_legal_at_the_edges_is_answered(llm: LLM, some: list[SamplingParams]) -> None:
    fitting = [
        each.replace(min_tokens=None if each.min_tokens is None else min(each.min_tokens, each.max_tokens or 0))
        for each in some
    ]
    for output in llm.generate([[5, 6, 7]] * len(fitting), fitting):
        for completion in output.outputs:
            assert completion.error is None
            assert_in_order(completion)


def consume(call: Callable[[], Any]) -> None:
    """Let it answer or raise one of raytp's errors, which a person can read."""
    with contextlib.suppress(RaytpError):
        try:
            list(call())
        except RaytpError as error:
            assert 0 < len(str(error)) < _MAX_ERROR_CHARS, str(error)[:100]  # noqa: PT017
            raise


messages = st.one_of(
    anything,
    st.lists(st.fixed_dictionaries({"role": texts | anything, "content": texts | anything}), max_size=3),
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), anything), max_size=3),
)
template_kwargs = st.dictionaries(
    st.sampled_from(["enable_thinking", "tools", "documents", "chat_template", "tokenize", "continue_final_message"]),
    anything,
    max_size=2,
)


@fuzz(80)
@example(prompt=np.array(5), sampling=None, salt="", conversation=5, kwargs={})
@example(
    prompt="a", sampling=SamplingParams(ignore_eos=np.array([1, 2])), salt="", conversation=np.array([1, 2]), kwargs={}
)
@example(prompt="a", sampling=None, salt="", conversation=[{"role": "user", "content": "a"}], kwargs={"tools": 5})
@given(
    prompt=prompts,
    sampling=st.none() | params | legal_params | anything,
    salt=st.just("") | texts | anything,
    conversation=messages,
    kwargs=template_kwargs,
)
def test_every_method_answers_or_raises_an_error_of_raytp(
    llm: LLM, prompt: Any, sampling: Any, salt: Any, conversation: Any, kwargs: Any
) -> None:
    consume(lambda: llm.generate(prompt, sampling, cache_salt=salt))
    consume(lambda: llm.stream(prompt, sampling, cache_salt=salt))
    consume(lambda: llm.chat(conversation, sampling, cache_salt=salt, **kwargs))
    consume(lambda: llm.stream_chat(conversation, sampling, cache_salt=salt, **kwargs))
    consume(lambda: llm.complete([("key", prompt, sampling), None], cache_salt=salt))


UNPRINTABLE = 10**5000
"""Python does not turn it into text, not even for an error message."""


def test_what_cannot_be_printed_is_refused_in_words(llm: LLM) -> None:
    fields = [{name: UNPRINTABLE} for name in SamplingParams.__dataclass_fields__]
    some = [SamplingParams(**each) for each in (*fields, {"stop": [UNPRINTABLE]}, {"stop_token_ids": [[UNPRINTABLE]]})]
    for sampling in (UNPRINTABLE, [UNPRINTABLE], *some):
        for call in (llm.generate, llm.stream):
            with pytest.raises(RequestError):
                call("a", sampling)  # type: ignore[arg-type]
    assert_in_order(llm.generate([[5, UNPRINTABLE]])[0])
    assert_in_order(llm.generate([[5, [UNPRINTABLE]]])[0])
    with pytest.raises(RequestError, match="message 0"):
        llm.stream_chat([{"role": UNPRINTABLE}])
    with pytest.raises(RequestError, match="cache_salt"):
        llm.generate("a", cache_salt=UNPRINTABLE)  # type: ignore[arg-type]


def test_the_engine_answers_as_before(llm: LLM) -> None:
    """After all of the above."""
    assert_answers_as_before(llm)
    assert llm.recoveries() == []


@fuzz(300)
@given(
    options=st.dictionaries(st.sampled_from([*EngineConfig.__dataclass_fields__, "none such"]), anything, max_size=3)
)
def test_settings_are_taken_or_refused(options: dict[str, Any]) -> None:
    """Without starting anything. What is taken must be what the types say, since ranks rely on it."""
    with contextlib.suppress(ConfigError):
        config = make_engine_config(options.pop("tensor_parallel_size", 1), options)
        for name in ("enforce_eager", "enable_prefix_caching"):
            assert isinstance(getattr(config, name), bool)
        assert isinstance(config.faults, tuple)
        assert config.max_num_seqs < 2**31
        assert config.step_timeout_s < 2**31 / 1000, "sockets count milliseconds in 32 bits"


arguments = st.lists(
    st.one_of(
        st.sampled_from(["--max-tokens", "--temperature", "-t", "--memory", "--dtype", "--lines", "--json", "--stop"]),
        st.sampled_from(["--file", "--device", "--chat", "--workload", "--runs", "--nonsense", "-q", "--seed"]),
        st.sampled_from(["nan", "inf", "-1", "0", "1e400", "9" * 5000, "", "\ud800", "cpu", "float16", "/nowhere"]),
        st.text(st.characters(blacklist_characters="\0"), max_size=5),
    ),
    max_size=6,
)


@fuzz(80)
@given(command=st.sampled_from(["info", "generate", "chat", "bench", "batch"]), arguments=arguments)
def test_a_command_ends_by_itself_with_a_code(command: str, arguments: list[str]) -> None:
    """Its model does not exist, so that nothing is started."""
    where = {
        "info": ["/no/model"],
        "bench": ["/no/model"],
        "batch": ["/no/input", "/no/output", "--model", "/no/model"],
    }
    given_model = where.get(
        command, ["a prompt", "--model", "/no/model"] if command == "generate" else ["-m", "/no/model"]
    )
    result = CliRunner().invoke(app, [command, *given_model, *arguments])
    assert result.exit_code in (0, 1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
