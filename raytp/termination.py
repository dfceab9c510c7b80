"""SIGTERM as an exception: what has been started is ended on the way out, and a shell sees why the process ended.

Knows nothing of Ray and of commands. Called by those who handle SIGTERM, and by those who meet a SystemExit.
"""

from __future__ import annotations

import signal
from typing import NoReturn

EXIT_STATUS = 128 + signal.SIGTERM
"""As a shell reports it."""
_has_come = False


def terminate(*_: object) -> NoReturn:
    """A handler of SIGTERM. Raises SystemExit."""
    global _has_come
    _has_come = True
    raise SystemExit(EXIT_STATUS)


def is_termination(error: object) -> bool:
    """Whether SIGTERM is why it was raised. Calls that wait in Ray raise a SystemExit of their own in its place."""
    return _has_come and isinstance(error, SystemExit)
