"""`LLM`, the front door: one engine in this process's Ray, and generation with it.

Resolves the model, starts the driver actor, tokenizes, submits, gathers, detokenizes. A request's first hop; the next
is `raytp.driver_client`. Must not know of blocks, ranks or frames.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from raytp.collector import RequestCollector, refused
from raytp.config import EngineConfig
from raytp.driver_client import DriverClient
from raytp.errors import ConfigError, RaytpError, RequestError
from raytp.model_source import resolve_model
from raytp.outputs import EngineInfo, OutputChunk, Request, RequestOutput
from raytp.progress import ProgressBar
from raytp.prompts import (
    Conversation,
    Prompt,
    as_conversation_list,
    as_prompt_list,
    encode_conversation,
    encode_prompt,
)
from raytp.ray_runtime import cluster_has_gpus, ensure_ray
from raytp.tokenizer import Tokenizer
from scheduler.sampling_params import MAX_SEED, ResolvedSampling, SamplingParams, fit_to_model, resolve, validate
from scheduler.step import IntArray
from scheduler.updates import SchedulerStats
from workers.config import DeviceProfile, WorkerConfig
from workers.model_config import ModelConfig, load_generation_config, load_model_config
from workers.shard_plan import plan_shards

_POLL_S = 1.0
_PAUSE_S = 0.02
"""Between two polls of a batch: many small answers would cost the driver's step loop its time."""
_SUBMIT_CHUNK = 256

Job = tuple[str | None, IntArray, ResolvedSampling]
"""A request ready to go: prompt text, token ids, sampling."""


class LLM:
    """A model, ready to generate. Starts (or joins) Ray, places one worker on each rank, loads the weights.

    Arguments:
        model: a Hugging Face folder, a .gguf file, or a hub name; None is the small default model.
        tensor_parallel_size: ranks, one GPU each, that share the model.
        show_progress: progress bars on standard error; None shows them on a terminal.
        options: the other fields of `raytp.config.EngineConfig`, by name.

    Raises RaytpError: see `raytp.errors`. Use it as a context manager, or call `shutdown`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        tensor_parallel_size: int = 1,
        *,
        show_progress: bool | None = None,
        **options: Any,
    ) -> None:
        config = _engine_config(tensor_parallel_size, options)
        self._show_progress = show_progress
        with ProgressBar("finding the model", show_progress) as bar:
            source = resolve_model(model, on_progress=bar.update)
            self.model_name = source.name
            self.model_config = load_model_config(source.path)
            self._generation_config = load_generation_config(source.path)
            bar.update("starting Ray", 0.0)
            loading = _TokenizerThread(source.path)
            with _interrupt_deferred():
                ensure_ray(config.tensor_parallel_size)
            self.tokenizer = loading.result()
            worker_config = _worker_config(config, self.model_config, source.path, self.tokenizer)
            self._driver = DriverClient(config, worker_config, self.model_config.vocab_size)
            self.info: EngineInfo = self._driver.start(bar.update)

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
        params = self._params_for(len(prompt_list), sampling_params)

        def job(index: int) -> Job:
            prompt = prompt_list[index]
            ids = encode_prompt(prompt, self.tokenizer, self.model_config.vocab_size)
            return prompt if isinstance(prompt, str) else None, ids, self._resolve(params[index])

        return self._run(len(prompt_list), job, cache_salt)

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
        params = self._params_for(len(conversations), sampling_params)

        def job(index: int) -> Job:
            ids = encode_conversation(conversations[index], self.tokenizer, template_kwargs)
            return None, ids, self._resolve(params[index])

        return self._run(len(conversations), job, cache_salt)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Generator[OutputChunk, None, None]:
        """Complete one prompt, piece by piece; closing the iterator ends the request.

        Raises RequestError and EngineError.
        """
        sampling = self._resolve(sampling_params)
        ids = encode_prompt(prompt, self.tokenizer, self.model_config.vocab_size)
        return self._stream((prompt if isinstance(prompt, str) else None, ids, sampling), cache_salt)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        **template_kwargs: Any,
    ) -> Generator[OutputChunk, None, None]:
        """Answer one conversation, piece by piece; see `chat` and `stream`."""
        sampling = self._resolve(sampling_params)
        return self._stream(
            (None, encode_conversation(messages, self.tokenizer, template_kwargs), sampling), cache_salt
        )

    def stats(self) -> SchedulerStats:
        """What the scheduler has done so far, and its load."""
        return self._driver.stats()

    def step_loop_cpu_s(self) -> float:
        """CPU time that the driver's step loop has taken so far, in seconds; divide by `stats().num_steps`."""
        return self._driver.step_loop_cpu_s()

    def profile(self, duration_s: float) -> list[DeviceProfile | None]:
        """What each rank's GPU does in the next `duration_s`, while requests of other threads run; None on a CPU."""
        return self._driver.profile(duration_s)

    def shutdown(self) -> None:
        """End the engine: its ranks, its placement group, its driver. May be called twice."""
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
            raise RequestError(f"sampling_params={params!r} must be a SamplingParams")
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
            raise RequestError(f"sampling_params={params!r} must be one SamplingParams or a list of them")
        if len(params) != num_prompts:
            raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts: give one, or one for each")
        return params

    def _collector(self, job: Job, is_stream: bool) -> RequestCollector:
        return RequestCollector(*job, self.tokenizer, is_stream=is_stream)

    def _run(self, num_requests: int, job: Any, cache_salt: str) -> list[RequestOutput]:
        """Keep the engine's queue full until every request has its output."""
        _check_salt(cache_salt)
        batch = _Batch(self._driver, num_requests, cache_salt, window=max(1024, 4 * self.info.max_num_seqs))
        try:
            with ProgressBar("generating", self._show_progress) as bar:
                while not batch.is_done:
                    while batch.has_room:
                        self._submit_chunk(batch, job)
                    batch.collect()
                    bar.update(f"generating {batch.num_done}/{num_requests}", batch.num_done / max(1, num_requests))
        finally:
            self._driver.forget(batch.client_id)
        return batch.outputs()

    def _submit_chunk(self, batch: _Batch, job: Any) -> None:
        requests = []
        for index in batch.next_indices():
            prompt = None
            try:
                prepared = job(index)
                prompt = prepared[0]
                requests.append(batch.open(index, self._collector(prepared, is_stream=False)))
            except RequestError as error:
                batch.refuse(index, refused(prompt, str(error)))
        if requests:
            self._driver.submit(batch.client_id, requests)

    def _stream(self, job: Job, cache_salt: str) -> Generator[OutputChunk, None, None]:
        _check_salt(cache_salt)
        if job[2].n != 1:
            raise RequestError(f"n={job[2].n}: a stream has one completion; use generate() for more")
        return self._stream_chunks(job, cache_salt)

    def _stream_chunks(self, job: Job, cache_salt: str) -> Generator[OutputChunk, None, None]:
        collector = self._collector(job, is_stream=True)
        batch = _Batch(self._driver, 1, cache_salt, window=1)
        try:
            self._driver.submit(batch.client_id, [batch.open(0, collector)])
            while not collector.is_finished:
                for update in self._driver.poll(batch.client_id, _POLL_S):
                    chunk, _ = collector.take(update)
                    yield chunk
        finally:
            self._driver.forget(batch.client_id)


class _Batch:
    """The requests of one call: which are still to be sent, which are on their way, which have come back."""

    def __init__(self, driver: DriverClient, num_requests: int, cache_salt: str, window: int) -> None:
        self.client_id = uuid.uuid4().hex
        self._driver = driver
        self._cache_salt = cache_salt
        self._window = window
        self._next = 0
        self._open: dict[int, RequestCollector] = {}
        self._outputs: list[RequestOutput | None] = [None] * num_requests

    @property
    def num_done(self) -> int:
        return self._next - len(self._open)

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self._outputs)

    @property
    def has_room(self) -> bool:
        return self._next < len(self._outputs) and len(self._open) < self._window

    def next_indices(self) -> range:
        first, self._next = self._next, min(self._next + _SUBMIT_CHUNK, len(self._outputs))
        return range(first, self._next)

    def open(self, index: int, collector: RequestCollector) -> Request:
        self._open[index] = collector
        return Request(
            request_id=index,
            prompt=collector.prompt_token_ids,
            sampling=collector.sampling,
            cache_salt=self._cache_salt,
            wants_every_token=collector.wants_every_token,
        )

    def refuse(self, index: int, output: RequestOutput) -> None:
        self._outputs[index] = output

    def collect(self) -> None:
        """Take in what has come back; waits for some."""
        if not self._open:
            return
        for update in self._driver.poll(self.client_id, _POLL_S):
            collector = self._open.get(update.request_id)
            if collector is None:
                continue
            _, is_early = collector.take(update)
            if is_early:
                self._driver.abort(self.client_id, update.request_id, update.index, "stop")
            if collector.is_finished:
                self._outputs[update.request_id] = self._open.pop(update.request_id).output()
        if self._open:
            time.sleep(_PAUSE_S)

    def outputs(self) -> list[RequestOutput]:
        return [output for output in self._outputs if output is not None]


class _TokenizerThread:
    """Loads the tokenizer, which takes seconds of imports, while Ray starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer: Tokenizer | None = None
        self._error: RaytpError | None = None
        self._thread = threading.Thread(target=self._load, name="raytp-tokenizer", daemon=True)
        self._thread.start()

    def result(self) -> Tokenizer | None:
        """The tokenizer; None if the model came without one."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._tokenizer

    def _load(self) -> None:
        if not any(self._path.glob("tokenizer*")):
            return
        try:
            self._tokenizer = Tokenizer.load(self._path)
        except RaytpError as error:
            self._error = error


def _check_salt(cache_salt: str) -> None:
    """It is hashed as UTF-8. Raises RequestError."""
    try:
        cache_salt.encode()
    except (AttributeError, UnicodeEncodeError):
        raise RequestError(f"cache_salt={cache_salt!r} must be a str without surrogates") from None


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block.

    Starting Ray forks. Python loses an interrupt that arrives in its fork hooks, and keeps the lock of `logging`, which
    one of them holds, for ever: whoever logs or imports next hangs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts go to the main thread alone
        return
    arrived = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: arrived.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived.is_set():
        raise KeyboardInterrupt


def _engine_config(tensor_parallel_size: int, options: dict[str, Any]) -> EngineConfig:
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"{name} is no setting of an engine; the settings are {', '.join(known)}")
    return EngineConfig(tensor_parallel_size=tensor_parallel_size, **options)


def _worker_config(config: EngineConfig, model: ModelConfig, path: Path, tokenizer: Tokenizer | None) -> WorkerConfig:
    """Everything that was left to a default is decided here."""
    device = config.device
    if device == "auto":
        device = "cuda" if cluster_has_gpus() else "cpu"
    dtype = config.dtype
    if dtype == "auto":
        dtype = model.dtype if device == "cuda" else "float32"
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {model.max_position_embeddings} positions of the model"
        )
    # The ranks plan their shards by the same function; here it says early what cannot be split.
    plan_shards(
        num_q_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        world_size=config.tensor_parallel_size,
    )
    return WorkerConfig(
        model_path=str(path),
        world_size=config.tensor_parallel_size,
        device=device,
        dtype=dtype,
        load_format=config.load_format,
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        memory_fraction=config.memory_fraction,
        cpu_kv_cache_bytes=int(config.cpu_kv_cache_gib * 2**30),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or (8192 if device == "cuda" else 512),
        max_model_len=max_model_len,
        num_valid_tokens=None if tokenizer is None else tokenizer.vocab_size,
        num_threads=max(1, ((os.cpu_count() or 1) - 1) // config.tensor_parallel_size),  # one core for the driver
        timeout_s=config.startup_timeout_s,
    )
