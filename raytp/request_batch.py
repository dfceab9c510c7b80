"""The requests of one call of `LLM`: which are still to be sent, which are on their way, which have come back.

Called by `raytp.llm`. Next hop of a request: `raytp.driver_client`. Knows nothing of prompts as text.
"""

from __future__ import annotations

import time
import uuid

from raytp.collector import RequestCollector
from raytp.driver_client import DriverClient
from raytp.errors import RequestError
from raytp.outputs import OutputChunk, Request, RequestOutput

_POLL_S = 1.0
_PAUSE_S = 0.02
"""Between two polls of a batch: many small answers would cost the driver's step loop its time."""
_SUBMIT_CHUNK = 256


class RequestBatch:
    """Numbers the requests of one call, from 0; each is opened or refused once, and comes back in `outputs`."""

    def __init__(self, driver: DriverClient, num_requests: int, cache_salt: str, window: int) -> None:
        """`window`: requests that may be on their way at once. Raises RequestError for a bad `cache_salt`."""
        _check_salt(cache_salt)
        self._client_id = uuid.uuid4().hex
        self._driver = driver
        self._cache_salt = cache_salt
        self._window = window
        self._next = 0
        self._open: dict[int, RequestCollector] = {}
        self._outputs: list[RequestOutput | None] = [None] * num_requests

    @property
    def num_done(self) -> int:
        """Requests that have their output."""
        return self._next - len(self._open)

    @property
    def is_done(self) -> bool:
        """Whether all have."""
        return self.num_done == len(self._outputs)

    @property
    def has_room(self) -> bool:
        """Whether more are to be sent now."""
        return self._next < len(self._outputs) and len(self._open) < self._window

    def next_indices(self) -> range:
        """The next ones to open or refuse."""
        first, self._next = self._next, min(self._next + _SUBMIT_CHUNK, len(self._outputs))
        return range(first, self._next)

    def open(self, index: int, collector: RequestCollector) -> Request:
        """What to `submit` for request `index`; its news go to `collector`."""
        self._open[index] = collector
        return Request(
            request_id=index,
            prompt=collector.prompt_token_ids,
            sampling=collector.sampling,
            cache_salt=self._cache_salt,
            wants_every_token=collector.wants_every_token,
        )

    def refuse(self, index: int, output: RequestOutput) -> None:
        """Request `index` is not sent; this is its output."""
        self._outputs[index] = output

    def submit(self, requests: list[Request]) -> None:
        """Send what `open` gave."""
        if requests:
            self._driver.submit(self._client_id, requests)

    def collect(self) -> list[OutputChunk]:
        """Take in what has come back, and return it piece by piece; waits a moment for some."""
        if not self._open:
            return []
        chunks = []
        for update in self._driver.poll(self._client_id, _POLL_S):
            collector = self._open.get(update.request_id)
            if collector is None:
                continue
            chunk, is_early = collector.take(update)
            chunks.append(chunk)
            if is_early:
                self._driver.abort(self._client_id, update.request_id, update.index, "stop")
            if collector.is_finished:
                self._outputs[update.request_id] = self._open.pop(update.request_id).output()
        return chunks

    def pause(self) -> None:
        """Let news gather, if there are more to come."""
        if self._open:
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End what is still on its way; does not wait for it."""
        self._driver.forget(self._client_id)

    def outputs(self) -> list[RequestOutput]:
        """Every output, in order, once `is_done`."""
        return [output for output in self._outputs if output is not None]


def _check_salt(cache_salt: str) -> None:
    """It is hashed as UTF-8."""
    try:
        cache_salt.encode()
    except (AttributeError, UnicodeEncodeError):
        raise RequestError(f"cache_salt={cache_salt!r} must be a str without surrogates") from None
