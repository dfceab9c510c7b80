"""Gathers what comes back for one prompt, and turns it into text.

Detokenizes, looks for stop strings, and says which completions need to be ended because of one. Made by `raytp.llm`,
fed by `raytp.request_stream`; knows nothing of Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raytp.outputs import CompletionOutput, CompletionUpdate, OutputChunk, RequestOutput, Timings
from raytp.tokenizer import IncrementalDetokenizer, Tokenizer
from scheduler.sampling_params import ResolvedSampling
from scheduler.step import IntArray
from scheduler.updates import TokenLogprobs


@dataclass(slots=True)
class _Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    detokenizer: IncrementalDetokenizer | None = None
    last: CompletionUpdate | None = None
    """The update that ended it."""

    @property
    def stopped_by(self) -> str | None:
        return None if self.detokenizer is None else self.detokenizer.stopped_by


class RequestCollector:
    """One prompt and its `n` completions on their way back."""

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: IntArray,
        sampling: ResolvedSampling,
        tokenizer: Tokenizer | None,
        is_stream: bool,
    ) -> None:
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self._tokenizer = tokenizer
        self.wants_every_token = is_stream or bool(sampling.stop)
        self._completions = [_Completion() for _ in range(sampling.n)]
        if tokenizer is not None and self.wants_every_token:
            for completion in self._completions:
                completion.detokenizer = IncrementalDetokenizer(tokenizer, sampling.stop)
        self._num_cached_tokens = 0

    @property
    def is_finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.last is not None for completion in self._completions)

    def take(self, update: CompletionUpdate) -> tuple[OutputChunk, bool]:
        """Take in news of one completion: (what is new, whether a stop string has ended it before the engine did)."""
        completion = self._completions[update.index]
        if completion.last is not None:
            return OutputChunk(text="", token_ids=[]), False
        completion.token_ids += update.token_ids
        completion.logprobs += update.logprobs
        self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)
        text, token_ids, finish_reason = self._push(completion, update)
        if finish_reason is not None:
            completion.last = update
        is_early = completion.stopped_by is not None and update.finish_reason is None
        chunk = OutputChunk(
            text=text,
            token_ids=token_ids,
            num_cached_tokens=update.num_cached_tokens,
            finish_reason=finish_reason,
            error=update.error,
        )
        return chunk, is_early

    def output(self) -> RequestOutput:
        """The result, once `is_finished`."""
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids.tolist(),
            num_cached_tokens=self._num_cached_tokens,
            outputs=[self._completion_output(index) for index in range(len(self._completions))],
        )

    def _push(self, completion: _Completion, update: CompletionUpdate) -> tuple[str, list[int], str | None]:
        """(new text, new token ids, finish reason), with a stop string's consequences."""
        detokenizer = completion.detokenizer
        if detokenizer is None:
            return "", update.token_ids, update.finish_reason
        text = detokenizer.push(update.token_ids)
        if update.finish_reason is not None:
            text += detokenizer.finish()
        if detokenizer.stopped_by is not None:
            num_extra = len(completion.token_ids) - detokenizer.num_tokens
            completion.token_ids = completion.token_ids[: detokenizer.num_tokens]
            completion.logprobs = completion.logprobs[: detokenizer.num_tokens]
            return text, update.token_ids[: len(update.token_ids) - num_extra], "stop"
        return text, update.token_ids, update.finish_reason

    def _completion_output(self, index: int) -> CompletionOutput:
        completion = self._completions[index]
        last = completion.last
        assert last is not None
        return CompletionOutput(
            index=index,
            text=self._text(completion),
            token_ids=completion.token_ids,
            finish_reason="stop" if completion.stopped_by else last.finish_reason or "abort",
            stop_reason=completion.stopped_by or last.stop_token_id,
            error=last.error,
            logprobs=None if self.sampling.logprobs is None else completion.logprobs,
            timings=last.timings,
        )

    def _text(self, completion: _Completion) -> str:
        if completion.detokenizer is not None:
            return completion.detokenizer.text
        return "" if self._tokenizer is None else self._tokenizer.decode(completion.token_ids)


def refused(prompt: str | None, error: str) -> RequestOutput:
    """The result of a request that never reached the engine."""
    return _without_tokens(prompt, "error", error)


def aborted(prompt: str | None) -> RequestOutput:
    """The result of a request that was aborted before it was sent."""
    return _without_tokens(prompt, "abort", None)


def _without_tokens(prompt: str | None, finish_reason: str, error: str | None) -> RequestOutput:
    completion = CompletionOutput(
        index=0, text="", token_ids=[], finish_reason=finish_reason, error=error, timings=Timings()
    )
    return RequestOutput(prompt=prompt, prompt_token_ids=[], num_cached_tokens=0, outputs=[completion])
