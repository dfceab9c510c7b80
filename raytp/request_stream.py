"""The requests of one call of `LLM`: as many on their way as there is room for, each handed back as it finishes.

Called by `raytp.llm`, whose users get an `OutputStream` for one request, piece by piece. Next hop of a request:
`raytp.driver_client`. Knows nothing of prompts as text.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raytp.collector import RequestCollector, refused
from raytp.driver_client import DriverClient
from raytp.errors import RequestError
from raytp.outputs import OutputChunk, Request, RequestOutput
from scheduler.errors import shown

_POLL_S = 1.0
_ASK_AGAIN_S = 0.1
"""The same, where there is no job just now: one may come while nothing finishes."""
_PAUSE_S = 0.02
"""Between two polls: many small answers would cost the driver's step loop its time."""
_SUBMIT_CHUNK = 256
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Job(Generic[Key]):
    """A request to come. `make_collector` may raise: then the request is refused, and its prompt is `text`."""

    key: Key
    text: str | None
    make_collector: Callable[[], RequestCollector]


class RequestStream:
    """The requests of one caller. Use `outputs` or `chunks`, once; `abort` and `abort_all` from any thread."""

    def __init__(self, driver: DriverClient, cache_salt: str, window: int) -> None:
        """`window`: requests that may be on their way at once. Raises RequestError for a bad `cache_salt`."""
        _check_salt(cache_salt)
        self._client_id = uuid.uuid4().hex
        self._driver = driver
        self._cache_salt = cache_salt
        self._window = window
        self._next_id = 0
        self._open: dict[int, tuple[Any, RequestCollector]] = {}
        self._finished: list[tuple[Any, RequestOutput]] = []
        self._is_exhausted = False
        self._lock = threading.RLock()
        """Of what follows: an abort must not overtake the request that it means, and may come from a signal's handler
        while this thread sends."""
        self._num_sent = 0
        self._to_abort: set[int] = set()
        self._aborted: set[int] = set()
        """Of these, those that the driver has been told of."""
        self._is_aborted = False
        """All are, also those to come."""

    def abort(self, key: Any) -> None:
        """End the requests with this key that are on their way: they come with what they have, and reason "abort"."""
        with self._lock:
            self._to_abort.update(
                request_id for request_id, (other, _) in list(self._open.items()) if other is key or other == key
            )
            self._abort_sent()

    def abort_all(self) -> None:
        """End all that are on their way, and read no more jobs."""
        with self._lock:
            self._is_aborted = True
            self._abort_sent()

    def outputs(self, jobs: Iterable[Job[Key] | None]) -> Generator[tuple[Key, RequestOutput] | None, None, None]:
        """(key, output) of each job in the order of completion; None where nothing has finished for a second at most.

        A job of None says that there is nothing to send now, and is asked again. Closing the generator ends what is on
        its way.
        """
        source = self._until_aborted(jobs)
        try:
            while self._has_more:
                timeout_s = _ASK_AGAIN_S if self._refill(source) else _POLL_S
                # Those that were refused have finished already, and wait for nobody.
                self._collect(0.0 if self._finished else timeout_s)
                finished, self._finished = self._finished, []
                if finished:
                    yield from finished
                elif self._has_more:
                    yield None
                if self._has_more:
                    time.sleep(_PAUSE_S)
        finally:
            self._driver.forget(self._client_id)

    def chunks(self, collector: RequestCollector) -> Generator[OutputChunk, None, None]:
        """One request, piece by piece. Closing the generator ends it."""
        try:
            self._send([self._open_request(collector, collector)])
            while self._open:
                yield from self._collect(_POLL_S)
        finally:
            self._driver.forget(self._client_id)

    @property
    def _has_more(self) -> bool:
        return bool(self._open) or not self._is_exhausted

    def _refill(self, source: Iterator[Job[Any] | None]) -> bool:
        """Send jobs while there is room and none was refused, which must not pile up. True: there are none now."""
        while not self._is_exhausted and not self._finished and len(self._open) < self._window:
            requests: list[Request] = []
            is_idle = False
            for _ in range(min(_SUBMIT_CHUNK, self._window - len(self._open))):
                try:
                    job = next(source)
                except StopIteration:
                    self._is_exhausted = True
                    break
                is_idle = job is None
                if job is None:
                    break
                requests += self._prepare(job)
            if requests:
                self._send(requests)
            if is_idle:
                return True
        return False

    def _until_aborted(self, jobs: Iterable[Job[Any] | None]) -> Iterator[Job[Any] | None]:
        for job in jobs:
            yield job
            if self._is_aborted:
                return

    def _send(self, requests: list[Request]) -> None:
        with self._lock:
            self._driver.submit(self._client_id, requests)
            self._num_sent += len(requests)
            self._abort_sent()

    def _abort_sent(self) -> None:
        """Pass on what is to be aborted, except what has not been sent yet."""
        if self._is_aborted:
            self._to_abort.update(list(self._open))
        for request_id in sorted(self._to_abort - self._aborted):
            if request_id < self._num_sent and request_id not in self._aborted:
                self._aborted.add(request_id)  # first: a signal's handler may come in between
                self._driver.abort(self._client_id, request_id, None, "abort")

    def _prepare(self, job: Job[Any]) -> list[Request]:
        """What is to be sent: nothing if the request cannot be served."""
        try:
            collector = job.make_collector()
        except Exception as error:  # a chat template may raise anything over one conversation
            self._finished.append((job.key, refused(job.text, str(error) or type(error).__name__)))
            return []
        return [self._open_request(job.key, collector)]

    def _open_request(self, key: Any, collector: RequestCollector) -> Request:
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._open[request_id] = key, collector
        return Request(
            request_id=request_id,
            prompt=collector.prompt_token_ids,
            sampling=collector.sampling,
            cache_salt=self._cache_salt,
            wants_every_token=collector.wants_every_token,
        )

    def _collect(self, timeout_s: float) -> list[OutputChunk]:
        """Take in what has come back, and return it piece by piece; waits up to `timeout_s` for some."""
        chunks: list[OutputChunk] = []
        if not self._open:
            return chunks
        for update in self._driver.poll(self._client_id, timeout_s):
            if update.request_id not in self._open:
                continue
            key, collector = self._open[update.request_id]
            chunk, is_early = collector.take(update)
            chunks.append(chunk)
            if is_early:
                self._driver.abort(self._client_id, update.request_id, update.index, "stop")
            if collector.is_finished:
                del self._open[update.request_id]
                self._finished.append((key, collector.output()))
        return chunks


class RunningCalls:
    """The streams of one `LLM` that may have something running. For any thread, and for a signal's handler."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[RequestStream] = weakref.WeakSet()
        self._lock = threading.RLock()

    def add(self, call: RequestStream) -> None:
        """One more, until it is dropped."""
        with self._lock:
            self._calls.add(call)

    def all(self) -> list[RequestStream]:
        """As of now."""
        with self._lock:
            return list(self._calls)


class OutputStream:
    """One request's answer, piece by piece: an iterator of `OutputChunk`s."""

    def __init__(self, requests: RequestStream, collector: RequestCollector) -> None:
        self._requests = requests
        self._chunks = requests.chunks(collector)

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> OutputChunk:
        return next(self._chunks)

    def abort(self) -> None:
        """End the request, from any thread: the last piece comes soon, with the finish_reason "abort"."""
        self._requests.abort_all()

    def close(self) -> None:
        """End the request, and the iterator with it. So does whoever drops it."""
        self._chunks.close()


def _check_salt(cache_salt: str) -> None:
    """It is hashed as UTF-8."""
    try:
        cache_salt.encode()
    except (AttributeError, UnicodeEncodeError):
        raise RequestError(f"cache_salt={shown(cache_salt)} must be a str without surrogates") from None
