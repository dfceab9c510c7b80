"""What runs have come to, as JSON and CSV, in a folder that holds nothing else. Called by `raytp.cli.experiment`.

runs.json     a list of records, one a run, each with all of its circumstances
runs.csv      the same without them
series.csv    the counts over time of all runs
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import raytp
from raytp.experiment.folder import RUNS_CSV, RUNS_JSON, SERIES_CSV, replacing
from raytp.experiment.running import Outcome
from raytp.experiment.spec import ExperimentSpec, Failure, LoseNode, SlowStart, SlowSteps
from raytp.simulator.results import Tick

Record: TypeAlias = dict[str, Any]

_DISTRIBUTIONS = ("ray", "torch", "numpy")
_FAILURE_NAMES: Mapping[type, str] = {LoseNode: "lose_node", SlowStart: "slow_start", SlowSteps: "slow_steps"}
_LATENCIES = [(key, percent) for key in ("ttft", "per_token", "end_to_end") for percent in ("p50", "p90", "p99")]
_NUMBERS = (
    "seconds",
    "num_requests",
    "num_failed",
    "output_tokens_per_s",
    "peak_replicas",
    "gpu_seconds",
    "busy_gpu_seconds",
    "wasted_gpu_seconds",
    "num_steps",
    "cost",
)
"""Of `Results.summary`, all but the latencies."""


def make_record(spec: ExperimentSpec, outcome: Outcome) -> Record:
    """One run, as it stands in runs.json."""
    results = outcome.results
    summary = dict.fromkeys((*_NUMBERS, "latency_s")) if results is None else results.summary(spec.price_per_gpu_hour)
    return {
        "experiment": spec.name,
        "policy": outcome.policy,
        "seed": outcome.seed,
        "error": outcome.error,
        **summary,
        "failures": [failure_record(failure) for failure in spec.failures],
        "wall_s": outcome.wall_s,
        "date": outcome.began.isoformat(timespec="seconds"),
        "versions": _versions(),
        "spec": spec_record(spec),
    }


def write_tables(folder: Path, spec: ExperimentSpec, outcomes: Sequence[Outcome]) -> list[Record]:
    """Write all of it anew; returns the records. Raises ConfigError."""
    records = [make_record(spec, outcome) for outcome in outcomes]
    names = ["policy", "seed", *(field.name for field in fields(Tick))]
    with replacing(folder / RUNS_JSON) as path:
        path.write_text(as_json(records), encoding="utf-8")
    _write_csv(folder / RUNS_CSV, list(_flat(records[0])) if records else [], map(_flat, records))
    _write_csv(folder / SERIES_CSV, names, _series(outcomes))
    return records


def as_json(records: Sequence[Record]) -> str:
    """The text of runs.json."""
    return json.dumps(records, indent=1, default=str) + "\n"


def spec_record(spec: ExperimentSpec) -> Record:
    """An experiment as JSON has it."""
    return {**_plain(asdict(spec)), "failures": [failure_record(failure) for failure in spec.failures]}


def failure_record(failure: Failure) -> Record:
    """As it stands in the experiment's file."""
    return {_FAILURE_NAMES[type(failure)]: asdict(failure)}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def _versions() -> Record:
    versions = {"raytp": raytp.__version__, "python": platform.python_version()}
    return versions | {name: importlib.metadata.version(name) for name in _DISTRIBUTIONS}


def _flat(record: Mapping[str, Any]) -> Record:
    """A row of runs.csv."""
    latencies = record["latency_s"] or {}
    return {
        "policy": record["policy"],
        "seed": record["seed"],
        **{name: record[name] for name in _NUMBERS},
        **{f"{key}_{percent}_s": latencies.get(key, {}).get(percent) for key, percent in _LATENCIES},
        "failures": json.dumps(record["failures"]) if record["failures"] else None,
        "error": record["error"],
    }


def _series(outcomes: Iterable[Outcome]) -> Iterable[Record]:
    for outcome in outcomes:
        for tick in outcome.results.ticks if outcome.results is not None else ():
            yield {"policy": outcome.policy, "seed": outcome.seed, **asdict(tick)}


def _write_csv(path: Path, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="", errors="replace") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
