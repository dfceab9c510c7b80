"""`raytp experiment` and `raytp simulate` as a shell has them, in this process."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from raytp.cli import app
from raytp.cli.experiment import EXPERIMENT_EXAMPLES
from raytp.experiment.reading import read_experiment
from tests.experiment.small_experiment import write

FILES = {"runs.csv", "runs.json", "series.csv", "report.html", "comparison.png"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where modules of policies are found is undone, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])


def raytp(*arguments: str, columns: int = 120) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": str(columns)})


def records_of(folder: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((folder / "runs.json").read_text())
    return records


def test_an_experiment_leaves_tables_pictures_and_a_report(tmp_path: Path) -> None:
    """The table is whole, though it is wider than the terminal."""
    write(tmp_path / "small.yaml")
    done = raytp("experiment", "small.yaml", columns=30)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (0, "report: small-results/report.html")
    folder = tmp_path / "small-results"
    pictures = {"policy-1-fixed.png", "policy-2-queue-2.png", "policy-3-deadline-20.png"}
    assert {path.name for path in folder.iterdir()} == FILES | pictures
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][-3:] == ["fixed", "queue:2", "deadline:20"]
    seconds = [[each["seconds"] for each in records_of(folder) if each["policy"] == name] for name in lines[0][-3:]]
    assert lines[1] == ["seconds", "to", "finish", *(f"{sum(each) / 2:,.0f}" for each in seconds)]


def test_the_same_file_gives_the_same_numbers(tmp_path: Path) -> None:
    write(tmp_path / "small.yaml", policies=["queue:2"], seeds=[0])
    for name in ("one", "two"):
        assert raytp("experiment", "small.yaml", "--output", name, "--quiet").exit_code == 0
    for name in ("runs.csv", "series.csv", "comparison.png", "policy-1-queue-2.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_options_stand_in_place_of_what_the_file_says(tmp_path: Path) -> None:
    write(tmp_path / "small.yaml", cluster={"kind": "ray", "gpus_per_node": 1})
    done = raytp(
        *("experiment", "small.yaml", "--on", "simulated", "--policy", "fixed:2", "--policy", "queue:5", "--seed", "4"),
        *("--json", "--quiet"),
    )
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (tmp_path / "small-results" / "runs.json").read_text()
    assert [(each["policy"], each["seed"]) for each in json.loads(done.stdout)] == [("fixed:2", 4), ("queue:5", 4)]


def test_a_run_that_fails_is_in_the_tables_and_in_the_exit_status(tmp_path: Path) -> None:
    write(tmp_path / "small.yaml", policies=["math:floor", "fixed"], seeds=[0])
    done = raytp("experiment", "small.yaml")
    assert done.exit_code == 3
    assert "math:floor, seed 0: ConfigError: policy math:floor raised TypeError" in done.stderr
    failed, good = records_of(tmp_path / "small-results")
    assert "TypeError" in failed["error"]
    assert (failed["seconds"], good["error"]) == (None, None)
    assert "TypeError" in (tmp_path / "small-results" / "report.html").read_text()


def test_only_failures_still_leave_a_report(tmp_path: Path) -> None:
    write(tmp_path / "small.yaml", policies=["math:floor"], seeds=[0])
    assert raytp("experiment", "small.yaml").exit_code == 3
    assert {path.name for path in (tmp_path / "small-results").iterdir()} >= FILES


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    (tmp_path / "interrupting_policy.py").write_text(
        "def stop(seen):\n    if seen.now_s > 3:\n        raise KeyboardInterrupt\n    return 1\n"
    )
    write(tmp_path / "small.yaml", policies=["fixed", "interrupting_policy:stop", "queue:2"])
    done = raytp("experiment", "small.yaml")
    assert done.exit_code == 130
    assert "interrupted: 2 of 6 runs are finished" in done.stderr
    folder = tmp_path / "small-results"
    assert {path.name for path in folder.iterdir()} == FILES | {"policy-1-fixed.png"}
    assert [each["policy"] for each in records_of(folder)] == ["fixed", "fixed"]
    assert "4 of the runs are not here" in (folder / "report.html").read_text()
    with (folder / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2


def test_ctrl_c_before_the_first_run_is_over_leaves_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "at_once_policy.py").write_text("def stop(seen):\n    raise KeyboardInterrupt\n")
    write(tmp_path / "small.yaml", policies=["at_once_policy:stop"])
    assert raytp("experiment", "small.yaml").exit_code == 130
    assert list((tmp_path / "small-results").iterdir()) == []
    write(tmp_path / "small.yaml", policies=["fixed"], seeds=[0])
    assert raytp("experiment", "small.yaml").exit_code == 0


def test_what_cannot_begin_says_why_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "small-results").mkdir()
    (tmp_path / "small-results" / "thesis.txt").write_text("mine")
    write(tmp_path / "small.yaml")
    refused = raytp("experiment", "small.yaml")
    assert refused.exit_code == 2
    assert "small-results holds something else" in refused.stderr
    write(tmp_path / "small.yaml", policies=["soon"])
    wrong = raytp("experiment", "small.yaml", "--output", "new")
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("error: small.yaml: policies[0]: policy 'soon' is not known")
    assert raytp("experiment", "missing.yaml").exit_code == 2
    assert {path.name for path in tmp_path.iterdir()} == {"small.yaml", "small-results"}
    assert [path.name for path in (tmp_path / "small-results").iterdir()] == ["thesis.txt"]


SIMULATE = ("simulate", "-m", "qwen3-0.6b", "--num-requests", "60", "--output-tokens", "50")


def test_simulate_prints_a_table_or_json(tmp_path: Path) -> None:
    table = raytp(*SIMULATE, "--rate", "20", "--price", "2")
    assert table.exit_code == 0
    assert ["requests", "60"] in [line.split() for line in table.stdout.splitlines()]
    done = json.loads(raytp(*SIMULATE, "--rate", "20", "--price", "2", "--json").stdout)
    assert done["cost"] == pytest.approx(done["gpu_seconds"] / 3600 * 2)
    *ticks, last = [tick["now_s"] for tick in done["series"]]
    assert ticks == [5.0 * index for index in range(len(ticks))]
    assert last == done["seconds"]
    assert f"{done['seconds']:,.1f}" in table.stdout


def test_simulate_says_what_it_does_and_why_requests_are_refused() -> None:
    """A log has a line at once. Of two prompts that are too long the first is explained."""
    lines = [{"arrival_s": at_s, "prompt_tokens": 50_000 * at_s + 1, "output_tokens": 5} for at_s in range(3)]
    Path("trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = raytp("simulate", "-m", "qwen3-0.6b", "--trace", "trace.jsonl", "--finish-in", "9")
    assert done.exit_code == 0
    trying, refused = done.stderr.splitlines()
    assert trying == "trying 1 replica"
    assert refused.startswith("refused 2 of 3 requests; the first, which arrives after 1 s: the prompt has 50001")
    assert "max_model_len=40960" in refused
    Path("small.yaml").write_text("{model: qwen3-0.6b, workload: {trace: trace.jsonl}, policies: [fixed]}")
    done = raytp("experiment", "small.yaml")
    assert done.stderr.splitlines()[0] == "1 run, whose results go to small-results"
    assert f"fixed, seed 0: {refused}" in done.stderr


def test_modules_of_policies_lie_beside_the_file_or_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    for folder, count in ((tmp_path, 3), (tmp_path / "beside", 2)):
        (folder / "near_policy.py").write_text(f"def f(seen):\n    return {count}\n")
    (tmp_path / "here_policy.py").write_text("def f(seen):\n    return 1\n")
    write(tmp_path / "beside" / "small.yaml", policies=["near_policy:f", "here_policy:f"], seeds=[0])
    done = raytp("experiment", "beside/small.yaml", "--json", "--quiet")
    assert [each["peak_replicas"] for each in json.loads(done.stdout)] == [2, 1]
    assert json.loads(raytp(*SIMULATE, "--policy", "here_policy:f", "--json").stdout)["peak_replicas"] == 1


def test_a_shape_has_no_real_engines(tmp_path: Path) -> None:
    refused = raytp("experiment", str(write(tmp_path / "small.yaml")), "--on", "fake")
    assert refused.exit_code == 1
    assert "model qwen3-0.6b is a shape without weights, for raytp simulate" in refused.stderr


def test_the_file_in_the_help_is_an_experiment_whose_nodes_come_one_by_one(tmp_path: Path) -> None:
    shown = EXPERIMENT_EXAMPLES.split("[bold]")[1].split("\n", 1)[1]
    (tmp_path / "small.yaml").write_text(shown.replace("\\[", "["))
    spec, _ = read_experiment(tmp_path / "small.yaml")
    assert (spec.cluster.gpus_per_node, spec.cluster.min_nodes, spec.cluster.max_nodes) == (1, 1, 8)


def test_simulate_loses_nodes() -> None:
    """Of one node with a replica that needs 3 s to start; the next node comes after 4 s."""
    common = (*SIMULATE, "--rate", "20", "--startup", "3", "--provisioning", "4", "--gpus-per-node", "1", "--json")
    undisturbed, disturbed = (json.loads(raytp(*common, *more).stdout) for more in ((), ("--lose-node", "3.2")))
    assert disturbed["seconds"] > undisturbed["seconds"]
    assert disturbed["seconds"] >= 3.2 + 4 + 3
    assert disturbed["latency_s"]["end_to_end"]["p99"] > undisturbed["latency_s"]["end_to_end"]["p99"] + 3


def test_simulate_finds_the_least_replicas() -> None:
    found = json.loads(raytp(*SIMULATE, "--finish-in", "0.16", "--json").stdout)
    assert found["seconds"] <= 0.16
    fewer = json.loads(raytp(*SIMULATE, "--replicas", str(found["replicas"] - 1), "--json").stdout)
    assert fewer["seconds"] > 0.16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rate", "1", "--trace", "x"), "--trace and --rate contradict"),
        (("--gpu", "abacus"), "known: h200, cpu"),
        (("--replicas", "few"), "COUNT or MIN:MAX"),
        *(
            ((option, value, "--ttft", "1"), f"{option} does not go with")
            for option, value in [
                ("--lose-node", "3"),
                ("--replicas", "1"),
                ("--policy", "fixed"),
                ("--startup", "0"),
                ("--provisioning", "0"),
                ("--gpus-per-node", "1"),
            ]
        ),
        (("--gpu", "cpu", "--bench", "x.json"), "cannot be read"),
        (("--bench", "odd.json"), "odd.json are not as raytp bench writes them: KeyError: 'gpu'"),
        (("-t", "17"), "can be split over 1 to 16 ranks"),
        (("--startup", "inf"), "startup_s=inf must be a number of seconds"),
        (("--lose-node", "inf"), "at most 1e+08"),
        (("--rate", "1e-300"), "must be a number of seconds, at least 0 and at most 1e+08"),
        (("--ttft", "nan"), "ttft_s=nan must be a number of seconds, above 0"),
        (("-t", "16", "--gpus-per-node", "8"), "lower the tensor-parallel size"),
        (("--replicas", "0"), "--replicas is '0': MIN must be at least 0"),
    ],
)
def test_simulate_refuses_what_cannot_be(arguments: tuple[str, ...], words: str) -> None:
    Path("odd.json").write_text('[{"workload": "latency"}]')
    done = raytp(*SIMULATE, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
