"""MIN:MAX, as users write it. Called by whoever reads what they write; knows nothing of what is counted."""

from __future__ import annotations

import re
from typing import Any

from raytp.errors import ConfigError
from scheduler.errors import shown

_TEXT = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def read_limits(value: Any, label: str, most: int, least: int = 0) -> tuple[int, int]:
    """MIN and MAX of N, "N", "MIN:MAX" or (MIN, MAX); N alone is N:N.

    `label` is what errors call it. Raises ConfigError.
    """
    if isinstance(value, str) and (match := _TEXT.fullmatch(value.strip())):
        both = [int(match[1]), int(match[2] or match[1])]
    else:
        both = list(value) if isinstance(value, tuple | list) else [value, value]
    if len(both) != 2 or not all(isinstance(each, int) and not isinstance(each, bool) for each in both):
        raise ConfigError(f"{label} is {shown(value)}, and must be COUNT or MIN:MAX, such as 4 or 1:16")
    low, high = both
    if not least <= low <= high <= most or high < 1:
        raise ConfigError(
            f"{label} is {shown(value)}: MIN must be at least {least}, MAX at least MIN and 1, and at most {most}"
        )
    return low, high
