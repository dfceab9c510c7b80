"""`LLM`, the front door: an engine, of one's own or a shared one, and generation with it.

Tokenizes, submits, gathers, detokenizes. A request's first hop; the next is `raytp.request_stream`. The engine comes
from `raytp.connection`. Must not know of blocks, ranks or frames.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from raytp.collector import RequestCollector, aborted
from raytp.config import make_engine_config
from raytp.connection import Connection, connect_engine, start_engine
from raytp.errors import EngineError, RequestError
from raytp.outputs import EngineInfo, Recovery, RequestOutput
from raytp.progress import ProgressBar
from raytp.prompts import (
    Conversation,
    Prompt,
    as_conversation_list,
    as_prompt_list,
    encode_conversation,
    encode_prompt,
)
from raytp.request_stream import Job, Key, OutputStream, RequestStream, RunningCalls
from scheduler.errors import shown
from scheduler.sampling_params import MAX_SEED, ResolvedSampling, SamplingParams, fit_to_model, resolve, validate
from scheduler.step import IntArray
from scheduler.updates import SchedulerStats
from workers.config import DeviceProfile

_MIN_WINDOW = 1024
"""Requests of one call that may be on their way at once, at least."""


class LLM:
    """A model, ready to generate. Starts (or joins) Ray, places one worker on each rank, loads the weights.

    Arguments:
        model: a Hugging Face folder, a .gguf file, or a hub name; None is the small default model.
        tensor_parallel_size: ranks, one GPU each, that share the model.
        show_progress: progress bars on standard error; None shows them on a terminal.
        options: the other fields of `raytp.config.EngineConfig`, by name.

    Raises RaytpError: see `raytp.errors`. Use it as a context manager, or call `shutdown`. `connect` gives an LLM whose
    engine runs already.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        tensor_parallel_size: int = 1,
        *,
        show_progress: bool | None = None,
        **options: Any,
    ) -> None:
        config = make_engine_config(tensor_parallel_size, options)
        with ProgressBar("finding the model", show_progress) as bar:
            self._attach(start_engine(model, config, bar.update), show_progress)

    @classmethod
    def connect(cls, name: str, *, show_progress: bool | None = None) -> LLM:
        """Use the engine that `raytp serve-engine NAME` keeps in the cluster, from any job, beside others.

        The cluster is that of this process's Ray, of RAY_ADDRESS, or the one that runs on this machine. The engine goes
        on after `shutdown`, which ends only what this LLM has running. Raises EngineNotFoundError if there is none of
        that name, EngineError if it is not ready.
        """
        with ProgressBar("finding the cluster", show_progress) as bar:
            connection = connect_engine(name, bar.update)
        return cls.of(connection, show_progress=show_progress)

    @classmethod
    def of(cls, connection: Connection, *, show_progress: bool | None = None) -> LLM:
        """An engine that `raytp.connection` has started or found."""
        llm = cls.__new__(cls)
        llm._attach(connection, show_progress)
        return llm

    def _attach(self, connection: Connection, show_progress: bool | None) -> None:
        self._show_progress = show_progress
        self._driver = connection.driver
        self._calls = RunningCalls()
        self.info: EngineInfo = connection.info
        self.model_name = connection.model_name
        self.model_config = connection.model_config
        self._generation_config = connection.generation_config
        self.tokenizer = connection.tokenizer

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete one prompt or many (text or token ids); outputs stand in the order of the prompts.

        A prompt that cannot be served gets an output with finish_reason "error"; the others are not touched.
        `sampling_params`: one for all prompts (invalid values raise RequestError) or one for each (invalid values fail
        that prompt alone). Prompts share cached prefixes only with those of the same `cache_salt`.
        Raises EngineError if the engine ends.
        """
        prompt_list = as_prompt_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompt_list]

        def encode(index: int) -> IntArray:
            return encode_prompt(prompt_list[index], self.tokenizer, self.model_config.vocab_size)

        return self._run(texts, encode, self._params_for(len(texts), sampling_params), cache_salt)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of {"role": ..., "content": ...}, by the model's own template.

        `template_kwargs` go to the template (`enable_thinking=False`, say). Otherwise as `generate`.
        """
        conversations = as_conversation_list(messages)
        texts = [None] * len(conversations)

        def encode(index: int) -> IntArray:
            return encode_conversation(conversations[index], self.tokenizer, template_kwargs)

        return self._run(texts, encode, self._params_for(len(texts), sampling_params), cache_salt)

    def complete(
        self, jobs: Iterable[tuple[Key, Prompt | Conversation, SamplingParams | None] | None], *, cache_salt: str = ""
    ) -> Generator[tuple[Key, RequestOutput] | None, None, None]:
        """Answer (key, prompt or conversation, sampling) one after another, and yield (key, output) as each finishes.

        `jobs` is read as there is room for more; if it has none now, but may have later, it gives None. What is yielded
        is None where nothing has finished for a second. A request that cannot be served gets an output with
        finish_reason "error". Closing the iterator ends what is on its way. Raises EngineError if the engine ends.
        """

        def collector(request: Any, params: SamplingParams | None) -> RequestCollector:
            if isinstance(request, (list, tuple)) and request and isinstance(request[0], Mapping):
                text, ids = None, encode_conversation(request, self.tokenizer, {})
            else:
                text = request if isinstance(request, str) else None
                ids = encode_prompt(request, self.tokenizer, self.model_config.vocab_size)
            return RequestCollector(text, ids, self._resolve(params), self.tokenizer, is_stream=False)

        prepared = (
            None
            if job is None
            else Job(job[0], job[1] if isinstance(job[1], str) else None, partial(collector, *job[1:]))
            for job in jobs
        )
        return self._new_stream(cache_salt).outputs(prepared)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> OutputStream:
        """Complete one prompt, piece by piece; its `abort`, or closing it, ends the request.

        Raises RequestError and EngineError.
        """
        sampling = self._resolve(sampling_params)
        ids = encode_prompt(prompt, self.tokenizer, self.model_config.vocab_size)
        return self._stream(prompt if isinstance(prompt, str) else None, ids, sampling, cache_salt)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        **template_kwargs: Any,
    ) -> OutputStream:
        """Answer one conversation, piece by piece; see `chat` and `stream`."""
        sampling = self._resolve(sampling_params)
        return self._stream(None, encode_conversation(messages, self.tokenizer, template_kwargs), sampling, cache_salt)

    def __reduce__(self) -> NoReturn:
        raise EngineError(
            "an LLM cannot be sent to another process: make one there, or start an engine to share with raytp "
            "serve-engine NAME and use LLM.connect(NAME)"
        )

    def abort(self, key: Any) -> None:
        """End what other threads wait for: requests of `complete` by their key, of `generate` and `chat` by the index.

        They come at once, with the tokens so far and the finish_reason "abort". Unknown keys are ignored. Streams have
        an `abort` of their own.
        """
        for call in self._calls.all():
            call.abort(key)

    def abort_all(self) -> None:
        """End all requests of this LLM, whatever thread waits for them; see `abort`. Other users' go on."""
        for call in self._calls.all():
            call.abort_all()

    def stats(self, timeout_s: float = 60.0) -> SchedulerStats:
        """What the scheduler has done so far, and its load. EngineError if a step takes longer than `timeout_s`."""
        return self._driver.stats(timeout_s)

    def step_loop_cpu_s(self, timeout_s: float = 60.0) -> float:
        """CPU time that the driver's step loop has taken so far, in seconds; divide by `stats().num_steps`."""
        return self._driver.step_loop_cpu_s(timeout_s)

    def is_recovering(self) -> bool:
        """Whether the ranks have died, and others are being started in their place."""
        return self._driver.is_recovering()

    def recoveries(self) -> list[Recovery]:
        """Each time that ranks have died and others took their place; what had happened, and how long it took."""
        return self._driver.recoveries()

    def profile(self, duration_s: float) -> list[DeviceProfile | None]:
        """What each rank's GPU does in the next `duration_s`, while requests of other threads run; None on a CPU."""
        return self._driver.profile(duration_s)

    def shutdown(self) -> None:
        """End the engine: its ranks, its placement group, its driver. A shared one goes on. May be called twice."""
        self._driver.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _resolve(self, params: SamplingParams | None) -> ResolvedSampling:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={shown(params)} must be a SamplingParams")
        eos = tuple(i for i in self.model_config.eos_token_ids if i < self.model_config.vocab_size)
        resolved = resolve(params, self._generation_config, eos, secrets.randbelow(MAX_SEED))
        if resolved.stop and self.tokenizer is None:
            raise RequestError("stop strings need text, and the model has no tokenizer: use stop_token_ids")
        return fit_to_model(resolved, self.model_config.vocab_size, self.info.max_model_len)

    def _params_for(
        self, num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            validate(params := params or SamplingParams())
            return [params] * num_prompts
        if not isinstance(params, (list, tuple)) or not all(isinstance(each, SamplingParams) for each in params):
            raise RequestError(f"sampling_params={shown(params)} must be one SamplingParams or a list of them")
        if len(params) != num_prompts:
            raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts: give one, or one for each")
        return params

    def _run(
        self,
        texts: Sequence[str | None],
        encode: Callable[[int], IntArray],
        params: Sequence[SamplingParams],
        cache_salt: str,
    ) -> list[RequestOutput]:
        """Keep the engine's queue full until every request has its output. `encode` gives a request's token ids."""

        def prepare(index: int) -> RequestCollector:
            ids, sampling = encode(index), self._resolve(params[index])
            return RequestCollector(texts[index], ids, sampling, self.tokenizer, is_stream=False)

        num_requests = len(texts)
        outputs: list[RequestOutput | None] = [None] * num_requests
        num_done = 0
        jobs = (Job(index, texts[index], partial(prepare, index)) for index in range(num_requests))
        with (
            ProgressBar("generating", self._show_progress) as bar,
            closing(self._new_stream(cache_salt).outputs(jobs)) as finished,
        ):
            for item in finished:
                if item is not None:
                    outputs[item[0]] = item[1]
                    num_done += 1
                bar.update(f"generating {num_done}/{num_requests}", num_done / num_requests)
        return [aborted(text) if output is None else output for text, output in zip(texts, outputs, strict=True)]

    def _new_stream(self, cache_salt: str) -> RequestStream:
        call = RequestStream(self._driver, cache_salt, window=max(_MIN_WINDOW, 4 * self.info.max_num_seqs))
        self._calls.add(call)
        return call

    def _stream(self, text: str | None, ids: IntArray, sampling: ResolvedSampling, cache_salt: str) -> OutputStream:
        """Refuses what it must before the first piece is asked for."""
        if sampling.n != 1:
            raise RequestError(f"n={sampling.n}: a stream has one completion; use generate() for more")
        collector = RequestCollector(text, ids, sampling, self.tokenizer, is_stream=True)
        return OutputStream(self._new_stream(cache_salt), collector)
