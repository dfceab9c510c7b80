"""The step loop: takes requests in, lets the scheduler choose steps, keeps one step ahead, hands results out.

Owns the scheduler, which only its thread touches, and the mailboxes of the callers. Knows nothing of Ray or text.
Called by `raytp.driver`, from any thread. Next hop of a request: `scheduler.scheduler`, then `raytp.transport`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from raytp.errors import EngineClosedError, EngineError
from raytp.mailbox import Mailbox
from raytp.outputs import CompletionUpdate, Request, Timings
from raytp.transport import Transport
from scheduler.errors import RaytpError, RequestError
from scheduler.sampling_params import MAX_SEED, ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.updates import SchedulerStats, SequenceUpdate, TokenLogprobs

logger = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 2
"""Steps sent and not yet answered: one runs while the next waits on the device's queue."""
_CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for a step that is under way; the ranks may be stuck in it."""
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
_Answer = TypeVar("_Answer")


class _Completion:
    """What the engine keeps of a sequence besides the scheduler's state: whose it is, and what is yet to be sent."""

    __slots__ = ("arrived", "client_id", "first_token", "index", "logprobs", "request", "token_ids")

    def __init__(self, client_id: str, request: Request, index: int) -> None:
        self.client_id = client_id
        self.request = request
        self.index = index
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []


class Engine:
    """Runs until `close`, or until a rank fails; then every caller that waits gets the failure."""

    def __init__(self, scheduler: Scheduler, transport: Transport) -> None:
        self._scheduler = scheduler
        self._transport = transport
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._completions: dict[int, _Completion] = {}
        self._mailboxes: dict[str, Mailbox] = {}
        self._mailboxes_lock = threading.Lock()
        self._next_seq_id = 0
        self._is_closing = False
        self._failure: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="raytp-steps", daemon=True)
        self._thread.start()

    def submit(self, client_id: str, requests: list[Request]) -> None:
        """Queue requests of one caller; what becomes of them arrives in the caller's mailbox."""
        self.check_alive()
        self._commands.put(lambda: self._admit(client_id, requests))

    def abort(self, client_id: str, request_id: int | None, index: int | None, finish_reason: str) -> None:
        """End one completion, one request, or (None) all requests of a caller. Unknown ids are ignored."""
        self._commands.put(lambda: self._abort(client_id, request_id, index, finish_reason))

    def poll(self, client_id: str, timeout_s: float) -> list[CompletionUpdate]:
        """News for one caller, as soon as there is any; empty after `timeout_s`. Raises EngineError if it ended."""
        updates = self._mailbox(client_id).take(timeout_s)
        if not updates:
            self.check_alive()
        return updates

    def forget(self, client_id: str) -> None:
        """A caller is done or gone: end what it still has running, and drop its mailbox."""
        self.abort(client_id, None, None, "abort")
        self._commands.put(lambda: self._drop_mailbox(client_id))

    def stats(self) -> SchedulerStats:
        """The scheduler's counts, read between two steps."""
        return self._ask(self._scheduler.stats)

    def step_loop_cpu_s(self) -> float:
        """CPU time of the step loop's thread so far, in seconds."""
        return self._ask(time.thread_time)

    def close(self) -> None:
        """End the step loop and tell the ranks to end; callers that wait get EngineClosedError."""
        self._is_closing = True
        self._commands.put(lambda: None)  # wakes the loop
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._fail(EngineClosedError("the engine has been shut down"))

    def _ask(self, question: Callable[[], _Answer], timeout_s: float = 10.0) -> _Answer:
        """What `question` returns between two steps, on the step loop's thread."""
        answer: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._commands.put(lambda: answer.put(question()))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=0.1)
        raise EngineError(f"the step loop did not answer within {timeout_s:g} s")

    def wait(self) -> None:
        """Until the step loop has ended, by `close` or by a failure."""
        self._thread.join()

    def check_alive(self) -> None:
        """Raises EngineError if the engine has ended."""
        failure = self._failure
        if failure is not None:
            raise type(failure)(str(failure))  # a new one for each caller: a raised exception gathers traceback

    def _mailbox(self, client_id: str) -> Mailbox:
        with self._mailboxes_lock:
            return self._mailboxes.setdefault(client_id, Mailbox(is_closed=self._failure is not None))

    def _drop_mailbox(self, client_id: str) -> None:
        self._deliver(self._scheduler.take_updates())
        with self._mailboxes_lock:
            mailbox = self._mailboxes.pop(client_id, None)
        if mailbox is not None:
            mailbox.close()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_commands()
                self._step()
                self._deliver(self._scheduler.take_updates())
        except RaytpError as error:
            logger.error("the engine ends: %s", error)
            self._fail(error if isinstance(error, EngineError) else EngineError(str(error)))
        except Exception as error:
            logger.exception("the step loop failed")
            self._fail(
                EngineError(f"the step loop failed with {type(error).__name__}: {error}; this is a bug in raytp")
            )
        finally:
            self._transport.close()

    def _run_commands(self) -> None:
        """Run what callers have asked for; with nothing else to do, wait until they ask."""
        if not self._scheduler.has_unfinished and self._scheduler.num_in_flight == 0:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        step = self._scheduler.schedule()
        if step is not None:
            self._transport.send(step)
        num_in_flight = self._scheduler.num_in_flight
        assert step or num_in_flight or not self._scheduler.has_unfinished, "sequences wait, and nothing can run"
        if num_in_flight == _MAX_IN_FLIGHT or (step is None and num_in_flight):
            self._scheduler.postprocess(self._transport.receive())

    def _admit(self, client_id: str, requests: list[Request]) -> None:
        for request in requests:
            for index in range(request.sampling.n):
                sampling = _sampling_of_completion(request.sampling, index)
                seq = Sequence(self._next_seq_id, request.prompt, sampling, request.cache_salt)
                completion = _Completion(client_id, request, index)
                try:
                    self._scheduler.add(seq)
                except RequestError as error:
                    self._mailbox(client_id).put([_refusal(completion, str(error))])
                    continue
                self._completions[seq.seq_id] = completion
                self._next_seq_id += 1

    def _abort(self, client_id: str, request_id: int | None, index: int | None, finish_reason: str) -> None:
        for seq_id, completion in list(self._completions.items()):
            if (
                completion.client_id == client_id
                and request_id in (None, completion.request.request_id)
                and index in (None, completion.index)
            ):
                self._scheduler.abort(seq_id, finish_reason)

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        """Put news into the mailboxes: each token where it is wanted, else everything at the end."""
        letters: dict[str, list[CompletionUpdate]] = {}
        now = time.monotonic()
        for update in updates:
            completion = self._completions[update.seq_id]
            if update.token_id is not None:
                completion.first_token = completion.first_token or now
                completion.token_ids.append(update.token_id)
                if update.logprobs is not None:
                    completion.logprobs.append(update.logprobs)
            if update.finish_reason is not None:
                del self._completions[update.seq_id]
            elif not completion.request.wants_every_token:
                continue
            letters.setdefault(completion.client_id, []).append(_letter(completion, update, now))
        for client_id, letter in letters.items():
            self._mailbox(client_id).put(letter)

    def _fail(self, failure: EngineError) -> None:
        with self._mailboxes_lock:
            self._failure = self._failure or failure
            for mailbox in self._mailboxes.values():
                mailbox.close()


def _sampling_of_completion(sampling: ResolvedSampling, index: int) -> ResolvedSampling:
    """Completion 0 draws with the request's own seed, so that it is what n=1 gives; the others with its kin."""
    if index == 0:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + index * _GOLDEN_RATIO_64) & MAX_SEED)


def _refusal(completion: _Completion, error: str) -> CompletionUpdate:
    update = SequenceUpdate(seq_id=-1, finish_reason="error", error=error)
    return _letter(completion, update, time.monotonic())


def _letter(completion: _Completion, update: SequenceUpdate, now: float) -> CompletionUpdate:
    token_ids, completion.token_ids = completion.token_ids, []
    logprobs, completion.logprobs = completion.logprobs, []
    return CompletionUpdate(
        request_id=completion.request.request_id,
        index=completion.index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=update.finish_reason,
        stop_token_id=update.stop_token_id,
        error=update.error,
        num_cached_tokens=update.num_cached_tokens,
        timings=Timings(
            first_token_s=(completion.first_token or now) - completion.arrived,
            finished_s=now - completion.arrived,
        ),
    )
