"""What somebody reads who waits: at a terminal, and in a log."""

from __future__ import annotations

import time

import pytest

from raytp import progress
from raytp.progress import ProgressBar


@pytest.fixture
def quick_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST_AFTER_S", 0.15)
    monkeypatch.setattr(progress, "_LOG_EVERY_S", 0.3)


@pytest.mark.usefixtures("quick_log")
def test_a_log_names_each_stage_and_repeats_one_that_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("finding the model", None, names_stages=True) as bar:
        for fraction in (0.0, 0.5):
            bar.update("loading weights", fraction)
        bar.update("starting Ray", 0.0)
        time.sleep(0.5)  # in one call, without a word
    lines = capsys.readouterr().err.splitlines()  # on a busy machine it may be said again
    assert lines[:3] == ["loading weights", "starting Ray", "starting Ray, 0 s so far"]


@pytest.mark.usefixtures("quick_log")
def test_a_log_names_the_first_stage_only_if_it_takes_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("finding the model", None, names_stages=True):
        pass
    with ProgressBar("starting Ray", None, names_stages=True):
        time.sleep(0.4)
    assert capsys.readouterr().err.splitlines()[0] == "starting Ray"


def test_a_stage_that_is_done_stops_no_clock() -> None:
    with ProgressBar("converting", True) as bar:
        bar.update("converting", 1.0)
        [task] = bar._progress.tasks
        assert (f"{task.percentage:.0f}%", task.finished) == ("100%", False)
