"""A scratch folder goes with its process, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workers import scratch
from workers.scratch import ScratchFolder

_HOLDER = """
import sys
from workers.scratch import ScratchFolder
print(ScratchFolder(sys.argv[1]).path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_MIN_AGE_S", 0.0)
    for name in ("raytp-of-a-user", "raytp-my_files"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (theirs / "part").write_text("half")
        ScratchFolder(str(tmp_path)).close()
        assert (theirs / "part").exists(), "its process is at work"
        os.kill(process.pid, signal.SIGKILL)
    own = ScratchFolder(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {own.path.name, "raytp-of-a-user", "raytp-my_files"}
    assert own.path.stat().st_mode & 0o777 == 0o700
    own.close()
    own.close()
    assert not own.path.exists()


def test_a_folder_that_cannot_be_locked_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that knows no locks."""

    def refuse(*_: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="no locks available"):
        ScratchFolder(str(tmp_path))
    assert not list(tmp_path.iterdir())
