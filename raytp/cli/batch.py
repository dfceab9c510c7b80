"""`raytp batch`: its arguments and help, and what its end is to a shell. Registered by `raytp.cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from raytp.cli import console
from raytp.cli import options as opt
from raytp.cli.interrupts import acknowledge_interrupts

if TYPE_CHECKING:
    from raytp.batch_job.api import Settings
    from raytp.batch_job.engine_choice import EngineChoice
    from raytp.batch_job.progress import BatchSummary

BATCH_EXAMPLES = """[bold]Examples[/bold]

raytp batch requests.jsonl answers.jsonl --model ./my-model -t 2

raytp batch "s3://bucket/questions/*.parquet" answers/ --max-tokens 200 --temperature 0

raytp batch questions.txt answers.jsonl --ordered --errors failed.jsonl --summary summary.json

[bold]Exit status[/bold]

0    all rows succeeded

3    some failed, or it stopped after more than --max-failures

130  Ctrl-C; what was finished is committed

1    the job could not begin, or the engine or the output failed; 2 is wrong usage"""

_SOME_FAILED, _INTERRUPTED = 3, 130
_INPUT, _OUTPUT, _ENGINE = "Input", "Output", "Model and engine"
_InputArgument = Annotated[
    str, typer.Argument(metavar="INPUT", help="A file, glob or folder, or an fsspec URL of one.", show_default=False)
]
_OutputArgument = Annotated[
    str,
    typer.Argument(
        metavar="OUTPUT",
        help="A .jsonl or .parquet file, or a folder of part files; or an fsspec URL.",
        show_default=False,
    ),
]
_InputFormat = Annotated[
    str | None,
    typer.Option(help="openai, jsonl, parquet or text. Default: by the files.", rich_help_panel=_INPUT),
]
_OutputFormat = Annotated[
    str | None,
    typer.Option(help="jsonl or parquet, of a folder. Default: parquet for parquet.", rich_help_panel=_OUTPUT),
]
_Ordered = Annotated[
    bool, typer.Option("--ordered", help="Records in the order of the input.", rich_help_panel=_OUTPUT)
]
_Errors = Annotated[
    str | None,
    typer.Option(
        metavar="<file>",
        help="A JSONL file for the rows that fail. Default: they stand in OUTPUT.",
        rich_help_panel=_OUTPUT,
    ),
]
_MaxFailures = Annotated[
    int | None, typer.Option(help="Stop when more rows than this have failed.", min=0, rich_help_panel=_OUTPUT)
]
_Summary = Annotated[
    str | None,
    typer.Option(metavar="<file>", help="Write the numbers at the end to this file, as JSON.", rich_help_panel=_OUTPUT),
]
_Restart = Annotated[
    bool,
    typer.Option("--restart", help="Discard the output of an earlier run of this job.", rich_help_panel=_OUTPUT),
]

_Replicas = Annotated[
    str | None,
    typer.Option(
        metavar="<MIN:MAX>",
        help="Engines that share the rows, each with its own ranks; N alone is N:N. Default: one.",
        rich_help_panel=_ENGINE,
    ),
]
_Policy = Annotated[
    str,
    typer.Option(
        help="How many, between MIN and MAX: fixed (MAX), queue:SECONDS, deadline:SECONDS, or MODULE:FUNCTION.",
        rich_help_panel=_ENGINE,
    ),
]


def batch(
    input: _InputArgument,
    output: _OutputArgument,
    input_format: _InputFormat = None,
    chat: opt.Chat = None,
    output_format: _OutputFormat = None,
    ordered: _Ordered = False,
    errors: _Errors = None,
    max_failures: _MaxFailures = None,
    summary: _Summary = None,
    restart: _Restart = False,
    quiet: opt.Quiet = False,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    engine: opt.Engine = None,
    model: opt.Model = None,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    min_tensor_parallel_size: opt.MinTensorParallelSize = None,
    replicas: _Replicas = None,
    policy: _Policy = "fixed",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    max_model_len: opt.MaxModelLen = None,
    memory_fraction: opt.MemoryFraction = None,
) -> None:
    """Answer every row of files, each exactly once.

    INPUT is in OpenAI's batch format, JSONL or Parquet with a prompt or messages column, or lines of text.
    Ended in any way, the same command again does the rows that are left.
    """
    from raytp.batch_job.api import Settings
    from raytp.batch_job.engine_choice import EngineChoice

    sampling = opt.sampling_params(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    settings = Settings(
        sampling=sampling,
        chat=chat,
        ordered=ordered,
        errors=errors,
        max_failures=max_failures,
        input_format=input_format,
        output_format=output_format,
        restart=restart,
    )
    given = {
        "min_tensor_parallel_size": min_tensor_parallel_size,
        "device": device,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "memory_fraction": memory_fraction,
    }
    options = {name: value for name, value in given.items() if value is not None}
    choice = EngineChoice(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        options=options,
        shared=engine,
        replicas=replicas,
        policy=policy,
    )
    _run(input, output, settings, choice, summary, quiet)


def _run(
    input: str, output: str, settings: Settings, engine: EngineChoice, summary: str | None, is_quiet: bool
) -> None:
    from raytp.batch_job.api import BatchInterrupted, run_job, write_summary
    from raytp.ray_runtime import silence_ray

    silence_ray()
    acknowledge_interrupts("stopping, which may take a few seconds: what is finished is saved")
    try:
        done = run_job(input, output, settings, engine, False if is_quiet else None)
    except BatchInterrupted as interrupted:
        done = interrupted.summary
    if summary is not None:
        write_summary(done, summary)
    _finish(done, is_quiet)


def _finish(done: BatchSummary, is_quiet: bool) -> None:
    """Say what is done, and exit accordingly."""
    if not is_quiet:
        console.print_note(done.as_text())
    if done.status == "interrupted":
        console.print_note("interrupted: the same command again does the rows that are left")
        raise typer.Exit(_INTERRUPTED)
    if done.status == "too many failures":
        console.print_note(
            f"stopped: {done.num_failed:,} rows have failed, more than --max-failures; the same command with a larger "
            "number does the rows that are left"
        )
    if done.num_failed:
        raise typer.Exit(_SOME_FAILED)
