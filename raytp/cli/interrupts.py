"""Ctrl-C is answered at once: what it ends may take seconds to end. SIGTERM is noted.

Called by `raytp.cli`'s commands.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_text = ""
_has_said = threading.Event()
_is_terminated = threading.Event()
_lock = threading.Lock()


def acknowledge_interrupts(text: str) -> None:
    """From now on the first Ctrl-C is answered by `text`, whatever the main thread is doing, and whoever handles it.

    Python writes the signal's number into a pipe at once, even if it has to wait for its turn to call the handler.
    Does nothing in another thread than the main one.
    """
    global _text
    if not _text and threading.current_thread() is threading.main_thread():
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_listen, args=(reader,), name="raytp-interrupts", daemon=True).start()
    _text = text
    _has_said.clear()


def leave_interrupts_alone() -> None:
    """Where Ctrl-C ends an answer, not the command."""
    _has_said.set()


def acknowledge() -> None:
    """Say so if it has not been said."""
    with _lock:
        if not _has_said.is_set():
            _has_said.set()
            print(_text, file=sys.stderr, flush=True)


def has_sigterm_arrived() -> bool:
    """Whether it has since `acknowledge_interrupts`, if somebody handles it; else this process has ended."""
    return _is_terminated.wait(0.1)  # the other thread may just be reading of it


def _listen(reader: int) -> None:
    while number := os.read(reader, 1):
        if number[0] == signal.SIGINT:
            acknowledge()
        elif number[0] == signal.SIGTERM:
            _is_terminated.set()
