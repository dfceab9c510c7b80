"""The report: one HTML file that needs no other, for any screen. Called by `raytp.cli.experiment`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from raytp.experiment.folder import REPORT, replacing
from raytp.experiment.side_by_side import QUANTITIES, as_text, make_rows, value_of
from raytp.experiment.spec import ExperimentSpec
from raytp.experiment.wording import describe_cluster, describe_failure

_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def write_report(
    folder: Path,
    spec: ExperimentSpec,
    source: str,
    records: Sequence[Mapping[str, Any]],
    pictures: Mapping[str, str],
) -> Path:
    """Returns where it lies.

    `source`: the experiment's file. `records`: of the runs that are over. `pictures`: file names by policy, and by ""
    that of the comparison. Raises ConfigError if it cannot be written.
    """
    policies = list(dict.fromkeys(record["policy"] for record in records))
    embedded = {policy: _as_uri(folder / name) for policy, name in pictures.items()}
    quantities = [each for each in QUANTITIES if any(value_of(record, each) is not None for record in records)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=spec.name,
        model=spec.model or "the default model",
        cluster=describe_cluster(spec),
        policies=policies,
        seeds=f"seed {spec.seeds[0]}" if len(spec.seeds) == 1 else f"{len(spec.seeds)} seeds",
        failures=[describe_failure(failure) for failure in spec.failures],
        missing=len(spec.policies) * len(spec.seeds) - len(records),
        rows=make_rows(records, policies),
        comparison=embedded.pop("", None),
        pictures=embedded,
        columns=[quantity.label for quantity in quantities],
        runs=[
            {
                "policy": record["policy"],
                "seed": record["seed"],
                "error": record["error"],
                "cells": [as_text(value_of(record, quantity), quantity) for quantity in quantities],
            }
            for record in records
        ],
        source=source,
        date=records[-1]["date"] if records else "",
        versions=records[-1]["versions"] if records else {},
    )
    with replacing(folder / REPORT) as path:
        path.write_text(page, encoding="utf-8", errors="replace")
    return folder / REPORT


def _as_uri(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode("ascii")
