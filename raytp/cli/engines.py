"""`raytp serve-engine`, `raytp engines`, `raytp stop`: engines that stay, for any job. Registered by `raytp.cli`."""

from __future__ import annotations

import dataclasses
import json as json_text
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from raytp.cli import console
from raytp.cli import options as opt

if TYPE_CHECKING:
    from raytp.outputs import EngineDescription

SERVE_EXAMPLES = """[bold]Examples[/bold]

raytp serve-engine qwen --model Qwen/Qwen3-0.6B -t 2

raytp batch requests.jsonl answers.jsonl --engine qwen

raytp stop qwen"""

_PIPE_WIDTH = 1000
"""Columns where no terminal says how many: a line of the table must stay one line."""
_Name = Annotated[str, typer.Argument(metavar="NAME", help="What the engine is called.", show_default=False)]


def serve_engine(
    name: _Name,
    quiet: opt.Quiet = False,
    model: opt.Model = None,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    min_tensor_parallel_size: opt.MinTensorParallelSize = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    max_model_len: opt.MaxModelLen = None,
    memory_fraction: opt.MemoryFraction = None,
) -> None:
    """Start an engine that stays in the Ray cluster, for any job to use.

    Returns when it is ready. It runs until raytp stop, or until the cluster ends.
    The cluster is that of RAY_ADDRESS, or the one that ray start --head has started on this machine.
    """
    from raytp.cli.engine import EngineOptions
    from raytp.connection import start_engine
    from raytp.progress import ProgressBar
    from raytp.ray_runtime import silence_ray

    silence_ray()
    options = EngineOptions(
        model,
        tensor_parallel_size,
        device,
        dtype,
        max_model_len,
        memory_fraction,
        quiet,
        min_tensor_parallel_size=min_tensor_parallel_size,
    )
    with ProgressBar("finding the cluster", False if quiet else None, names_stages=True) as bar:
        started = start_engine(model, options.config(), bar.update, name)
    info = started.info
    where = ", ".join(dict.fromkeys(info.hostnames))
    num_ranks = len(info.hostnames)
    console.write(
        f"engine {name} is ready: {started.model_name} on "
        f"{num_ranks} rank{'' if num_ranks == 1 else 's'} ({info.device}) of {where}\n"
        f"use it:   raytp batch INPUT OUTPUT --engine {name}\n"
        f'          LLM.connect("{name}")\n'
        f"see it:   raytp engines\n"
        f"stop it:  raytp stop {name}\n"
    )


def engines(json: opt.Json = False) -> None:
    """List the engines that serve-engine has started in the Ray cluster."""
    from raytp.shared_engines import list_engines

    _join()
    found = list_engines()
    if json:
        for engine in found:
            console.write(json_text.dumps(dataclasses.asdict(engine)) + "\n")
    elif found:
        _print_table(found)
    else:
        console.print_note("there are no engines in this cluster: raytp serve-engine NAME starts one")


def stop(name: _Name) -> None:
    """End an engine that serve-engine has started; whoever is using it gets an error."""
    from raytp.shared_engines import stop_engine

    _join()
    stop_engine(name)
    console.print_note(f"engine {name} has ended")


def _join() -> None:
    from raytp.progress import ProgressBar
    from raytp.ray_runtime import join_ray, silence_ray

    silence_ray()
    with ProgressBar("finding the cluster", None, names_stages=True) as bar:
        join_ray(bar.update)


def _print_table(engines: list[EngineDescription]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("name", "model", "ranks", "nodes", "state", "load"):
        table.add_column(heading, overflow="fold")
    for engine in engines:
        nodes = "" if engine.info is None else ", ".join(dict.fromkeys(engine.info.hostnames))
        table.add_row(engine.name, engine.model_name, str(engine.num_ranks), nodes, _state(engine), _load(engine))
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def _state(engine: EngineDescription) -> str:
    return engine.stage if engine.error is None else f"{engine.stage}: {engine.error.splitlines()[0]}"


def _load(engine: EngineDescription) -> str:
    stats = engine.stats
    if stats is None:
        return ""
    used = 1 - stats.num_free_blocks / stats.num_kv_blocks
    return f"{stats.num_running} running, {stats.num_waiting} waiting, KV cache {used:.0%}"
