"""From the command line's options to a running engine, and the answers it streams. Called by the commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from raytp.config import EngineConfig, check_shared_alone, make_engine_config
from raytp.connection import connect_engine, start_engine
from raytp.llm import LLM
from raytp.progress import ProgressBar
from raytp.ray_runtime import silence_ray
from scheduler.errors import RequestError
from scheduler.sampling_params import SamplingParams
from scheduler.step import IntArray


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of the group "Model and engine"; None leaves the choice to the engine."""

    model: str | None
    tensor_parallel_size: int
    device: str | None
    dtype: str | None
    max_model_len: int | None
    memory_fraction: float | None
    quiet: bool
    engine: str | None = None
    """A shared one: none of the others, then."""
    min_tensor_parallel_size: int | None = None

    def start(self) -> LLM:
        """The engine, ready. Raises RaytpError."""
        silence_ray()
        show_progress = False if self.quiet else None
        if self.engine is not None:
            check_shared_alone(self.engine, self.model, self.tensor_parallel_size, self._given())
            with ProgressBar("finding the cluster", show_progress, names_stages=True) as bar:
                connection = connect_engine(self.engine, bar.update)
        else:
            config = self.config()
            with ProgressBar("finding the model", show_progress, names_stages=True) as bar:
                connection = start_engine(self.model, config, bar.update)
        return LLM.of(connection, show_progress=show_progress)

    def config(self) -> EngineConfig:
        """The settings of an engine to be started. Raises ConfigError."""
        return make_engine_config(self.tensor_parallel_size, self._given())

    def _given(self) -> dict[str, Any]:
        return {
            name: value
            for name in ("device", "dtype", "max_model_len", "memory_fraction", "min_tensor_parallel_size")
            if (value := getattr(self, name)) is not None
        }


@dataclass(slots=True)
class Answer:
    """What has been streamed, and its numbers."""

    num_prompt_tokens: int
    text: str = ""
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str = "abort"
    seconds: float = 0.0

    def summary(self) -> str:
        """The closing line."""
        return summary(
            self.num_tokens, self.seconds, self.num_prompt_tokens, self.num_cached_tokens, self.finish_reason
        )


def summary(num_tokens: int, seconds: float, num_prompt_tokens: int, num_cached_tokens: int, finish_reason: str) -> str:
    """Numbers of one answer, or of many together, in one line."""
    rate = num_tokens / seconds if seconds > 0 else 0.0
    text = f"{num_tokens} tokens in {seconds:.2f} s, {rate:.1f} tok/s; {num_prompt_tokens} prompt tokens"
    text += f", {num_cached_tokens} cached"
    remark = {"length": "cut off by --max-tokens or the context length", "abort": "stopped"}.get(finish_reason)
    return f"{text}; {remark}" if remark else text


def stream_answer(
    llm: LLM,
    prompt: IntArray,
    sampling: SamplingParams,
    on_text: Callable[[str], None],
    *,
    is_interruptible: bool = False,
) -> Answer:
    """Hand each piece of the answer to `on_text`. An interrupt ends an interruptible answer, not the program.

    Raises RequestError if the engine cannot serve it.
    """
    start = time.monotonic()
    answer = Answer(num_prompt_tokens=len(prompt))
    try:
        with closing(llm.stream(prompt.tolist(), sampling)) as chunks:
            for chunk in chunks:
                if chunk.error is not None:
                    raise RequestError(chunk.error)
                answer.text += chunk.text
                answer.num_tokens += len(chunk.token_ids)
                answer.num_cached_tokens = max(answer.num_cached_tokens, chunk.num_cached_tokens)
                answer.finish_reason = chunk.finish_reason or answer.finish_reason
                on_text(chunk.text)
    except KeyboardInterrupt:
        if not is_interruptible:
            raise
    answer.seconds = time.monotonic() - start
    return answer
