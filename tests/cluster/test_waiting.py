"""What somebody reads who waits for a cluster."""

from __future__ import annotations

import pytest

from raytp import progress
from raytp.placement import describe_shortage
from raytp.progress import ProgressBar


@pytest.mark.parametrize(("enabled", "said"), [(None, "waiting for resources, 0 s so far\n"), (False, "")])
def test_a_log_says_what_is_waited_for(
    enabled: bool | None, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LOG_EVERY_S", 0.0)
    with ProgressBar("finding the model", enabled) as bar:
        bar.update("waiting for resources", 0.0)
    assert capsys.readouterr().err == said


def test_what_takes_no_time_leaves_a_log_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("finding the model", None) as bar:
        bar.update("starting Ray", 0.0)
    assert capsys.readouterr().err == ""


def test_an_engine_that_waits_for_cpus_is_told_how_to_wait_for_gpus(ray_session: None) -> None:
    assert "set device='cuda' (--device cuda)" in describe_shortage([{"CPU": 1.0}] * 99, "STRICT_PACK", 900.0)
    message = describe_shortage([{"GPU": 1.0}] * 4, "STRICT_PACK", 900.0)
    assert "did not give 4 GPU on one node within placement_timeout_s=900" in message
    assert "--device cuda" not in message
