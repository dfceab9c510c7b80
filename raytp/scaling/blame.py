"""Where in somebody's code an exception was raised, in words. Called by `loading` and `scaler`, for policies."""

from __future__ import annotations

import importlib
import traceback


def raised(error: BaseException) -> str:
    """Such as "raised KeyError: 3 (follow.py, line 7: return table[seen.target])": what, and the innermost line.

    Must be called where the exception was caught. The catcher's own frame does not count, nor do those that import.
    """
    what = f"raised {type(error).__name__}: {error}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[1:]
        if not frame.filename.startswith("<frozen ") and frame.filename != importlib.__file__
    ]
    if not frames or isinstance(error, SyntaxError):  # which names the line itself
        return what
    line = f": {frames[-1].line}" if frames[-1].line else ""
    return f"{what} ({frames[-1].filename}, line {frames[-1].lineno}{line})"
