"""`raytp chaos`: its arguments, its table and its JSON. Registered by `raytp.cli`; hands over to `raytp.chaos`."""

from __future__ import annotations

import dataclasses
import io
import json as json_text
import shutil
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raytp.cli import console
from raytp.cli import options as opt

if TYPE_CHECKING:
    from raytp.chaos import ChaosReport, FaultOutcome

CHAOS_EXAMPLES = """[bold]Examples[/bold]

raytp chaos -t 2

raytp chaos ./my-model -t 2 --seed 7 --faults 5 --requests 200 --kinds kill,stop

raytp chaos ./config-only --load-format dummy --json"""

_FAULTS = "Faults"
_Seed = Annotated[int, typer.Option(help="Same seed, same faults and same prompts.", rich_help_panel=_FAULTS)]
_NumFaults = Annotated[int, typer.Option("--faults", help="How many.", min=0, max=100, rich_help_panel=_FAULTS)]
_NumRequests = Annotated[
    int, typer.Option("--requests", help="Requests, over which they are spread.", min=1, rich_help_panel=_FAULTS)
]
_Kinds = Annotated[
    str | None,
    typer.Option(
        help="Of kill, stop, exit, raise, delay and corrupt, with commas between. Default: all.",
        rich_help_panel=_FAULTS,
    ),
]
_LoadFormat = Annotated[
    str | None, typer.Option(help="dummy: random weights, from config.json alone.", rich_help_panel="Model and engine")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel="Output")]


def chaos(
    model: opt.ModelArgument = None,
    seed: _Seed = 0,
    faults: _NumFaults = 5,
    requests: _NumRequests = 200,
    kinds: _Kinds = None,
    json: _AsJson = False,
    quiet: opt.Quiet = False,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    load_format: _LoadFormat = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    max_model_len: opt.MaxModelLen = None,
    memory_fraction: opt.MemoryFraction = None,
) -> None:
    """Let ranks die while they work, and see that no request is lost and no token changes.

    The requests are answered first without faults and then with them, greedily.
    Ends with code 1 if an answer is missing or another one, or if a fault did not happen.
    """
    from raytp.chaos import plan_faults, run_chaos
    from raytp.progress import ProgressBar
    from raytp.ray_runtime import silence_ray
    from workers.faults import KINDS

    silence_ray()
    chosen = KINDS if kinds is None else tuple(kind.strip() for kind in kinds.split(","))
    given = {
        "load_format": load_format,
        "device": device,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "memory_fraction": memory_fraction,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    planned = plan_faults(seed, faults, tensor_parallel_size, chosen)
    console.keep_results_apart()
    with console.warnings_off(), ProgressBar("starting", False if quiet else None, names_stages=True) as bar:
        report = run_chaos(
            model,
            tensor_parallel_size,
            planned,
            seed=seed,
            num_requests=requests,
            on_progress=bar.update,
            **options,
        )
    if json:
        console.write(json_text.dumps(dataclasses.asdict(report) | {"is_ok": report.is_ok}) + "\n")
    else:
        _print_report(report)
    if not report.is_ok:
        raise typer.Exit(1)


def _print_report(report: ChaosReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("fault", "rank", "at", "noticed", "rebuilt in", "what was found out"):
        table.add_column(heading, overflow="fold")
    for outcome in report.outcomes:
        table.add_row(*_row(outcome))
    text = io.StringIO()
    Console(file=text, highlight=False, width=shutil.get_terminal_size((120, 24)).columns).print(table)
    num_answered = report.num_requests - report.num_lost
    console.write(
        f"{text.getvalue()}\n"
        f"{num_answered} of {report.num_requests} requests answered, {report.num_lost} lost\n"
        f"tokens identical: {'yes' if not report.num_changed else f'no, {report.num_changed} answers changed'}\n"
        f"{report.undisturbed_s:.1f} s without faults, {report.disturbed_s:.1f} s with them\n"
    )


def _row(outcome: FaultOutcome) -> tuple[str, ...]:
    from raytp.chaos import STARTING

    fault = outcome.fault
    at = fault.point if fault.nth == 1 else f"{fault.point} {fault.nth}"
    if outcome.noticed_s is None or outcome.rebuild_s is None:
        what = f"{fault.seconds:g} s late, which harms nobody" if fault.kind == "delay" else "it did not happen"
        return fault.kind, str(fault.rank), at, "", "", what
    if fault.point in STARTING:
        return fault.kind, str(fault.rank), at, "", "", "in the recovery that was under way, and part of its time"
    first_line = outcome.report.partition("\n")[0]
    return fault.kind, str(fault.rank), at, f"{outcome.noticed_s:.1f} s", f"{outcome.rebuild_s:.1f} s", first_line
