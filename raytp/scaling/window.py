"""How many rows a replica may have. Called by whoever hands them out: `raytp.replicas`, and the simulator's router."""

from __future__ import annotations

_SPARE = 4
"""One row in four that a replica can run waits at it, so that it never waits for rows."""
_MIN_SPARE = 8


def rows_window(rows_at_once: int) -> int:
    """Rows that a replica which runs `rows_at_once` may have: those, and some that wait at it."""
    return rows_at_once + max(_MIN_SPARE, rows_at_once // _SPARE)
