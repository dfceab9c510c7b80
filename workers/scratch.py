"""Folders that go with their process, also if it is killed: whoever makes one removes those that such have left.

The holder has a lock on a file in it, which the system takes away however it ends. Called by `workers.channel` and
`raytp.batch_job.locations`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "raytp-"
_LOCK_NAME = "raytp.lock"
"""No folder of anybody else's has such a file."""
_MIN_AGE_S = 60.0
"""A folder this young may not have its lock yet."""
_NAMES = f"{_PREFIX}????????"
"""As `tempfile.mkdtemp` makes them."""
NAME_LENGTH = len(_NAMES)


class ScratchFolder:
    """A new folder that only this user can enter. Raises OSError."""

    def __init__(self, parent: str | None = None) -> None:
        """`parent`: None is the folder for temporary files."""
        parent = tempfile.gettempdir() if parent is None else parent
        _remove_abandoned(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = -1
        try:
            self._lock = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Remove it, and all that is in it. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_NAMES}/{_LOCK_NAME}"):
        with contextlib.suppress(OSError):  # another user's, or one that is at work, or that goes just now
            if time.time() - lock.stat().st_mtime > _MIN_AGE_S:
                _remove_if_unlocked(lock)


def _remove_if_unlocked(lock: Path) -> None:
    opened = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    finally:
        os.close(opened)
