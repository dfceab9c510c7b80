"""The root of the exception tree, and the errors that admission raises.

It stands in the lowest package so that every layer can raise from one tree; `raytp.errors` draws the whole of it.
"""

from __future__ import annotations

import reprlib

_MAX_SHOWN = 200
_PRINTER = reprlib.Repr()
_PRINTER.maxstring = _PRINTER.maxlong = _PRINTER.maxother = 100


class RaytpError(Exception):
    """Root of every error that raytp raises for its users."""


class RequestError(RaytpError, ValueError):
    """One request cannot be served as it stands: its own fault. The message names value and limit."""


class ConfigError(RaytpError, ValueError):
    """A setting of the engine is out of its range, or two settings contradict each other."""


def shown(value: object) -> str:
    """A value as a message shows it: short, whatever it is."""
    if isinstance(value, int) and abs(value) >= 10**100:
        return "an integer of over 100 digits"
    try:
        text = _PRINTER.repr(value)
    except Exception:  # it holds such an integer, for which Python has no words from 4,300 digits on
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
