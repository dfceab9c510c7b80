"""Who may use the Ray of fake nodes: this process has a token for it, and has forgotten it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
