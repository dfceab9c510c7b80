"""Requests without a known end: as many on their way as there is room for, each handed back as it finishes.

Called by `raytp.llm`. Next hop of a request: `raytp.driver_client`. Knows nothing of prompts as text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

from raytp.collector import RequestCollector, refused
from raytp.driver_client import DriverClient
from raytp.outputs import Request, RequestOutput

_POLL_S = 1.0
_PAUSE_S = 0.02
"""Between two polls: many small answers would cost the driver's step loop its time."""
_SUBMIT_CHUNK = 256
_END: Any = object()
Key = TypeVar("Key")


class RequestStream:
    """The requests of one caller. Iterate over `outputs` once."""

    def __init__(self, driver: DriverClient, cache_salt: str, window: int) -> None:
        """`window`: requests that may be on their way at once."""
        self._client_id = uuid.uuid4().hex
        self._driver = driver
        self._cache_salt = cache_salt
        self._window = window
        self._next_id = 0
        self._open: dict[int, tuple[Any, RequestCollector]] = {}
        self._refused: list[tuple[Any, RequestOutput]] = []
        self._is_exhausted = False

    def outputs(
        self, jobs: Iterable[tuple[Key, Callable[[], RequestCollector]] | None]
    ) -> Generator[tuple[Key, RequestOutput] | None, None, None]:
        """(key, output) of each job in the order of completion; None where nothing has finished for a second.

        A job is its key and what makes its collector; None says that there is nothing to send now, and is asked again.
        Closing the generator ends what is on its way.
        """
        source = iter(jobs)
        try:
            while self._open or not self._is_exhausted:
                self._refill(source)
                finished = self._refused + self._collect()
                self._refused = []
                if finished:
                    yield from finished
                else:
                    yield None
                if self._open or not self._is_exhausted:
                    time.sleep(_PAUSE_S)
        finally:
            self._driver.forget(self._client_id)

    def _refill(self, source: Iterator[tuple[Any, Callable[[], RequestCollector]] | None]) -> None:
        """Send jobs until the window is full, or there are none for now."""
        has_more = not self._is_exhausted
        while has_more and len(self._open) < self._window:
            requests: list[Request] = []
            num_taken = 0
            while has_more and num_taken < _SUBMIT_CHUNK and len(self._open) < self._window:
                job: Any = next(source, _END)
                self._is_exhausted = job is _END
                has_more = job is not None and job is not _END
                if has_more:
                    requests += self._prepare(*job)
                    num_taken += 1
            if requests:
                self._driver.submit(self._client_id, requests)
            if self._refused:
                return  # they have finished, and are not to pile up

    def _prepare(self, key: Any, make_collector: Callable[[], RequestCollector]) -> list[Request]:
        """What is to be sent: nothing if the request cannot be served."""
        try:
            collector = make_collector()
        except Exception as error:  # a chat template may raise anything over one conversation
            self._refused.append((key, refused(None, str(error) or type(error).__name__)))
            return []
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._open[request_id] = key, collector
        return [
            Request(
                request_id=request_id,
                prompt=collector.prompt_token_ids,
                sampling=collector.sampling,
                cache_salt=self._cache_salt,
                wants_every_token=collector.wants_every_token,
            )
        ]

    def _collect(self) -> list[tuple[Any, RequestOutput]]:
        """Those that have finished; waits a moment for news if there is nothing else to do."""
        finished: list[tuple[Any, RequestOutput]] = []
        if not self._open:
            return finished
        for update in self._driver.poll(self._client_id, 0.0 if self._refused else _POLL_S):
            if update.request_id not in self._open:
                continue
            key, collector = self._open[update.request_id]
            _, is_early = collector.take(update)
            if is_early:
                self._driver.abort(self._client_id, update.request_id, update.index, "stop")
            if collector.is_finished:
                del self._open[update.request_id]
                finished.append((key, collector.output()))
        return finished
