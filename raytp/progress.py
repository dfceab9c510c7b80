"""Progress on standard error, for what takes longer than a moment: a line on a terminal, a word now and then in a log.

Called by `raytp.llm`, by batch jobs and by commands.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_LOG_EVERY_S = 10.0
_FIRST_AFTER_S = 1.0
"""Until a log hears of a stage that nobody has told of yet: most are over by then."""
_ALMOST_DONE = 1.0 - 1e-6
"""For rich a task that is done moves no more, and its clock stands still; here the next stage may follow."""


class ProgressBar:
    """A line that shows a stage and how far it is, if `enabled` is True, or None and stderr is a terminal.

    It goes away when it is done, so that only the results stay on the screen. Where stderr is no terminal, None gives a
    line every ten seconds, as it is updated: a cluster may take minutes to add a node, and a job's log should say that
    it waits. With `names_stages`, for what a person waits for, the log gets a line for each new stage too, and the line
    every ten seconds even if a stage says nothing.
    """

    def __init__(self, description: str, enabled: bool | None, *, names_stages: bool = False) -> None:
        has_terminal = sys.stderr is not None and sys.stderr.isatty()  # None if the shell has closed it
        is_enabled = has_terminal if enabled is None else enabled
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not is_enabled,
        )
        self._task = self._progress.add_task(description, total=1.0)
        is_logged = enabled is None and not has_terminal and sys.stderr is not None
        self._log = _Log(description, names_stages) if is_logged else None

    def update(self, description: str, fraction: float) -> None:
        """Show what is being done and which part of it is done, from 0 to 1."""
        self._progress.update(self._task, description=description, completed=min(fraction, _ALMOST_DONE))
        if self._log is not None:
            self._log.update(description)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        if self._log is not None:
            self._log.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.stop()
        self._progress.stop()


class _Log:
    """The lines in a log."""

    def __init__(self, stage: str, names_stages: bool) -> None:
        self._stage = stage
        self._names_stages = names_stages
        self._said = ""
        """The stage of the latest line."""
        self._start_s = self._said_s = time.monotonic()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_saying, name="raytp-progress", daemon=True)

    def start(self) -> None:
        if self._names_stages:
            self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._names_stages:
            self._thread.join()

    def update(self, stage: str) -> None:
        """Say so if it is a new one, or if the latest line is long ago."""
        with self._lock:
            self._stage = stage
            if self._names_stages and stage != self._said:
                self._say(stage)
            else:
                self._say_if_due()

    def _keep_saying(self) -> None:
        """What is stuck in one call does not update."""
        while not self._is_over.wait(_FIRST_AFTER_S):
            with self._lock:
                if self._stage != self._said:
                    self._say(self._stage)
                else:
                    self._say_if_due()

    def _say_if_due(self) -> None:
        if time.monotonic() - self._said_s >= _LOG_EVERY_S:
            self._say(f"{self._stage}, {time.monotonic() - self._start_s:.0f} s so far")

    def _say(self, line: str) -> None:
        self._said, self._said_s = self._stage, time.monotonic()
        print(line, file=sys.stderr, flush=True)
