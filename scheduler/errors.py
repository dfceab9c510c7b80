"""The root of the exception tree, and the errors that admission raises.

It stands in the lowest package so that every layer can raise from one tree; `raytp.errors` draws the whole of it.
"""

from __future__ import annotations


class RaytpError(Exception):
    """Root of every error that raytp raises for its users."""


class RequestError(RaytpError, ValueError):
    """One request cannot be served as it stands: its own fault. The message names value and limit."""


class ConfigError(RaytpError, ValueError):
    """A setting of the engine is out of its range, or two settings contradict each other."""
