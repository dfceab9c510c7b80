"""Signals end a command whatever it is doing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_A_COMMAND_WITH_A_SLOW_THREAD = """
import threading
import time

from raytp.cli.main import app

@app.command()
def wait():
    threading.Thread(target=time.sleep, args=(300,)).start()
    print("waiting", flush=True)
    time.sleep(300)

app(["wait"])
"""


def test_a_second_ctrl_c_does_not_wait_for_threads() -> None:
    command = [sys.executable, "-c", _A_COMMAND_WITH_A_SLOW_THREAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
            said = [process.stderr.readline() for _ in range(2)]
            process.send_signal(signal.SIGINT)
            status = process.wait(30)
        finally:
            process.kill()
    assert said == ["stopping, which may take a few seconds\n", "interrupted\n"]
    assert status == 130


_A_COMMAND_THAT_CANNOT_RAISE_NOW = """
import time

from raytp.cli.main import app
from raytp.ray_runtime import interrupt_deferred

class Slow:
    def __del__(self):
        print("what is raised here is lost", flush=True)
        time.sleep(300)

@app.command()
def wait():
    with interrupt_deferred():  # from now on SIGTERM is handled
        pass
    slow = Slow()
    del slow
    print("lost", flush=True)
    time.sleep(300)

app(["wait"])
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_comes_while_garbage_is_collected_is_not_lost(number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-c", _A_COMMAND_THAT_CANNOT_RAISE_NOW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "what is raised here is lost\n"
            process.send_signal(number)
            out, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out) == (status, "lost\n"), errors
    assert "Exception ignored" not in errors
