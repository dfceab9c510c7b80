"""Which deaths of ranks count towards the end of the engine, and which are nobody's fault."""

from __future__ import annotations

import time
from typing import Any

import pytest

from raytp import succession
from raytp.errors import EngineError
from raytp.outputs import Failure
from raytp.succession import Succession

DIED = Failure(report="killed", is_accident=False)
LOST = Failure(report="its node was lost", is_accident=True)


def die(ranks: Succession, failure: Failure, *, was_idle: bool = False, was_trial: bool = False) -> bool:
    """Whether it was excused."""
    is_excused = ranks.is_excused(failure)
    ranks.count_death(failure.report, was_trial=was_trial, was_excused=is_excused, was_idle=was_idle)
    return is_excused


def make() -> Succession:
    no_source: Any = None
    return Succession(no_source, max_restarts=2)


def test_deaths_in_a_row_end_the_engine_and_a_finished_step_begins_anew() -> None:
    ranks = make()
    for _ in range(3):
        die(ranks, DIED)
        die(ranks, DIED)
        ranks.count_step()
    die(ranks, DIED)
    die(ranks, DIED)
    with pytest.raises(EngineError, match=r"died 3 times in a row .*max_restarts=2"):
        die(ranks, DIED)


def test_an_accident_is_nobody_s_fault_and_the_next_one_in_a_row_may_be_a_request_s() -> None:
    """One that needs more memory than there is kills the ranks each time that it is computed."""
    ranks = make()
    for _ in range(5):
        assert die(ranks, LOST)
        ranks.count_step()
    assert [die(ranks, LOST) for _ in range(3)] == [True, False, False]
    with pytest.raises(EngineError):
        die(ranks, LOST)


def test_an_idle_engine_may_lose_its_ranks_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On nodes that are taken away every night, say; not where ranks die as soon as they are ready."""
    ranks, now = make(), time.monotonic()
    for night in range(1, 10):
        monkeypatch.setattr(succession.time, "monotonic", lambda night=night: now + 1000 * night)
        die(ranks, DIED, was_idle=True)
    ranks._ready_at = now + 9000
    die(ranks, DIED, was_idle=True)
    with pytest.raises(EngineError):
        die(ranks, DIED, was_idle=True)
