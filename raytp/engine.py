"""The step loop: takes requests in, lets the scheduler choose steps, keeps one step ahead, hands results out.

Owns the scheduler, which only its thread touches, and the mailboxes of the callers. Knows nothing of Ray or text.
Called by `raytp.driver`, from any thread. Next hop of a request: `scheduler.scheduler`, then `raytp.transport`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from raytp.completion import Completion
from raytp.errors import ChannelError, EngineClosedError, EngineError
from raytp.mailbox import Mailroom
from raytp.outputs import CompletionUpdate, Request
from raytp.succession import RankSource, Succession
from raytp.transport import Transport
from scheduler.errors import RaytpError, RequestError
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.updates import SchedulerStats, SequenceUpdate

logger = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 2
"""Steps sent and not yet answered: one runs while the next waits on the device's queue."""
_CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for a step that is under way; the ranks may be stuck in it."""
_IDLE_CHECK_S = 1.0
"""How often ranks that have nothing to do are asked after."""
_RECOVERY_CHECK_S = 0.1
_ANSWER_TIMEOUT_S = 10.0
"""For what is asked between two steps: less than a list of engines waits for each of them."""
_Answer = TypeVar("_Answer")


class Engine:
    """Runs until `close`, or until no ranks can be had; then every caller that waits gets the failure."""

    def __init__(
        self,
        scheduler: Scheduler,
        transport: Transport,
        ranks: RankSource,
        *,
        max_restarts: int,
        silence_timeout_s: float | None = None,
    ) -> None:
        """`max_restarts`: of ranks that have not finished a step, one after another, before the engine gives up.

        `silence_timeout_s`: a caller that says nothing for so long is forgotten; None trusts callers to say so.
        """
        self._scheduler = scheduler
        self._transport = transport
        self._ranks = ranks
        self._succession = Succession(ranks, max_restarts)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._completions: dict[int, Completion] = {}
        self._mailboxes = Mailroom(silence_timeout_s)
        self._next_seq_id = 0
        self._is_closing = False
        self._failure: EngineError | None = None
        self._failure_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="raytp-steps", daemon=True)
        self._thread.start()

    def submit(self, client_id: str, requests: list[Request]) -> None:
        """Queue requests of one caller; what becomes of them arrives in the caller's mailbox."""
        self.check_alive()
        self._mailboxes.expect_news(client_id)
        self._commands.put(lambda: self._admit(client_id, requests))

    def abort(self, client_id: str, request_id: int | None, index: int | None, finish_reason: str) -> None:
        """End one completion, one request, or (None) all requests of a caller. Unknown ids are ignored."""
        self._commands.put(lambda: self._abort(client_id, request_id, index, finish_reason))

    def poll(self, client_id: str, timeout_s: float) -> list[CompletionUpdate]:
        """News for one caller, as soon as there is any; empty after `timeout_s`. Raises EngineError if it ended."""
        updates = self._mailboxes.take(client_id, timeout_s)
        if not updates:
            self.check_alive()
        return updates

    def forget(self, client_id: str) -> None:
        """A caller is done or gone: end what it still has running, and drop its mailbox."""
        self.abort(client_id, None, None, "abort")
        self._commands.put(lambda: self._drop_mailbox(client_id))

    def keep_waiting(self, client_ids: list[str]) -> None:
        """See `Mailroom.keep_waiting`."""
        self._mailboxes.keep_waiting(client_ids)

    def stats(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> SchedulerStats:
        """The scheduler's counts, read between two steps. Raises EngineError if the step under way takes longer."""
        return self._ask(self._scheduler.stats, timeout_s)

    def step_loop_cpu_s(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> float:
        """CPU time of the step loop's thread so far, in seconds. Raises EngineError as `stats` does."""
        return self._ask(time.thread_time, timeout_s)

    def close(self) -> None:
        """End the step loop and tell the ranks to end; callers that wait get EngineClosedError."""
        self._is_closing = True
        self._commands.put(lambda: None)  # wakes the loop
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._fail(EngineClosedError("the engine has been shut down"))

    def _ask(self, question: Callable[[], _Answer], timeout_s: float) -> _Answer:
        """What `question` returns between two steps, on the step loop's thread."""
        answer: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._commands.put(lambda: answer.put(question()))
        deadline = time.monotonic() + timeout_s
        while True:
            self.check_alive()
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=0.1)
            if time.monotonic() > deadline:
                break
        raise EngineError(
            f"the step loop did not answer within timeout_s={timeout_s:g}: a long step is under way, or the ranks are "
            f"stuck in it; ask again, or raise timeout_s"
        )

    def wait(self) -> None:
        """Until the step loop has ended, by `close` or by a failure."""
        self._thread.join()

    def check_alive(self) -> None:
        """Raises EngineError if the engine has ended."""
        failure = self._failure
        if failure is not None:
            raise type(failure)(str(failure))  # a new one for each caller: a raised exception gathers traceback

    def _forget_silent(self) -> None:
        """A caller that was killed says nothing, and its requests must not run for nobody."""
        for client_id in self._mailboxes.give_up_silent():
            self._abort(client_id, None, None, "abort")
            self._drop_mailbox(client_id)

    def _drop_mailbox(self, client_id: str) -> None:
        self._deliver(self._scheduler.take_updates())
        self._mailboxes.drop(client_id)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_commands()
                self._forget_silent()
                if not self._succession.is_under_way:
                    self._advance()
                elif (new_ranks := self._succession.take()) is not None:
                    self._resume(*new_ranks)
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
            self._succession.close()

    def _run_commands(self) -> None:
        """Run what callers have asked for; with nothing else to do, wait until they ask, or may have gone silent."""
        if self._is_idle or self._succession.is_under_way:
            try:
                command = self._commands.get(timeout=_IDLE_CHECK_S if self._is_idle else _RECOVERY_CHECK_S)
            except queue.Empty:
                return
            command()
        while not self._commands.empty():
            self._commands.get()()

    def _advance(self) -> None:
        """One step, or the beginning of new ranks if it turns out that the present ones are of no use any more."""
        try:
            self._step()
        except (EngineError, ChannelError) as failure:
            self._transport.close()
            found, was_idle = self._ranks.examine(failure), self._is_idle
            is_excused = self._succession.is_excused(found)
            was_trial = self._scheduler.lose_ranks(found.report, is_accident=is_excused)
            self._succession.count_death(found.report, was_trial=was_trial, was_excused=is_excused, was_idle=was_idle)
            logger.warning("the ranks have failed and are built again: %s", found.report)
            self._succession.begin(found.report)

    def _grow(self) -> None:
        """Nothing is to be done: the time to become more ranks again, if there could be more."""
        report = self._succession.room_for_more()
        if report is not None:
            logger.warning("%s", report)
            self._transport.close()
            self._scheduler.lose_ranks(report, is_accident=True)
            self._succession.begin(report)

    def _resume(self, transport: Transport, num_kv_blocks: int) -> None:
        self._transport = transport
        before = self._scheduler.config.num_kv_blocks
        if num_kv_blocks < before:
            logger.warning(
                "the new ranks have room for %d KV-cache blocks, those before had %d: see what else uses their memory",
                num_kv_blocks,
                before,
            )
        self._scheduler.replace_pool(num_kv_blocks)

    def _step(self) -> None:
        step = self._scheduler.schedule()
        if step is not None:
            self._transport.send(step)
        num_in_flight = self._scheduler.num_in_flight
        assert step or num_in_flight or not self._scheduler.has_unfinished, "sequences wait, and nothing can run"
        if num_in_flight == _MAX_IN_FLIGHT or (step is None and num_in_flight):
            self._scheduler.postprocess(self._transport.receive())
            self._succession.count_step()
        elif num_in_flight == 0:
            self._transport.check()
            self._grow()

    @property
    def _is_idle(self) -> bool:
        return not self._scheduler.has_unfinished and self._scheduler.num_in_flight == 0

    def _admit(self, client_id: str, requests: list[Request]) -> None:
        if self._mailboxes.is_gone(client_id):
            return  # it was interrupted while it asked, and its goodbye came first
        for request in requests:
            for index in range(request.sampling.n):
                completion = Completion(client_id, request, index)
                seq = Sequence(self._next_seq_id, request.prompt, completion.sampling, request.cache_salt)
                try:
                    self._scheduler.add(seq)
                except RequestError as error:
                    self._mailboxes.put(client_id, [completion.refusal(str(error))])
                    continue
                self._completions[seq.seq_id] = completion
                self._next_seq_id += 1

    def _abort(self, client_id: str, request_id: int | None, index: int | None, finish_reason: str) -> None:
        meant = [
            seq_id
            for seq_id, completion in self._completions.items()
            if completion.client_id == client_id
            and request_id in (None, completion.request.request_id)
            and index in (None, completion.index)
        ]
        for seq_id in meant:
            self._scheduler.abort(seq_id, finish_reason)
        if meant and not self._succession.is_under_way:
            self._ranks.reach("abort")

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        """Put news into the mailboxes."""
        letters: dict[str, list[CompletionUpdate]] = {}
        now = time.monotonic()
        for update in updates:
            completion = self._completions[update.seq_id]
            letter = completion.take_in(update, now)
            if update.finish_reason is not None:
                del self._completions[update.seq_id]
            if letter is not None:
                letters.setdefault(completion.client_id, []).append(letter)
        for client_id, some in letters.items():
            self._mailboxes.put(client_id, some)

    def _fail(self, failure: EngineError) -> None:
        with self._failure_lock:
            self._failure = self._failure or failure
        self._mailboxes.close()
