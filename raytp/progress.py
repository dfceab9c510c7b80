"""Progress on standard error, for what takes longer than a moment: a line on a terminal, a word now and then in a log.

Called by `raytp.llm` and by commands.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_LOG_EVERY_S = 30.0


class ProgressBar:
    """A line that shows a stage and how far it is, if `enabled` is True, or None and stderr is a terminal.

    It goes away when it is done, so that only the results stay on the screen. Where stderr is no terminal, None gives a
    line every half a minute: a cluster may take minutes to add a node, and a job's log should say that it waits.
    """

    def __init__(self, description: str, enabled: bool | None) -> None:
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
        self._is_logged = enabled is None and not has_terminal and sys.stderr is not None
        self._start_s = self._logged_s = time.monotonic()

    def update(self, description: str, fraction: float) -> None:
        """Show what is being done and which part of it is done, from 0 to 1."""
        self._progress.update(self._task, description=description, completed=fraction)
        now = time.monotonic()
        if self._is_logged and now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            print(f"{description}, {now - self._start_s:.0f} s so far", file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
