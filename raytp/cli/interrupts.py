"""Ctrl-C is answered at once: what it ends may take seconds to end. Neither it nor SIGTERM is lost.

Called by `raytp.cli`'s commands.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from raytp.termination import is_termination

_AGAIN = 0x80
"""In the pipe, beside a signal's number: it is to be sent once more."""
_AGAIN_AFTER_S = 0.1
_text = ""
_has_said = threading.Event()
_lock = threading.Lock()


def acknowledge_interrupts(text: str) -> None:
    """From now on the first Ctrl-C is answered by `text`, whatever the main thread is doing, and whoever handles it.

    Python writes the signal's number into a pipe at once, even if it has to wait for its turn to call the handler. What
    a handler raises where Python cannot pass it on, as in a `__del__`, is raised once more a moment later. Does nothing
    in another thread than the main one.
    """
    global _text
    if not _text and threading.current_thread() is threading.main_thread():
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        sys.unraisablehook = partial(_send_again, writer, sys.unraisablehook)
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


def _send_again(writer: int, report: Callable[[sys.UnraisableHookArgs], object], lost: sys.UnraisableHookArgs) -> None:
    """Python calls this when an exception is lost."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        number = signal.SIGINT
    elif is_termination(lost.exc_value):
        number = signal.SIGTERM
    else:
        report(lost)
        return
    os.write(writer, bytes([_AGAIN | number]))  # garbage may be collected anywhere: no lock can be taken here


def _listen(reader: int) -> None:
    while read := os.read(reader, 1):
        number = read[0] & ~_AGAIN
        if read[0] & _AGAIN:
            time.sleep(_AGAIN_AFTER_S)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)
        elif number == signal.SIGINT:
            acknowledge()
