"""`raytp chaos`: what it plans, what it says of a real engine, and that it does not call a failure a success."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytp.chaos import STARTING, ChaosReport, FaultOutcome, plan_faults
from raytp.cli import app
from raytp.errors import ConfigError
from workers.faults import KINDS, Fault

TRIVIA = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"


def test_plans_are_made_by_seed_and_each_fault_meets_ranks_that_live() -> None:
    assert plan_faults(7, 20, 2) == plan_faults(7, 20, 2) != plan_faults(8, 20, 2)
    for seed in range(200):
        faults = plan_faults(seed, 12, 3)
        num_ended = 0
        for fault in faults:
            assert fault.epoch == num_ended, "one fatal fault for each epoch"
            assert num_ended or fault.point not in STARTING, "the first start is not to fail"
            assert fault.kind == "delay" or not num_ended or fault.point != "prefill"
            num_ended += fault.kind != "delay"
    drawn = Counter(fault.kind for seed in range(50) for fault in plan_faults(seed, 10, 2))
    assert set(drawn) == set(KINDS)
    assert {fault.rank for fault in plan_faults(0, 40, 3)} == {0, 1, 2}
    assert {fault.kind for fault in plan_faults(0, 40, 3, ("stop", "delay"))} == {"stop", "delay"}


@pytest.mark.parametrize("kinds", [("bite",), ("kill", ""), ()])
def test_kinds_that_are_none_are_refused(kinds: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"kinds=.* must name kinds of faults, among kill, stop"):
        plan_faults(0, 3, 2, kinds)


def test_what_is_lost_changed_or_did_not_happen_is_no_success() -> None:
    killed, late = (Fault(kind=kind, rank=0, point="decode") for kind in ("kill", "delay"))
    good = ChaosReport(
        outcomes=(FaultOutcome(fault=killed, noticed_s=1.0, rebuild_s=2.0, report="died"), FaultOutcome(fault=late)),
        num_requests=3,
        num_lost=0,
        num_changed=0,
        undisturbed_s=1.0,
        disturbed_s=4.0,
    )
    assert good.is_ok
    for change in ({"num_lost": 1}, {"num_changed": 1}, {"outcomes": (FaultOutcome(fault=killed),)}):
        assert not dataclasses.replace(good, **change).is_ok  # type: ignore[arg-type]


@pytest.mark.usefixtures("ray_session")
def test_an_engine_under_faults_loses_nothing_and_the_command_says_so() -> None:
    options = ["-t", "2", "--device", "cpu", "--seed", "9", "--faults", "3", "--requests", "40", "--json", "--quiet"]
    result = CliRunner().invoke(app, ["chaos", str(TRIVIA), *options, "--kinds", "kill,raise,corrupt"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "", "deaths that were asked for are no news"
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["is_ok"], report["num_requests"], report["num_lost"], report["num_changed"]) == (True, 40, 0, 0)
    faults = [Fault(**outcome["fault"]) for outcome in report["outcomes"]]
    assert faults == list(plan_faults(9, 3, 2, ("kill", "raise", "corrupt")))
    assert {fault.kind for fault in faults} == {"kill", "raise", "corrupt"}
    for outcome in report["outcomes"]:
        assert 0 < outcome["noticed_s"] < report["disturbed_s"]
        assert 0 < outcome["rebuild_s"] < report["disturbed_s"]
        assert "rank " in outcome["report"]


def test_too_few_requests_for_the_faults_are_refused() -> None:
    result = CliRunner().invoke(app, ["chaos", str(TRIVIA), "--faults", "5", "--requests", "5"])
    assert result.exit_code == 2
    assert "num_requests=5 must be at least 6 for 5 faults" in result.stderr
