"""`raytp generate`: one prompt is streamed, many are answered in order. Called by `raytp.cli.main`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import typer

from raytp.cli import console
from raytp.cli.engine import EngineOptions, stream_answer, summary
from raytp.llm import LLM
from raytp.outputs import RequestOutput
from raytp.prompts import encode_conversation, encode_prompt, has_chat_template
from scheduler.errors import RequestError
from scheduler.sampling_params import SamplingParams


def read_prompts(prompt: str | None, file: Path | None, is_by_line: bool) -> list[str]:
    """The prompts, from the argument, a file or standard input; a single newline at the end is not part of one.

    Raises RequestError if there is none, or if it is empty.
    """
    if file is not None:
        text, source = _read_file(file), str(file)
    elif prompt is None or prompt == "-":
        text, source = sys.stdin.read(), "standard input"
    else:
        text, source = prompt, "the argument"
    # Not splitlines(), which also splits at form feeds and at Unicode's own separators.
    prompts = [line for line in text.split("\n") if line] if is_by_line else [text.removesuffix("\n")]
    if not any(prompts):
        raise RequestError(f"the prompt is empty: {source} must hold some text")
    return prompts


def run(
    prompts: list[str],
    sampling: SamplingParams,
    options: EngineOptions,
    *,
    use_chat: bool | None,
    system: str | None,
    as_json: bool,
) -> None:
    """Start an engine, answer and print. `use_chat` None: if the model has a chat template."""
    console.keep_results_apart()
    with options.start() as llm:
        if use_chat is None:
            use_chat = has_chat_template(llm.tokenizer)
        if system is not None and not use_chat:
            raise RequestError("--system needs a chat template: leave it out, or put it into the prompt")
        if len(prompts) == 1 and not as_json:
            _stream(llm, prompts[0], system, sampling, use_chat, options.quiet)
        else:
            _answer_all(llm, prompts, system, sampling, use_chat, options.quiet, as_json)


def _stream(
    llm: LLM, prompt: str, system: str | None, sampling: SamplingParams, use_chat: bool, is_quiet: bool
) -> None:
    if use_chat:
        ids = encode_conversation(_conversation(prompt, system), llm.tokenizer, {})
    else:
        ids = encode_prompt(prompt, llm.tokenizer, llm.model_config.vocab_size)
    answer = stream_answer(llm, ids, sampling, console.write)
    console.write("\n")
    if not is_quiet:
        console.print_note(answer.summary())


def _answer_all(
    llm: LLM,
    prompts: list[str],
    system: str | None,
    sampling: SamplingParams,
    use_chat: bool,
    is_quiet: bool,
    as_json: bool,
) -> None:
    start = time.monotonic()
    if use_chat:
        outputs = llm.chat([_conversation(prompt, system) for prompt in prompts], sampling)
    else:
        outputs = llm.generate(prompts, sampling)
    seconds = time.monotonic() - start
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        if as_json:
            console.write(json.dumps(_as_dict(prompt, output)) + "\n")
        elif output.error is None:
            console.write(output.text + "\n")
        if output.error is not None:
            where = f"prompt {number}: " if len(prompts) > 1 else ""
            console.print_error(RequestError(where + output.error))
    if not is_quiet:
        console.print_note(_summary(outputs, seconds))
    if any(output.error is not None for output in outputs):
        raise typer.Exit(1)


def _summary(outputs: list[RequestOutput], seconds: float) -> str:
    return summary(
        sum(len(output.token_ids) for output in outputs),
        seconds,
        sum(output.num_prompt_tokens for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        outputs[0].finish_reason if len(outputs) == 1 else "",
    )


def _as_dict(prompt: str, output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.outputs[0].stop_reason,
        "error": output.error,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "num_tokens": len(output.token_ids),
        "first_token_s": output.timings.first_token_s,
        "finished_s": output.timings.finished_s,
    }


def _conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}") from None
