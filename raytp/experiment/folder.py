"""The folder of an experiment's results: whose it is, and how files come into it. Called by `raytp.cli.experiment`.

A file is there as a whole or not at all, however the command ends, so that the folder stays one of results.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raytp.errors import ConfigError

RUNS_JSON, RUNS_CSV, SERIES_CSV, REPORT, COMPARISON = (
    "runs.json",
    "runs.csv",
    "series.csv",
    "report.html",
    "comparison.png",
)
_UNFINISHED = ".part"
_ALL = (f".*{_UNFINISHED}", RUNS_CSV, SERIES_CSV, REPORT, COMPARISON, "policy-*.png", RUNS_JSON)
"""Patterns of all files. That by which results are known as such goes last."""


@contextmanager
def claimed_folder(folder: Path) -> Iterator[None]:
    """Make it, or empty it of an earlier experiment's results; no other experiment can write to it in the block.

    Raises ConfigError if it holds anything else, or another one does that.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the output {folder} is a file, and must be a folder: name another one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror}") from None
    try:
        _lock(handle, folder)
        _empty(folder)
        yield
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another path, whose file takes the place of the one at `path` once the block has written it.

    Raises ConfigError for an OSError.
    """
    unfinished = path.with_name(f".{path.name}{_UNFINISHED}")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _lock(handle: int, folder: Path) -> None:
    """The system releases it however its holder ends. A file system without locks does without."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another experiment is writing to the folder {folder}: wait for its end, or name another --output"
        ) from None
    except OSError:
        return


def _empty(folder: Path) -> None:
    try:
        has_files = any(not file.name.endswith(_UNFINISHED) for file in folder.iterdir())
        if has_files and not _holds_results(folder):
            raise ConfigError(
                f"the folder {folder} holds something else than an experiment's results: name another --output"
            )
        for pattern in _ALL:
            for file in folder.glob(pattern):
                file.unlink()
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror}") from None


def _holds_results(folder: Path) -> bool:
    try:
        records = json.loads((folder / RUNS_JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(records, list) and all(isinstance(each, dict) and "experiment" in each for each in records)
