"""Records as tables on the terminal. Called by `raytp.cli.bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from raytp.bench.record import Record

_NUM_KERNELS = 8


def print_records(records: Sequence[Record]) -> None:
    """Print the records of one engine, at least one."""
    output = Console(highlight=False)
    first = records[0]
    engine = first["engine"]
    output.print(
        f"{first['model']} on {first['tensor_parallel_size']} x {first['gpu'][0]}, {engine['dtype']}, "
        f"attention by {engine['attention_backend']}, "
        f"ready after {first['startup_s']:.1f} s",
        soft_wrap=True,
    )
    output.print(_workloads(records))
    for record in records:
        if record["workload"] == "latency":
            output.print(_steps(record))
    if first["gpu_idle_share"] is not None:
        output.print(f"In steady decode the GPU is idle for {first['gpu_idle_share']:.1%} of the time.")
        output.print(_kernels(first))


def _workloads(records: Sequence[Record]) -> Table:
    """A column for each workload, so that all of them fit a terminal."""
    table = _table("", *(record["workload"] for record in records))

    def add(label: str, show: Callable[[Record], str]) -> None:
        table.add_row(label, *(show(record) for record in records))

    add("prompts", lambda record: f"{record['num_prompts']:,}")
    add("seconds (median)", lambda record: f"{record['seconds']:.3f}")
    add("seconds (least-most)", lambda record: _range(record["seconds_of_runs"]))
    add("output tokens/s", lambda record: f"{record['output_tokens_per_s']:,.0f}")
    add("input tokens/s", lambda record: f"{record['input_tokens_per_s']:,.0f}")
    add("floor, seconds", lambda record: _number(record["floor_s"]))
    add("median / floor", lambda record: _number(record["ratio"]))
    add("driver, us a step", lambda record: f"{record['driver_us_per_step']:.0f}")
    add("prompt tokens cached", lambda record: f"{record['cached_share']:.1%}")
    return table


def _steps(record: Record) -> Table:
    table = _table(f"{record['workload']}: batch", "ms a token", "floor ms", "ratio")
    floors = record["floor_step_ms"] or {}
    for batch, step_ms in record["step_ms"].items():
        floor_ms = floors.get(batch)
        table.add_row(batch, f"{step_ms:.2f}", _number(floor_ms), _number(floor_ms and step_ms / floor_ms))
    return table


def _kernels(record: Record) -> Table:
    table = _table("kernel", "share")
    for name, share in record["top_kernels"][:_NUM_KERNELS]:
        table.add_row(name if len(name) <= 80 else name[:77] + "...", f"{share:.1%}")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(headings[0])
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    return table


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f}-{max(values):.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
