"""`raytp experiment`: its arguments, its table and its end. Registered by `raytp.cli`; uses `raytp.experiment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raytp.cli import console
from raytp.cli import options as opt
from raytp.cli.interrupts import acknowledge_interrupts
from raytp.errors import RaytpError

if TYPE_CHECKING:
    from raytp.experiment.running import Outcome
    from raytp.experiment.spec import ExperimentSpec

EXPERIMENT_EXAMPLES = r"""[bold]A file[/bold], whose keys docs/autoscaling.md explains

model: qwen3-8b

workload: {num_requests: 6000, prompt_tokens: 2000, output_tokens: 500, rate: 12}

cluster: {kind: simulated, gpu: h200, gpus_per_node: 1, provisioning_s: 120, startup_s: 60}

replicas: 1:8

policies: \[fixed, queue:30, deadline:660]

[bold]Examples[/bold]

raytp experiment bursts.yaml

raytp experiment bursts.yaml --policy fixed:2 --policy my_policy:follow --seed 1 --output mine

raytp experiment nodes.yaml --on fake

[bold]Exit status[/bold]

0    all runs succeeded

3    some failed: their errors stand in the tables

130  Ctrl-C; the runs that were finished are in the tables and in the report

2    the file, an option or the output cannot be used

1    the experiment could not begin"""

_SOME_FAILED, _INTERRUPTED = 3, 130
_MAX_WIDTH = 100_000
_STOPPING = "stopping, which may take seconds: finished runs are kept; Ctrl-C again does not wait for engines to end"
_RUNS, _OUTPUT = "Runs", "Output"
_File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The experiment, in YAML.", exists=True, dir_okay=False, show_default=False),
]
_Folder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of tables, pictures and report. Default: FILE's name with -results.",
        rich_help_panel=_OUTPUT,
    ),
]
_On = Annotated[
    str | None,
    typer.Option(
        help="Where to run: simulated, fake or ray, in place of the file's cluster.kind.", rich_help_panel=_RUNS
    ),
]
_Policy = Annotated[
    list[str] | None,
    typer.Option(help="A policy, in place of the file's; may be given several times.", rich_help_panel=_RUNS),
]
_Seed = Annotated[
    list[int] | None,
    typer.Option(help="A seed, in place of the file's; may be given several times.", rich_help_panel=_RUNS),
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print what runs.json holds, and no table.", rich_help_panel=_OUTPUT)
]


def experiment(
    file: _File,
    output: _Folder = None,
    on: _On = None,
    policy: _Policy = None,
    seed: _Seed = None,
    json: _Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare scaling policies on the same requests: simulated, on fake nodes, or on a Ray cluster.

    Writes runs.csv, runs.json, series.csv, pictures and report.html.
    """
    from raytp.experiment.folder import claimed_folder
    from raytp.experiment.reading import read_experiment
    from raytp.experiment.running import check_experiment
    from raytp.experiment.spec import ClusterKind

    console.keep_results_apart()
    given = {"policies": policy, "seeds": seed, "cluster.kind": on}
    spec, source = read_experiment(file, {name: value for name, value in given.items() if value})
    check_experiment(spec)
    if spec.cluster.kind is not ClusterKind.SIMULATED:
        from raytp.ray_runtime import silence_ray

        silence_ray()
    folder = output or Path(f"{file.stem}-results")
    acknowledge_interrupts(_STOPPING)
    with claimed_folder(folder):
        outcomes, end = _run(spec, folder, quiet)
        try:
            if isinstance(end, RaytpError):
                raise end
            report = _write(folder, spec, source, outcomes)
        finally:  # a disk may be full, and the runs were dear
            _show(spec, outcomes, as_json=json)
    if not quiet and report is not None:
        console.print_note(f"report: {report}")
    if end is not None:
        console.print_note(f"interrupted: {len(outcomes)} of {len(spec.policies) * len(spec.seeds)} runs are finished")
        raise typer.Exit(_INTERRUPTED)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(_SOME_FAILED)


def _run(spec: ExperimentSpec, folder: Path, is_quiet: bool) -> tuple[list[Outcome], BaseException | None]:
    """What has come of the runs; and what came before all were over: a Ctrl-C, or a folder that takes no results."""
    from raytp.experiment.running import run_all
    from raytp.experiment.tables import write_tables
    from raytp.progress import ProgressBar

    outcomes: list[Outcome] = []
    num_runs = len(spec.policies) * len(spec.seeds)
    if not is_quiet:
        console.print_note(f"{num_runs} run{'' if num_runs == 1 else 's'}, whose results go to {folder}")
    try:
        with ProgressBar("starting", False if is_quiet else None) as bar:
            for outcome in run_all(spec, bar.update):
                outcomes.append(outcome)
                if trouble := outcome.error or (outcome.results and outcome.results.refusal()):
                    console.print_note(f"{outcome.policy}, seed {outcome.seed}: {trouble}")
                write_tables(folder, spec, outcomes)
    except (KeyboardInterrupt, RaytpError) as end:
        return outcomes, end
    return outcomes, None


def _show(spec: ExperimentSpec, outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    """On standard output."""
    from raytp.experiment import tables

    records = [tables.make_record(spec, outcome) for outcome in outcomes]
    if as_json:
        console.write(tables.as_json(records))
    elif records:
        _print(records)


def _write(folder: Path, spec: ExperimentSpec, source: str, outcomes: Sequence[Outcome]) -> Path | None:
    """Tables, pictures and report; where the report lies, if there is any to write."""
    from raytp.experiment.comparison import draw_comparison
    from raytp.experiment.pictures import draw_policies, write_pictures
    from raytp.experiment.report import write_report
    from raytp.experiment.tables import write_tables

    if not outcomes:
        return None
    records = write_tables(folder, spec, outcomes)
    pictures = write_pictures(folder, draw_policies(spec, outcomes), draw_comparison(spec, outcomes))
    return write_report(folder, spec, source, records, pictures)


def _print(records: Sequence[Mapping[str, Any]]) -> None:
    import io

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from raytp.experiment.side_by_side import make_rows

    policies = list(dict.fromkeys(record["policy"] for record in records))
    num_seeds = len({record["seed"] for record in records})
    table = Table(f"mean of {num_seeds} seeds" if num_seeds > 1 else "", box=None, pad_edge=False, header_style="dim")
    for policy in policies:
        table.add_column(Text(policy), justify="right", no_wrap=True)
    for row in make_rows(records, policies):
        table.add_row(row.label, *(cell.text for cell in row.cells))
    text = io.StringIO()
    output = Console(file=text, highlight=False, width=_MAX_WIDTH)
    output.width = output.measure(table).maximum  # wider than the terminal, if need be: a number that is cut is none
    output.print(table)
    console.write(text.getvalue())
