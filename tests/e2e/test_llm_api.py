"""What `LLM` promises its callers, on engines with real processes."""

from __future__ import annotations

import _thread
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytp import LLM, RequestError, SamplingParams
from raytp.errors import ConfigError
from tests.e2e.checkpoints import TRIVIA, Greedy, prompts_as_bytes, questions
from tests.e2e.conftest import EngineCache

_GREEDY = SamplingParams(temperature=0, max_tokens=60)
_ENDLESS = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)
_IM_END = 2
_LONG_ANSWERS = [(question, answer) for question, answer in questions() if answer.count(" ") >= 4]


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _prompt(question: str) -> str:
    """As the model's chat template writes it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def llm(engines: EngineCache) -> LLM:
    """The trivia model, everything at its default."""
    return engines.get(TRIVIA)


def test_one_or_many_as_text_or_ids(llm: LLM) -> None:
    (first, first_answer), (second, second_answer) = questions()[:2]
    ids = llm.generate(_prompt(first), _GREEDY)[0].prompt_token_ids
    as_text = llm.generate(_prompt(first), _GREEDY)
    prompts: list[Any] = [_prompt(second), ids, np.array(ids), tuple(ids)]
    many = llm.generate(prompts, [_GREEDY] * 4)
    assert [output.text for output in as_text] == [first_answer]
    assert as_text[0].prompt == _prompt(first)
    assert [output.text for output in many] == [second_answer] + [first_answer] * 3
    assert [output.prompt for output in many] == [_prompt(second), None, None, None]
    assert [output.text for output in llm.generate(ids, _GREEDY)] == [first_answer]
    assert [output.text for output in llm.chat(_user(first), _GREEDY)] == [first_answer]
    assert llm.generate([]) == []
    assert many[1].num_prompt_tokens == len(ids)
    assert 0 < many[0].timings.first_token_s <= many[0].timings.finished_s


def test_wrong_number_of_params(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [_GREEDY] * 2)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], 0.5, "greedy"])
def test_params_of_another_type(params: Any, llm: LLM) -> None:
    with pytest.raises(RequestError, match="must be one SamplingParams or a list of them"):
        llm.generate(["a"], params)
    with pytest.raises(RequestError, match="must be a SamplingParams"):
        llm.stream("a", params)


def test_generator_of_3000_short_prompts(llm: LLM) -> None:
    """Far more than the engine runs at once, or the caller has on its way."""
    prompts = [[3 + i % 7, 5, 3 + i // 7] for i in range(3000)]
    outputs = llm.generate((prompt for prompt in prompts), SamplingParams(max_tokens=2, ignore_eos=True))
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert {len(output.token_ids) for output in outputs} == {2}
    for index in (0, 1234, 2999):
        alone = llm.generate(prompts[index], SamplingParams(max_tokens=2, ignore_eos=True))
        assert alone[0].token_ids == outputs[index].token_ids


def test_stop_strings(llm: LLM) -> None:
    """The text ends before the string, the tokens with the one that completed it; the request is ended early."""
    question, answer = _LONG_ANSWERS[0]
    stop = answer[len(answer) // 2 :][:4]
    before = llm.stats().num_computed_tokens
    output = llm.chat(_user(question), _ENDLESS.replace(stop=["never said", stop]))[0]
    assert output.text == answer[: answer.index(stop)]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert stop in llm.tokenizer.decode(output.token_ids)  # type: ignore[union-attr]
    assert stop not in llm.tokenizer.decode(output.token_ids[:-1])  # type: ignore[union-attr]
    llm.generate([[5]], _GREEDY.replace(max_tokens=1))  # comes after the abort
    assert llm.stats().num_computed_tokens - before < output.num_prompt_tokens + 449


def test_stop_token_ids_and_eos(llm: LLM) -> None:
    question, answer = _LONG_ANSWERS[0]
    whole = llm.chat(_user(question), _GREEDY)[0]
    stop_id = whole.token_ids[2]
    stopped = llm.chat(_user(question), _GREEDY.replace(stop_token_ids=[stop_id]))[0]
    endless = llm.chat(_user(question), _GREEDY.replace(ignore_eos=True))[0]
    late = llm.chat(_user(question), _GREEDY.replace(min_tokens=len(whole.token_ids) + 5))[0]
    assert (whole.text, whole.finish_reason, whole.outputs[0].stop_reason) == (answer, "stop", _IM_END)
    assert whole.token_ids[-1] == _IM_END
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop_id) + 1]
    assert (stopped.finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop_id)
    assert (endless.finish_reason, len(endless.token_ids)) == ("length", 60)
    assert endless.token_ids[: len(whole.token_ids)] == whole.token_ids
    assert len(late.token_ids) >= len(whole.token_ids) + 5
    assert _IM_END not in late.token_ids[: len(whole.token_ids) + 4]


def test_logprobs_are_those_of_transformers(
    random_checkpoints: dict[str, Path], random_references: dict[str, list[Greedy]], engines: EngineCache
) -> None:
    references = random_references["qwen3"]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=5)
    llm = engines.get(random_checkpoints["qwen3"])
    for output, reference in zip(llm.generate(prompts_as_bytes(), params), references, strict=True):
        expected = torch.log_softmax(reference.logits[:20], dim=-1)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert len(logprobs) == 20
        chosen = expected[torch.arange(20), torch.tensor(output.token_ids)]
        top = expected.topk(5)
        torch.testing.assert_close(torch.tensor([each.chosen for each in logprobs]), chosen, rtol=1e-3, atol=1e-3)
        assert [each.top_ids.tolist() for each in logprobs] == top.indices.tolist()
        got = torch.tensor(np.stack([each.top for each in logprobs]))
        torch.testing.assert_close(got, top.values, rtol=1e-3, atol=1e-3)
    assert llm.generate([[5]], params.replace(logprobs=None))[0].outputs[0].logprobs is None
    only_chosen = llm.generate([[5]], params.replace(logprobs=0, max_tokens=1))[0].outputs[0].logprobs
    assert only_chosen is not None
    assert len(only_chosen[0].top_ids) == 0


def test_logprobs_do_not_depend_on_what_others_ask_for(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=n) for n in (0, 1, 20)]
    for output, num_top in zip(llm.generate([[5, 6]] * 3, params), (0, 1, 20), strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert [len(each.top_ids) for each in logprobs] == [num_top] * 4


def test_n_completions(llm: LLM) -> None:
    output = llm.chat(_user(questions()[0][0]), _GREEDY.replace(n=3))[0]
    assert [(each.index, each.text) for each in output.outputs] == [(i, questions()[0][1]) for i in range(3)]


def test_stream_joins_to_the_text(llm: LLM) -> None:
    for question, answer in _LONG_ANSWERS[:3]:
        chunks = list(llm.stream_chat(_user(question), _GREEDY))
        whole = llm.generate(_prompt(question), _GREEDY)[0]
        assert "".join(chunk.text for chunk in chunks) == answer == whole.text
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == whole.token_ids
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert len(chunks) > 1
    stop = answer[5:8]
    stopped = list(llm.stream(_prompt(question), _ENDLESS.replace(stop=stop)))
    assert "".join(chunk.text for chunk in stopped) == answer[: answer.index(stop)]
    assert stopped[-1].finish_reason == "stop"


def test_closing_a_stream_ends_the_request(llm: LLM) -> None:
    """The `engines` fixture sees to it that all blocks are free again."""
    before = llm.stats().num_computed_tokens
    stream = llm.stream([5, 6, 7], _ENDLESS)
    next(stream)
    stream.close()
    llm.generate([[5]], _GREEDY.replace(max_tokens=1))
    assert llm.stats().num_computed_tokens - before < 450


def test_stream_refuses_several_completions(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n=2"):
        llm.stream("a", SamplingParams(n=2))


def test_several_threads_at_once(llm: LLM) -> None:
    answers: dict[int, list[str]] = {}

    def ask(index: int) -> None:
        asked = questions()[index * 10 : index * 10 + 10]
        outputs = llm.chat([_user(question) for question, _ in asked], _GREEDY)
        answers[index] = [output.text for output in outputs]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: [answer for _, answer in questions()[i * 10 : i * 10 + 10]] for i in range(6)}


def test_keyboard_interrupt_leaves_the_engine_usable(llm: LLM) -> None:
    threading.Timer(0.7, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5 + i] for i in range(2000)], _ENDLESS)
    question, answer = questions()[0]
    assert llm.chat(_user(question), _GREEDY)[0].text == answer


def test_two_engines_in_one_process(llm: LLM, random_checkpoints: dict[str, Path], engines: EngineCache) -> None:
    other = engines.get(random_checkpoints["qwen3"])
    prompt, params = prompts_as_bytes()[0], SamplingParams(temperature=0, max_tokens=20)
    expected = other.generate(prompt, params)[0].token_ids
    question, answer = questions()[0]
    stream = llm.stream_chat(_user(question), _GREEDY)
    text = next(stream).text
    assert other.generate(prompt, params)[0].token_ids == expected
    assert text + "".join(chunk.text for chunk in stream) == answer


def test_text_without_a_tokenizer(random_checkpoints: dict[str, Path], engines: EngineCache) -> None:
    llm = engines.get(random_checkpoints["qwen3"])
    prompts: list[Any] = ["text", [5, 6]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3))
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    assert "no tokenizer" in str(outputs[0].error)
    assert [output.prompt for output in outputs] == ["text", None], "a refused request still says what it was"
    assert (outputs[1].text, len(outputs[1].token_ids)) == ("", 3)
    chunks = list(llm.stream([5, 6], SamplingParams(max_tokens=3)))
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == outputs[1].token_ids
    stop = llm.generate([[5, 6]], SamplingParams(max_tokens=3, stop="x"))[0]
    assert (stop.finish_reason, "no tokenizer" in str(stop.error)) == ("error", True)


@pytest.fixture(scope="session")
def customised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trivia model with a tokenizer that puts a BOS before a text, a template that writes one too and takes an
    argument, and a generation_config with several EOS ids."""
    path = tmp_path_factory.mktemp("customised") / "model"
    path.mkdir()
    for file in TRIVIA.iterdir():
        shutil.copyfile(file, path / file.name)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"bos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{{ bos_token }}{% if shouting %}LOUD {% endif %}" + (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").write_text(template)
    generation = json.loads((path / "generation_config.json").read_text())
    generation |= {"eos_token_id": _EOS_IDS, "max_new_tokens": 7}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


_EOS_IDS = [_IM_END, 300, 1404]
"""1404 is the second token of "Richard Nixon"."""


def test_one_bos_never_two(customised: Path, engines: EngineCache) -> None:
    llm = engines.get(customised)
    chat = llm.chat(_user("Who?"))[0].prompt_token_ids
    text = llm.generate("Who?")[0].prompt_token_ids
    assert (chat[0], chat.count(0)) == (0, 1)
    assert (text[0], text.count(0)) == (0, 1)


def test_template_arguments(customised: Path, engines: EngineCache) -> None:
    llm = engines.get(customised)
    quiet, loud = (llm.chat(_user("Who?"), shouting=value)[0].prompt_token_ids for value in (False, True))
    assert llm.tokenizer.decode(loud) == "LOUD " + llm.tokenizer.decode(quiet)  # type: ignore[union-attr]


def test_every_eos_id_of_the_checkpoint_stops(customised: Path, engines: EngineCache) -> None:
    plain = engines.get(TRIVIA)
    question, _ = questions()[0]
    prompt = plain.generate(_prompt(question), _GREEDY)[0]
    assert prompt.token_ids[1:] == [1404, _IM_END]
    llm = engines.get(customised)
    stopped = llm.generate(prompt.prompt_token_ids, _GREEDY)[0]
    assert (stopped.token_ids, stopped.outputs[0].stop_reason) == (prompt.token_ids[:2], 1404)
    after = llm.generate(prompt.prompt_token_ids + prompt.token_ids[:2], _GREEDY)[0]
    assert (after.token_ids, after.outputs[0].stop_reason) == ([_IM_END], _IM_END)
    goes_on = llm.generate(prompt.prompt_token_ids, _GREEDY.replace(ignore_eos=True))[0]
    assert goes_on.token_ids[:3] == prompt.token_ids


def test_max_tokens_defaults(customised: Path, llm: LLM, engines: EngineCache) -> None:
    """The checkpoint's max_new_tokens; without one, 256."""
    params = SamplingParams(ignore_eos=True)
    assert len(engines.get(customised).generate([5, 6], params)[0].token_ids) == 7
    assert len(llm.generate([5, 6], params)[0].token_ids) == 256


def test_a_sequence_ends_at_max_model_len(llm: LLM) -> None:
    output = llm.generate([5] * 500, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_paralel_size": 2}, "tensor_paralel_size is no setting"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True"),
        ({"tensor_parallel_size": 9}, "tensor_parallel_size=9 .* 1 to 8 .*8 query heads"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 2.5}, "block_size=2.5"),
        ({"num_kv_blocks": -1}, "num_kv_blocks=-1"),
        ({"max_num_seqs": None}, "max_num_seqs=None"),
        ({"max_model_len": 513}, "max_model_len=513 .* 512"),
        ({"transport": "pigeon"}, "transport='pigeon' must be one of socket, ray"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"memory_fraction": 1.5}, "memory_fraction=1.5"),
        ({"step_timeout_s": float("nan")}, "step_timeout_s=nan"),
        ({"attention_backend": "flash_attn"}, "'flash_attn' cannot be used"),
    ],
)
def test_wrong_settings_raise(options: dict[str, Any], message: str, ray_session: None) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(TRIVIA, **options)
