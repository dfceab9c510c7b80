"""Ends a fake cluster whose owner has been killed, by SIGKILL too.

A program of its own, of the standard library alone, and a module. The owner is `raytp.experiment.fake_cluster`, which
holds the other end of this program's standard input, and calls `kill_session` itself at any other end.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_END_TIMEOUT_S = 15.0


def main(folder: str) -> None:
    """Read the session of the cluster's processes, and wait: there is nobody to write more.

    `folder` is the cluster's: it goes with it.
    """
    session = sys.stdin.readline()
    sys.stdin.read()
    if session:
        kill_session(int(session))
    shutil.rmtree(folder, ignore_errors=True)


def processes() -> list[int]:
    """Those of this machine."""
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def kill_session(session: int) -> None:
    """SIGKILL all of its processes, the autoscaler first, since it would start others."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while True:
        left = [pid for pid in processes() if _session_of(pid) == session]
        for pid in sorted(left, key=lambda pid: not _is_monitor(pid)):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _session_of(pid: int) -> int | None:
    """None if it has ended, or only waits for somebody to ask how."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[3])


def _is_monitor(pid: int) -> bool:
    try:
        return b"monitor.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
