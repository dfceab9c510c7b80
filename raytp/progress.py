"""Progress on a terminal's standard error, for what takes longer than a moment. Called by `raytp.llm`."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ProgressBar:
    """A line that shows a stage and how far it is; nothing if `enabled` is False, or None and stderr is no terminal.

    It goes away when it is done, so that only the results stay on the screen.
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

    def update(self, description: str, fraction: float) -> None:
        """Show what is being done and which part of it is done, from 0 to 1."""
        self._progress.update(self._task, description=description, completed=fraction)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
