"""Callers that say nothing, and how long they are remembered."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from raytp import mailbox
from raytp.errors import EngineError
from raytp.mailbox import Mailroom


def test_a_caller_that_was_given_up_is_told_so_and_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_MAX_GONE", 3)
    room = Mailroom(silence_timeout_s=0.001)
    for number in range(10):
        room.expect_news(f"caller {number}")
        time.sleep(0.005)
        assert room.give_up_silent() == [f"caller {number}"]
        room.drop(f"caller {number}")
    for number in (7, 8, 9):
        with pytest.raises(EngineError, match="took it for dead"):
            room.take(f"caller {number}", 0.0)
    room.expect_news("caller 0")


def test_nobody_was_silent_while_the_engine_itself_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]
    monkeypatch.setattr(mailbox, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    room = Mailroom(silence_timeout_s=30.0)
    room.expect_news("caller")
    clock_s[0] = 3600.0
    while not room.give_up_silent():
        clock_s[0] += 1.0
    assert 3628 <= clock_s[0] <= 3632
