"""Replicas that were of no use, and whether others may still be started. Kept by `raytp.replicas.pool`."""

from __future__ import annotations

_MAX_FAILURES = 3
"""One after another, before no more are started."""


class Failures:
    """What ended those that finished no row, since one that was started later has finished one."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []
        self._num_before = 0
        """Replicas that had been started at the latest of them."""

    def add(self, error: Exception, num_started: int) -> None:
        """One more, when so many have been started."""
        self._errors.append(error)
        self._num_before = num_started

    def forget(self, number: int) -> None:
        """The replica with this number has finished a row."""
        if number >= self._num_before:
            self._errors.clear()

    def allow_more(self, *, has_had_one: bool) -> bool:
        """Whether to start others. Before one has ever been ready, all that fail would fail again."""
        return not self._errors or (has_had_one and len(self._errors) < _MAX_FAILURES)

    @property
    def first(self) -> Exception:
        """What ended the first of them."""
        return self._errors[0]
