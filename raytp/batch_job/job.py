"""Drives an engine over the rows that have no record yet, and hands each record to the output. Called by `api`.

The engine pulls rows and gives outputs on this one thread: rows are read as there is room for them, and an answer is
written as it comes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any, Protocol

from raytp.batch_job.manifest import Counts
from raytp.batch_job.output import Output
from raytp.batch_job.progress import JobProgress
from raytp.batch_job.readers import Reader
from raytp.batch_job.row_ids import IdSet
from raytp.batch_job.rows import BadRow, Engine, Job, Place, Row
from raytp.outputs import RequestOutput

_ORDER_WINDOW = 4096
"""Rows that `ordered` may be ahead of the one that is still missing."""
_GRACE_S = {signal.SIGINT: (5.0, "finishing what is in flight, for 5 s at most"), signal.SIGTERM: (0.0, "committing")}
"""For what is in flight at a signal, and what to call that."""


class RecordFormat(Protocol):
    """From fields to rows, and from outputs to records."""

    def parse(self, place: Place, columns: Mapping[str, Any]) -> Row | BadRow:
        """The row that the fields make."""

    def record(self, row: Row, output: RequestOutput) -> Mapping[str, Any]:
        """The record of a row that was answered."""

    def error_record(self, row: BadRow) -> Mapping[str, Any]:
        """The record of a row that failed."""


class BatchJob:
    """One run over the input. Use it once."""

    def __init__(
        self,
        reader: Reader,
        row_format: RecordFormat,
        output: Output,
        progress: JobProgress,
        *,
        is_ordered: bool,
        max_failures: int | None,
        order_window: int = _ORDER_WINDOW,
    ) -> None:
        self._reader = reader
        self._format = row_format
        self._output = output
        self._progress = progress
        self._is_ordered = is_ordered
        self._max_failures = max_failures
        self._order_window = order_window
        self._in_flight: dict[int, Row] = {}
        self._held: dict[int, tuple[Mapping[str, Any], Counts]] = {}
        """Records that wait for one before them."""
        self._next_ordinal = 0
        """The next to be written, if ordered."""
        self._deadline_s: float | None = None
        """Set by an interrupt."""
        self._has_read_all = False

    def run(self, engine: Engine) -> str:
        """Do what is left; how it ended: "complete", "interrupted" or "too many failures". All is committed then."""
        with (
            self._interrupt_deferred(),
            closing(IdSet()) as ids,
            closing(engine.complete(self._jobs(ids))) as results,
        ):
            try:
                for result in results:
                    if result is not None:
                        self._answer(*result)
                    self._tick()
                    if self._is_over():
                        break
            finally:  # before the engine hears of the end: it may have died, or take its time
                self._output.commit()
        return self._status()

    def _jobs(self, ids: IdSet) -> Iterator[Job | None]:
        """What is to be asked; None where the engine should go on with what it has."""
        for row in self._reader.rows(self._format):
            is_new = row.id is None or ids.add(row.id)
            if row.place.ordinal in self._output.done:
                self._tick()
                continue
            if not is_new:
                row = _duplicate(row)
            while self._is_ordered and row.place.ordinal - self._next() >= self._order_window and not self._is_ending():
                yield None
            if self._is_ending():
                return
            if isinstance(row, BadRow):
                self._fail(row)
                self._tick()
            else:
                self._in_flight[row.place.ordinal] = row
                yield row.place.ordinal, row.request, row.params
        self._has_read_all = True

    def _answer(self, ordinal: int, output: RequestOutput) -> None:
        row = self._in_flight.pop(ordinal)
        failed = failed_row(row, output)
        if failed is not None:
            self._fail(failed)
            return
        counts = Counts(
            num_succeeded=1,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_output_tokens=sum(len(each.token_ids) for each in output.outputs),
        )
        self._deliver(ordinal, self._format.record(row, output), counts)

    def _fail(self, row: BadRow) -> None:
        counts = Counts(num_failed=1, error_codes={row.code: 1})
        self._deliver(row.place.ordinal, self._format.error_record(row), counts)

    def _deliver(self, ordinal: int, record: Mapping[str, Any], counts: Counts) -> None:
        self._progress.counts.add(counts)
        if not self._is_ordered:
            self._output.add(ordinal, record, counts)
            return
        self._held[ordinal] = record, counts
        while (following := self._next()) in self._held:
            self._output.add(following, *self._held.pop(following))
            self._next_ordinal += 1

    def _next(self) -> int:
        """The ordinal that is to be written next, past those of an earlier run."""
        while self._next_ordinal in self._output.done:
            self._next_ordinal += 1
        return self._next_ordinal

    def _tick(self) -> None:
        self._output.commit_if_due()
        self._progress.show(self._reader.num_read, self._reader.fraction)

    def _has_failed_too_often(self) -> bool:
        return self._max_failures is not None and self._progress.num_failed > self._max_failures

    def _is_ending(self) -> bool:
        """Whether no more rows are to be asked."""
        return self._deadline_s is not None or self._has_failed_too_often()

    def _is_over(self) -> bool:
        """Whether what is in flight is not waited for."""
        return self._deadline_s is not None and time.monotonic() > self._deadline_s

    def _status(self) -> str:
        if self._has_failed_too_often():
            return "too many failures"
        return "complete" if self._has_read_all and not self._in_flight else "interrupted"

    @contextmanager
    def _interrupt_deferred(self) -> Iterator[None]:
        """The first signal lets what is in flight finish, or commits at once; the second one does what it always does.

        SIGTERM is what `ray job stop`, Kubernetes and batch queues send, a few seconds ahead of SIGKILL.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, _: FrameType | None) -> None:
            restore()
            grace_s, what = _GRACE_S[signal.Signals(number)]
            self._deadline_s = time.monotonic() + grace_s
            self._progress.note(f"interrupted: {what}; once more ends that at once")

        def restore() -> None:
            for number, handler in earlier.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None is one that Python does not know

        earlier = {number: signal.getsignal(number) for number in _GRACE_S}
        for number in _GRACE_S:
            signal.signal(number, interrupt)
        try:
            yield
        finally:
            restore()


def failed_row(row: Row, output: RequestOutput) -> BadRow | None:
    """What the row is if its request failed; None if it was answered."""
    failed = next((each for each in output.outputs if each.finish_reason in ("error", "abort")), None)
    if failed is None:
        return None
    message = failed.error or f"the request ended with {failed.finish_reason}"
    return BadRow(place=row.place, id=row.id, code="invalid_request", message=message, columns=row.columns)


def _duplicate(row: Row | BadRow) -> BadRow:
    message = f"id {row.id!r} is that of an earlier row"
    return BadRow(place=row.place, id=row.id, code="duplicate_id", message=message, columns=row.columns)
