"""One completion of a request, between the scheduler's news of its sequence and what its caller is sent.

Used by `raytp.engine` alone.
"""

from __future__ import annotations

import dataclasses
import time

from raytp.outputs import CompletionUpdate, Request, Timings
from scheduler.sampling_params import MAX_SEED, ResolvedSampling
from scheduler.updates import SequenceUpdate, TokenLogprobs

_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15


class Completion:
    """Whose it is, and what is yet to be sent."""

    __slots__ = ("_arrived", "_first_token", "_logprobs", "_token_ids", "client_id", "index", "request")

    def __init__(self, client_id: str, request: Request, index: int) -> None:
        self.client_id = client_id
        self.request = request
        self.index = index
        self._arrived = time.monotonic()
        self._first_token: float | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def sampling(self) -> ResolvedSampling:
        """Completion 0 draws with the request's own seed, so that it is what n=1 gives; the others with its kin."""
        sampling = self.request.sampling
        if self.index == 0:
            return sampling
        return dataclasses.replace(sampling, seed=(sampling.seed + self.index * _GOLDEN_RATIO_64) & MAX_SEED)

    def take_in(self, update: SequenceUpdate, now: float) -> CompletionUpdate | None:
        """News of the sequence. What the caller is to be told now: each token if it wants that, else all at the end."""
        if update.token_id is not None:
            self._first_token = self._first_token or now
            self._token_ids.append(update.token_id)
            if update.logprobs is not None:
                self._logprobs.append(update.logprobs)
        if update.finish_reason is None and not self.request.wants_every_token:
            return None
        return self._letter(update, now)

    def refusal(self, error: str) -> CompletionUpdate:
        """That it will not be computed."""
        return self._letter(SequenceUpdate(seq_id=-1, finish_reason="error", error=error), time.monotonic())

    def _letter(self, update: SequenceUpdate, now: float) -> CompletionUpdate:
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        return CompletionUpdate(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            stop_token_id=update.stop_token_id,
            error=update.error,
            num_cached_tokens=update.num_cached_tokens,
            timings=Timings(
                first_token_s=(self._first_token or now) - self._arrived,
                finished_s=now - self._arrived,
            ),
        )
