"""What callers get back, and what travels between a caller and its driver actor. Plain values; no logic of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler.sampling_params import ResolvedSampling
from scheduler.step import IntArray
from scheduler.updates import SchedulerStats, TokenLogprobs

ProgressCallback: TypeAlias = Callable[[str, float], None]
"""Told what is being done, and how much of it is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds since the engine took the request in."""

    first_token_s: float = 0.0
    finished_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    """"stop" (EOS, stop token or stop string), "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The token id or the string that stopped it."""
    error: str | None = None
    """What went wrong, if finish_reason is "error"."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each token, if asked for."""
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of one prompt. `text` and the like are those of the first completion."""

    prompt: str | None
    """The prompt as text, if it was given as text."""
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens that the prefix cache served."""
    outputs: list[CompletionOutput]
    """The `n` completions, in order."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt_token_ids)

    @property
    def text(self) -> str:
        """The generated text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The generated token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why generation ended."""
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str | None:
        """What went wrong, if finish_reason is "error"."""
        return self.outputs[0].error

    @property
    def timings(self) -> Timings:
        """When it began to answer, and when it ended."""
        return self.outputs[0].timings


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """A piece of a streamed completion. Joined, the texts are the completion's text."""

    text: str
    token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache served."""
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt on its way to the driver. `request_id` is the caller's own numbering."""

    request_id: int
    prompt: IntArray
    sampling: ResolvedSampling
    cache_salt: str
    wants_every_token: bool
    """Send tokens as they come, not only at the end: for streams, and where stop strings are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionUpdate:
    """News of one completion on its way back: tokens that have not been sent yet, and perhaps its end."""

    request_id: int
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    stop_token_id: int | None
    error: str | None
    num_cached_tokens: int
    timings: Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine is, once it is ready."""

    device: str
    device_names: tuple[str, ...]
    """One a rank, of the first ranks: those that took their place may be elsewhere."""
    hostnames: tuple[str, ...]
    """Likewise."""
    node_ids: tuple[str, ...]
    """Ray's, likewise: one host may have several nodes."""
    dtype: str
    attention_backend: str
    num_kv_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    """Of the largest rank."""
    peak_host_bytes: int
    """Of its host's memory, what the rank that needed most held beyond its start while it loaded its weights."""
    load_s: float
    """Of the slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """That ranks are of no use any more."""

    report: str
    """All that could be found out."""
    is_accident: bool
    """It is nothing that a request can cause: a lost node, or one that ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """That the ranks have died, or there was room for more of them, and others have taken their place."""

    epoch: int
    """Of the new ranks; the first ones were epoch 0."""
    report: str
    """What had happened to the old ones."""
    noticed_at: float
    """When that was noticed, as time.time() counts."""
    rebuild_s: float
    """From then until the new ones were ready, what was found out about the old ones included."""
    num_ranks: int
    """How many the new ones are."""
    failed_starts: tuple[tuple[float, str], ...] = ()
    """When and why others did not come up in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """A shared engine, as those see it who have only its name."""

    name: str
    model_name: str
    model_digest: str
    """See `raytp.model_files`."""
    num_ranks: int
    stage: str
    """How far its start-up has come; "ready" or "failed" at the end."""
    error: str | None = None
    """Why it has failed."""
    info: EngineInfo | None = None
    """Once it is ready."""
    stats: SchedulerStats | None = None
    """Its load, if it says so in time."""
