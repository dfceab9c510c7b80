"""A process at a terminal. Called by the tests of the command line."""

from __future__ import annotations

import os
import pty
import select
import signal
import time


class Terminal:
    """A process whose controlling terminal is a pseudo-terminal, and the person in front of it."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execve(command[0], command, env | {"TERM": "dumb"})
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Read on until `text` has appeared, and go on behind it."""
        deadline = time.monotonic() + 60
        while text not in self._unread:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not appear in {self._unread[-2000:]!r}"
            self._unread += os.read(self._fd, 4096).decode(errors="replace")
        self._unread = self._unread.partition(text)[2]

    def wait_for_prompt(self) -> None:
        """CPython's readline shows it before it listens: a Ctrl-C faster than people are would wait for a next key."""
        self.wait_for("> ")
        time.sleep(1.0)

    def exit_code(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._pid = 0
                return os.waitstatus_to_exitcode(status)
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    os.read(self._fd, 4096)
                except OSError:  # the other end is closed
                    time.sleep(0.1)
        raise AssertionError(f"still running after {timeout_s} s")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)
