"""One caller's news, between the step loop that writes it and the actor call that waits for it."""

from __future__ import annotations

import threading

from raytp.outputs import CompletionUpdate


class Mailbox:
    """A list that can be waited for."""

    def __init__(self, is_closed: bool = False) -> None:
        self._updates: list[CompletionUpdate] = []
        self._is_closed = is_closed
        self._condition = threading.Condition()

    def put(self, updates: list[CompletionUpdate]) -> None:
        """Add news and wake whoever waits."""
        with self._condition:
            self._updates.extend(updates)
            self._condition.notify_all()

    def take(self, timeout_s: float) -> list[CompletionUpdate]:
        """All news so far; waits up to `timeout_s` while there is none and the mailbox is open."""
        with self._condition:
            self._condition.wait_for(lambda: self._updates or self._is_closed, timeout_s)
            updates, self._updates = self._updates, []
            return updates

    def close(self) -> None:
        """No more news will come: do not keep anybody waiting."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
