"""Where in somebody's code an exception was raised, in words. Called by `loading` and `scaler`, for policies."""

from __future__ import annotations

import importlib
import sysconfig
import traceback

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def raised(error: BaseException) -> str:
    """Such as "raised KeyError: 3 (follow.py, line 7: return table[seen.target])": what, and the innermost line.

    Of their own code, that is: lines of installed libraries count only if there are no others. Must be called where the
    exception was caught: the catcher's own frame does not count either, nor do those that import.
    """
    what = f"raised {type(error).__name__}: {error}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[1:]
        if not frame.filename.startswith("<frozen ") and frame.filename != importlib.__file__
    ]
    if not frames or isinstance(error, SyntaxError):  # which names the line itself
        return what
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    innermost = own[-1]
    line = f": {innermost.line}" if innermost.line else ""
    return f"{what} ({innermost.filename}, line {innermost.lineno}{line})"
