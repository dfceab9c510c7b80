"""Tables hold exactly what the results are, and their folder is never somebody else's."""

from __future__ import annotations

import csv
import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from raytp.errors import ConfigError
from raytp.experiment.folder import claimed_folder, replacing
from raytp.experiment.running import Outcome
from raytp.experiment.spec import ExperimentSpec
from raytp.experiment.tables import write_tables
from tests.experiment.small_experiment import run

FAILURES = [{"lose_node": {"at_s": 5.0, "node": 0}}, {"slow_steps": {"seconds": 0.001, "replica": None}}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExperimentSpec, list[Outcome], Path]:
    folder = tmp_path_factory.mktemp("tables")
    spec, outcomes = run(folder, policies=["fixed", "queue:2", "math:floor"], failures=FAILURES)
    write_tables(folder, spec, outcomes)
    return spec, outcomes, folder


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_json_is_the_results(made: tuple[ExperimentSpec, list[Outcome], Path]) -> None:
    spec, outcomes, folder = made
    records = json.loads((folder / "runs.json").read_text())
    assert len(records) == len(outcomes) == 6
    for record, outcome in zip(records, outcomes, strict=True):
        assert (record["policy"], record["seed"], record["error"]) == (outcome.policy, outcome.seed, outcome.error)
        assert record["failures"] == FAILURES
        assert record["spec"]["cluster"]["kind"] == "simulated"
        assert record["spec"]["workload"]["rate"] == spec.workload.rate
        assert set(record["versions"]) == {"raytp", "python", "ray", "torch", "numpy"}
        if outcome.results is None:
            assert record["seconds"] is record["latency_s"] is record["cost"] is None
        else:
            summary = outcome.results.summary(spec.price_per_gpu_hour)
            assert {name: record[name] for name in summary} == summary
            assert record["cost"] == pytest.approx(outcome.results.gpu_seconds / 3600 * 3.5)


def test_the_csv_is_the_json(made: tuple[ExperimentSpec, list[Outcome], Path]) -> None:
    _, _, folder = made
    records = json.loads((folder / "runs.json").read_text())
    for row, record in zip(read_csv(folder / "runs.csv"), records, strict=True):
        assert (row.pop("policy"), int(row.pop("seed"))) == (record["policy"], record["seed"])
        assert json.loads(row.pop("failures")) == record["failures"]
        assert (row.pop("error") or None) == record["error"]
        for name, text in row.items():
            wanted: Any = record.get(name)
            if name not in record:
                key, percent, _ = name.rsplit("_", 2)
                wanted = record["latency_s"] and record["latency_s"][key][percent]
            assert (float(text) if text else None) == wanted, name


def test_the_series_are_the_ticks(made: tuple[ExperimentSpec, list[Outcome], Path]) -> None:
    _, outcomes, folder = made
    rows = read_csv(folder / "series.csv")
    expected = [
        {"policy": each.policy, "seed": each.seed, **asdict(tick)}
        for each in outcomes
        if each.results is not None
        for tick in each.results.ticks
    ]
    assert len(rows) == len(expected) > 20
    for row, wanted in zip(rows, expected, strict=True):
        assert row.pop("policy") == wanted.pop("policy")
        assert {name: float(text) for name, text in row.items()} == wanted


def test_a_folder_is_made_or_taken_over_from_an_earlier_experiment(
    made: tuple[ExperimentSpec, list[Outcome], Path], tmp_path: Path
) -> None:
    spec, outcomes, _ = made
    folder = tmp_path / "some" / "results"
    for _ in range(2):
        with claimed_folder(folder):
            assert list(folder.iterdir()) == []
    write_tables(folder, spec, outcomes)
    for name in ("policy-1-fixed.png", "report.html", "notes.txt"):
        (folder / name).write_text("old")
    (folder / ".runs.json.part").write_text("killed while it was written")
    with claimed_folder(folder):
        assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("content", [{"notes.txt": "mine"}, {"runs.json": "{}"}, {"runs.json": '[{"workload": "x"}]'}])
def test_what_is_somebody_else_s_is_left_alone(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="something else"):
        claimed_folder(tmp_path).__enter__()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == content
    with pytest.raises(ConfigError, match="is a file"):
        claimed_folder(tmp_path / next(iter(content))).__enter__()


def test_a_folder_is_one_experiment_s_at_a_time(tmp_path: Path) -> None:
    with claimed_folder(tmp_path), pytest.raises(ConfigError, match="another experiment is writing"):
        claimed_folder(tmp_path).__enter__()
    with claimed_folder(tmp_path):
        pass


def test_a_file_that_cannot_be_finished_leaves_the_one_before(tmp_path: Path) -> None:
    def write_until_the_disk_is_full() -> None:
        with replacing(tmp_path / "runs.json") as path:
            path.write_text("half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "runs.json").write_text("before")
    with pytest.raises(ConfigError, match="json cannot be written: No space"):
        write_until_the_disk_is_full()
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"runs.json": "before"}
