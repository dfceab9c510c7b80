"""How long what is simulated may take. Called by whoever makes a simulation's input.

Without a bound a time stamp in place of a time since the beginning, say, would be simulated for ever.
"""

from __future__ import annotations

from typing import Any

from raytp.errors import ConfigError
from scheduler.errors import shown

MAX_SECONDS = 1e8
"""Three years."""


def check_seconds(name: str, value: Any, *, may_be_zero: bool = True) -> None:
    """Raises ConfigError if it is no number of seconds within limits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_SECONDS or (value == 0 and not may_be_zero):
        least = "at least 0" if may_be_zero else "above 0"
        raise ConfigError(f"{name}={shown(value)} must be a number of seconds, {least} and at most {MAX_SECONDS:g}")
