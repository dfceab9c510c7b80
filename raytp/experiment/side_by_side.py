"""The table that puts policies side by side, for the report and for the terminal. Called by both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One row: where a record has it, and how it is shown."""

    label: str
    path: tuple[str, ...]
    """Keys of a record of runs.json, one inside the other."""
    num_digits: int = 0
    is_better_less: bool | None = True
    """None: neither is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Of one policy."""

    text: str
    spread: str
    """The least and the most of the seeds, if they differ."""
    is_best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity of all policies."""

    label: str
    cells: Sequence[Cell]


QUANTITIES = (
    Quantity(label="seconds to finish", path=("seconds",)),
    Quantity(label="output tokens/s", path=("output_tokens_per_s",), is_better_less=False),
    Quantity(label="first token, p50 s", path=("latency_s", "ttft", "p50"), num_digits=2),
    Quantity(label="first token, p99 s", path=("latency_s", "ttft", "p99"), num_digits=2),
    Quantity(label="between tokens, p99 s", path=("latency_s", "per_token", "p99"), num_digits=3),
    Quantity(label="whole request, p99 s", path=("latency_s", "end_to_end", "p99"), num_digits=1),
    Quantity(label="most replicas", path=("peak_replicas",), is_better_less=None),
    Quantity(label="GPU-seconds paid", path=("gpu_seconds",)),
    Quantity(label="GPU-seconds wasted", path=("wasted_gpu_seconds",)),
    Quantity(label="cost", path=("cost",), num_digits=2),
    Quantity(label="requests refused", path=("num_failed",)),
)


def make_rows(records: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> list[Row]:
    """Means over the runs of a policy that have not failed; without quantities that nobody has."""
    rows = []
    for quantity in QUANTITIES:
        values = [_values(records, policy, quantity) for policy in policies]
        if any(values) and not (quantity.path == ("num_failed",) and not any(map(any, values))):
            rows.append(_row(quantity, values))
    return rows


def value_of(record: Mapping[str, Any], quantity: Quantity) -> float | None:
    """None if the record does not have it."""
    found: Any = record
    for key in quantity.path:
        found = (found or {}).get(key)
    return found if found is None else float(found)


def as_text(value: float | None, quantity: Quantity) -> str:
    """As tables show it."""
    return "-" if value is None else f"{value:,.{quantity.num_digits}f}"


def _values(records: Sequence[Mapping[str, Any]], policy: str, quantity: Quantity) -> list[float]:
    found = [value_of(record, quantity) for record in records if record["policy"] == policy]
    return [value for value in found if value is not None]


def _row(quantity: Quantity, values: Sequence[Sequence[float]]) -> Row:
    means = [sum(each) / len(each) if each else None for each in values]
    texts = [as_text(mean, quantity) for mean in means]
    known = [mean for mean in means if mean is not None]
    best = None if quantity.is_better_less is None else (min if quantity.is_better_less else max)(known)
    is_contest = len(set(texts) - {"-"}) > 1
    cells = [
        Cell(
            text=text,
            spread=_spread(each, quantity),
            is_best=is_contest and best is not None and text == as_text(best, quantity),
        )
        for text, each in zip(texts, values, strict=True)
    ]
    return Row(label=quantity.label, cells=cells)


def _spread(values: Sequence[float], quantity: Quantity) -> str:
    least, most = (as_text(pick(values, default=None), quantity) for pick in (min, max))
    return "" if least == most else f"{least} to {most}"
