"""Who may use the Ray of fake nodes, and that nothing of it stays: no token, and no head."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raytp.experiment import fake_cluster
from raytp.experiment.spec import ClusterSpec

SCRIPT = """
import os
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode
from raytp.experiment.fake_cluster import _authentication

def show():
    print(get_authentication_mode() == AuthenticationMode.TOKEN, len(os.environ.get("RAY_AUTH_TOKEN", "")))

for _ in range(2):
    with _authentication():
        print(AuthenticationTokenLoader.instance().has_token(), end=" ")
        show()
    show()
"""


@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        (None, ["True True 64", "False 0"] * 2),
        ("disabled", ["False False 0", "False 0"] * 2),
    ],
)
def test_ray_asks_for_a_token_unless_it_is_told_not_to(tmp_path: Path, mode: str | None, lines: list[str]) -> None:
    env = {name: text for name, text in os.environ.items() if not name.startswith("RAY_AUTH")}
    env |= {"HOME": str(tmp_path)} | ({} if mode is None else {"RAY_AUTH_MODE": mode})
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == lines
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("guard", "cause"), [(os.devnull, KeyboardInterrupt), ("/dev/full", OSError)])
def test_a_head_that_has_just_started_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guard: str, cause: type[BaseException]
) -> None:
    """By Ctrl-C while it started, or because its guard cannot be told."""
    heads: list[subprocess.Popen[bytes]] = []

    def start(*_: Any) -> subprocess.Popen[bytes]:
        heads.append(subprocess.Popen(["sleep", "300"], start_new_session=True))
        if cause is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        return heads[0]

    monkeypatch.setattr(fake_cluster, "_start_head", start)
    with open(guard, "wb", buffering=0) as file, pytest.raises(cause):
        next(fake_cluster._run(ClusterSpec(), tmp_path, file))
    assert heads[0].wait(10) == -signal.SIGKILL
