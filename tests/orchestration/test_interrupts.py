"""Ctrl-C ends a command whatever its threads do."""

from __future__ import annotations

import signal
import subprocess
import sys

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
