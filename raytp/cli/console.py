"""What the command says to a person: errors, notes and numbers, all on standard error.

Standard output is for results alone, so that it can be piped.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_results: TextIO | None = None
"""Standard output, while nobody else is to use it."""


def prepare_streams() -> None:
    """Never fail over a character: what the terminal lacks is shown as ?, and what is no text is refused later on.

    A stream that the shell has closed, which Python leaves out, reads as empty and takes everything.
    """
    global _results
    _results = None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for the rest of the process)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def print_error(error: Exception) -> None:
    """One red line. What follows in the words of a rank, such as its traceback, stands in the logs."""
    text = str(error) or type(error).__name__
    first, *rest = text.splitlines()
    is_of_ranks = re.search(r"\brank \d", text) is not None
    _print(f"error: {first if is_of_ranks else text}", "bold red")
    if rest and is_of_ranks:
        from raytp.ray_runtime import logs_folder

        print_note(f"the ranks' own words are in Ray's logs: {logs_folder()}")


def print_note(text: str) -> None:
    """One dim line."""
    _print(text, "dim")


def keep_results_apart() -> None:
    """From now on standard output is for `write` alone.

    What others print, such as Ray its news of dead workers, some of it at exit, goes to standard error.
    """
    global _results
    _results, sys.stdout = sys.stdout, sys.stderr


@contextmanager
def warnings_off() -> Iterator[None]:
    """Of the deaths of ranks, where they are asked for."""
    logger = logging.getLogger("raytp")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def write(text: str) -> None:
    """Put a result on standard output, at once."""
    out = _results or sys.stdout
    out.write(text)
    out.flush()


def discard_stdout() -> None:
    """Let what is still to be flushed at exit go nowhere: its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (_results or sys.stdout).fileno())


def _print(text: str, style: str) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(text, style=style, markup=False)
