"""How far a job is: a bar on a terminal, else a line every ten seconds, and the summary. Called by `job` and `api`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from raytp.batch_job.manifest import Counts
from raytp.replicas.crew import Crew, count_text

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """What a job has done. Tokens and rates are those of this run; rows, of earlier runs too."""

    status: str
    """"complete", "interrupted" or "too many failures"."""
    num_rows: int
    """Rows that have their record."""
    num_succeeded: int
    num_failed: int
    num_done_earlier: int
    """Those of `num_rows` that an earlier run has done."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    seconds: float
    """From the first row's reading to the last commit."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    error_codes: dict[str, int] = field(default_factory=dict)
    """Rows that failed, by code."""
    output: str = ""
    errors: str | None = None
    max_replicas: int | None = None
    """Most that were ready at once; None if the job had an engine without replicas."""
    max_nodes: int | None = None
    """Most nodes that they had ranks on."""

    def as_text(self) -> str:
        """In one line."""
        text = f"{self.num_rows:,} rows, {self.num_failed:,} failed"
        if self.num_done_earlier:
            text += f", {self.num_done_earlier:,} done earlier"
        text += f"; {_duration(self.seconds)}"
        if self.num_prompt_tokens:
            text += f", {self.prompt_tokens_per_s:,.0f} tok/s in, {self.output_tokens_per_s:,.0f} tok/s out"
            text += f", {self.num_cached_tokens / self.num_prompt_tokens:.0%} cached"
        if self.max_replicas is not None:
            text += f", at most {count_text(self.max_replicas, self.max_nodes or 0)}"
        codes = ", ".join(f"{num:,} {code}" for code, num in sorted(self.error_codes.items()))
        return f"{text}; failures: {codes}" if codes else text


class JobProgress:
    """Counts what is done, and shows it now and then on standard error. A context manager."""

    def __init__(self, earlier: Counts, is_shown: bool | None, crew: Callable[[], Crew] | None = None) -> None:
        """`is_shown` None or True: as a bar on a terminal, else as lines. False: not at all.

        `crew` tells what replicas there are; None if there are none.
        """
        self.counts = Counts()
        """Of this run alone."""
        self._num_earlier = earlier.num_rows
        self._num_failed_earlier = earlier.num_failed
        self._is_shown = is_shown is not False
        self._start_s = self._shown_s = self._looked_s = time.monotonic()
        self._look = crew
        self._crew: Crew | None = None
        self._max_replicas = self._max_nodes = 0
        console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(bar_width=30),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not (self._is_shown and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> JobProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def num_failed(self) -> int:
        """Rows that have failed, earlier runs' included."""
        return self._num_failed_earlier + self.counts.num_failed

    def show(self, num_read: int, fraction_read: float) -> None:
        """Show it, if the last time is long enough ago: rows read so far, and which part of the input they are."""
        now = time.monotonic()
        if self._look is not None and now - self._looked_s >= _BAR_EVERY_S:
            self._looked_s, self._crew = now, self._look()
            self._max_replicas = max(self._max_replicas, self._crew.num_ready)
            self._max_nodes = max(self._max_nodes, self._crew.num_nodes)
        if not self._is_shown or now - self._shown_s < (_LINE_EVERY_S if self._bar.disable else _BAR_EVERY_S):
            return
        self._shown_s = now
        text, fraction = self._line(num_read, fraction_read)
        if self._bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.update(self._task, description=text, completed=fraction)

    def note(self, text: str) -> None:
        """Show one line at once."""
        if self._is_shown:
            self._bar.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def summary(self, status: str, total: Counts, output: str, errors: str | None) -> BatchSummary:
        """What was done until now; `total` is of all runs."""
        seconds = max(1e-9, time.monotonic() - self._start_s)
        return BatchSummary(
            status=status,
            num_rows=total.num_rows,
            num_succeeded=total.num_succeeded,
            num_failed=total.num_failed,
            num_done_earlier=self._num_earlier,
            num_prompt_tokens=self.counts.num_prompt_tokens,
            num_cached_tokens=self.counts.num_cached_tokens,
            num_output_tokens=self.counts.num_output_tokens,
            seconds=seconds,
            prompt_tokens_per_s=self.counts.num_prompt_tokens / seconds,
            output_tokens_per_s=self.counts.num_output_tokens / seconds,
            error_codes=dict(total.error_codes),
            output=output,
            errors=errors,
            max_replicas=None if self._look is None else self._max_replicas,
            max_nodes=None if self._look is None else self._max_nodes,
        )

    def _line(self, num_read: int, fraction_read: float) -> tuple[str, float]:
        """(the line, which part of the rows is done)"""
        counts, seconds = self.counts, max(1e-9, time.monotonic() - self._start_s)
        num_done = self._num_earlier + counts.num_rows
        num_total = max(num_done, num_read / fraction_read if fraction_read else 0.0)
        fraction = num_done / num_total if num_total else 0.0
        about = "" if fraction_read >= 1 else "about "
        text = f"{num_done:,} of {about}{num_total:,.0f} rows ({fraction:.0%}), {self.num_failed:,} failed"
        text += f" | {counts.num_prompt_tokens / seconds:,.0f} tok/s in"
        text += f", {counts.num_output_tokens / seconds:,.0f} out"
        text += f", {counts.num_cached_tokens / max(1, counts.num_prompt_tokens):.0%} cached"
        if self._crew is not None:
            text += f" | {self._crew.as_text()}"
        if counts.num_rows:
            text += f" | {_duration((num_total - num_done) * seconds / counts.num_rows)} left"
        return text, fraction


def _duration(seconds: float) -> str:
    whole = int(seconds)
    return f"{seconds:.1f} s" if whole < 60 else f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
