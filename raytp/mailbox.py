"""The callers' news, between the step loop that writes it and the actor calls that wait for it.

Used by `raytp.engine`, from any thread. Knows callers by their ids, and whether they still live by what they say.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from raytp.errors import EngineError
from raytp.outputs import CompletionUpdate

_MAX_GONE = 10_000
_MAX_PAUSE_S = 2.0
"""Between two looks for the silent. What goes beyond is no silence of theirs: this process may have stood still."""


class Mailbox:
    """One caller's: a list that can be waited for."""

    def __init__(self, is_closed: bool) -> None:
        self._updates: list[CompletionUpdate] = []
        self._is_closed = is_closed
        self._condition = threading.Condition()
        self.heard_at = time.monotonic()
        """When its caller last said anything."""

    def put(self, updates: list[CompletionUpdate]) -> None:
        """Add news and wake whoever waits."""
        with self._condition:
            self._updates.extend(updates)
            self._condition.notify_all()

    def take(self, timeout_s: float) -> list[CompletionUpdate]:
        """All news so far; waits up to `timeout_s` while there is none and the mailbox is open."""
        self.heard_at = time.monotonic()
        with self._condition:
            self._condition.wait_for(lambda: self._updates or self._is_closed, timeout_s)
            updates, self._updates = self._updates, []
            return updates

    def close(self) -> None:
        """No more news will come: do not keep anybody waiting."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()


class Mailroom:
    """All mailboxes. Iterating gives the callers that have one."""

    def __init__(self, silence_timeout_s: float | None) -> None:
        """`silence_timeout_s`: a caller that says nothing for so long counts as dead; None trusts it to say goodbye."""
        self._silence_timeout_s = silence_timeout_s
        self._mailboxes: dict[str, Mailbox] = {}
        self._given_up: set[str] = set()
        """Of those that have left, or are about to: who counted as dead, and is told so."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        """The latest of those that have left: what they had just asked for may arrive after their goodbye."""
        self._is_closed = False
        self._looked_at = time.monotonic()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._mailboxes))

    def __len__(self) -> int:
        return len(self._mailboxes)

    def put(self, client_id: str, updates: list[CompletionUpdate]) -> None:
        """News for a caller."""
        self._mailbox(client_id).put(updates)

    def take(self, client_id: str, timeout_s: float) -> list[CompletionUpdate]:
        """See `Mailbox.take`. Raises EngineError if the caller has been given up."""
        self._check_known(client_id)
        return self._mailbox(client_id).take(timeout_s)

    def expect_news(self, client_id: str) -> None:
        """A caller asks for something. Raises EngineError if it has been given up."""
        self._check_known(client_id)
        self._mailbox(client_id).heard_at = time.monotonic()

    def keep_waiting(self, client_ids: list[str]) -> None:
        """These callers live, though they may not ask for their news just now."""
        with self._lock:
            for client_id in client_ids:
                if client_id in self._mailboxes:
                    self._mailboxes[client_id].heard_at = time.monotonic()

    def give_up_silent(self) -> list[str]:
        """Callers that count as dead from now on; their mailboxes are still there."""
        if self._silence_timeout_s is None:
            return []
        with self._lock:
            self._forgive_pause()
            since = self._looked_at - self._silence_timeout_s
            silent = [client_id for client_id, mailbox in self._mailboxes.items() if mailbox.heard_at < since]
            self._given_up.update(silent)
        return silent

    def is_gone(self, client_id: str) -> bool:
        """Whether a caller has left, and nothing of it is wanted any more."""
        with self._lock:
            return client_id in self._gone

    def drop(self, client_id: str) -> None:
        """Do away with a caller's mailbox, for good, and wake it if it waits."""
        with self._lock:
            mailbox = self._mailboxes.pop(client_id, None)
            self._gone[client_id] = None
            while len(self._gone) > _MAX_GONE:
                forgotten, _ = self._gone.popitem(last=False)
                self._given_up.discard(forgotten)
        if mailbox is not None:
            mailbox.close()

    def close(self) -> None:
        """Nobody gets any more news, nor waits for it."""
        with self._lock:
            self._is_closed = True
            for mailbox in self._mailboxes.values():
                mailbox.close()

    def _forgive_pause(self) -> None:
        now = time.monotonic()
        excess, self._looked_at = now - self._looked_at - _MAX_PAUSE_S, now
        if excess > 0:
            for mailbox in self._mailboxes.values():
                mailbox.heard_at = min(now, mailbox.heard_at + excess)

    def _mailbox(self, client_id: str) -> Mailbox:
        with self._lock:
            if client_id in self._gone:
                return Mailbox(is_closed=True)
            return self._mailboxes.setdefault(client_id, Mailbox(self._is_closed))

    def _check_known(self, client_id: str) -> None:
        if client_id in self._given_up:
            raise EngineError(
                f"the engine heard nothing of this caller for {self._silence_timeout_s:g} s, took it for dead and "
                f"ended its requests: ask again"
            )
