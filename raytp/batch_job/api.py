"""`raytp.batch`: from paths and settings to a finished job. `engine_choice` starts the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import fsspec

from raytp.batch_job.engine_choice import EngineChoice
from raytp.batch_job.job import BatchJob, RecordFormat
from raytp.batch_job.locations import Location, locate
from raytp.batch_job.openai_response import OpenAIFormat
from raytp.batch_job.output import Output
from raytp.batch_job.plain_format import PlainFormat, check_defaults
from raytp.batch_job.progress import BatchSummary, JobProgress
from raytp.batch_job.readers import InputFile, Reader, find_files, find_format, table_schema
from raytp.batch_job.rows import Engine
from raytp.errors import BatchError, ConfigError, EngineError
from raytp.prompts import has_chat_template
from raytp.scaling import Policy
from scheduler.sampling_params import SamplingParams, validate

_OUTPUT_FORMATS = ("jsonl", "parquet")
_OTHER_FORMATS = ("csv", "gz", "json", "tsv", "txt", "xlsx")
"""Names that nobody means for a folder."""


class BatchInterrupted(KeyboardInterrupt):
    """Ctrl-C, after all that was finished has been committed; `summary` says what."""

    def __init__(self, summary: BatchSummary) -> None:
        super().__init__()
        self.summary = summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How rows become records: the arguments of `batch`."""

    sampling: SamplingParams
    chat: bool | None
    ordered: bool
    errors: str | os.PathLike[str] | None
    max_failures: int | None
    input_format: str | None
    output_format: str | None
    restart: bool


def batch(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    engine: str | None = None,
    model: str | os.PathLike[str] | None = None,
    tensor_parallel_size: int = 1,
    replicas: int | str | tuple[int, int] | None = None,
    policy: str | Policy = "fixed",
    sampling_params: SamplingParams | None = None,
    chat: bool | None = None,
    ordered: bool = False,
    errors: str | os.PathLike[str] | None = None,
    max_failures: int | None = None,
    input_format: str | None = None,
    output_format: str | None = None,
    restart: bool = False,
    show_progress: bool | None = None,
    **options: Any,
) -> BatchSummary:
    """Answer every row of files; run again after a crash, it does the rows that are left.

    Arguments:
        input: a path or an fsspec URL of a file, a glob or a folder.
        output: a path or an fsspec URL of a .jsonl or .parquet file, or of a folder of part files.
        engine: the name of a shared engine, as for `raytp.LLM.connect`; None starts one.
        model, tensor_parallel_size, options: as for `raytp.LLM`.
        replicas: so many engines; "MIN:MAX" or (MIN, MAX) lets the policy decide. None starts one.
        policy: "fixed" (as many as MAX), "queue:SECONDS", "deadline:SECONDS", "module:function", or the function: from
            a `raytp.scaling.Observation` to a number of replicas.
        sampling_params: holds where a row says nothing else.
        chat: ask prompts of text through the chat template; None does if the model has one.
        ordered: records in the order of the input, not of completion.
        errors: a JSONL file for the error records; None leaves them in the output.
        max_failures: stop when more rows than this have failed.
        input_format: "openai", "jsonl", "parquet" or "text"; None goes by the files.
        output_format: "jsonl" or "parquet" of a folder; None is Parquet for Parquet.
        restart: discard an earlier run's output.
        show_progress: False shows none; else a bar on a terminal, or a line every ten seconds.

    Raises BatchError if the output cannot be used, ConfigError for other settings, BatchInterrupted (a
    KeyboardInterrupt) after Ctrl-C, and what `raytp.LLM` raises. A row that fails raises nothing.
    """
    settings = Settings(
        sampling=sampling_params or SamplingParams(),
        chat=chat,
        ordered=ordered,
        errors=errors,
        max_failures=max_failures,
        input_format=input_format,
        output_format=output_format,
        restart=restart,
    )
    choice = EngineChoice(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        options=options,
        shared=engine,
        replicas=replicas,
        policy=policy,
    )
    return run_job(input, output, settings, choice, show_progress)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be done, checked as far as it can be without an engine."""

    files: Sequence[InputFile]
    input_format: str
    output: Location
    output_format: str
    errors: Location | None
    settings: Settings

    def identity(self, model: Mapping[str, str]) -> dict[str, Any]:
        """All that decides which record a row becomes."""
        return {
            "model": model,
            "sampling": asdict(self.settings.sampling),
            "chat": self.settings.chat,
            "ordered": self.settings.ordered,
            "input": {file.name: {"size": file.size, "version": file.version} for file in self.files},
            "input_format": self.input_format,
            "output_format": self.output_format,
            "errors": None if self.errors is None else str(self.errors),
        }

    def summary(self, status: str, output: Output, progress: JobProgress) -> BatchSummary:
        """What has been done until now."""
        errors = None if self.errors is None else str(self.errors)
        return progress.summary(status, output.total, str(self.output), errors)


def _plan(input: str | os.PathLike[str], output: str | os.PathLike[str], settings: Settings) -> _Job:
    validate(settings.sampling)
    files = find_files(os.fspath(input))
    input_format = find_format(files, settings.input_format)
    if input_format != "openai":
        check_defaults(settings.sampling)
    target, errors = locate(output), None if settings.errors is None else locate(settings.errors)
    if errors is not None and str(target) == str(errors):
        raise ConfigError(f"{target} cannot be both the output and the file of errors: name two")
    output_format = _find_output_format(target, settings.output_format, input_format)
    return _Job(files, input_format, target, output_format, errors, settings)


def run_job(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    settings: Settings,
    choice: EngineChoice,
    show_progress: bool | None,
) -> BatchSummary:
    """See `batch`."""
    job = _plan(input, output, settings)
    return _run(job, choice, job.identity(choice.identity(show_progress)), show_progress)


def _run(job: _Job, choice: EngineChoice, identity: dict[str, Any], show_progress: bool | None) -> BatchSummary:
    output = Output(job.output, job.errors, job.output_format)
    with closing(output):
        is_typed = (job.input_format, job.output_format) == ("parquet", "parquet")
        run_id = output.open(identity, table_schema(job.files) if is_typed else None, restart=job.settings.restart)
        if output.is_finished:
            return job.summary("complete", output, JobProgress(output.total, False))
        try:
            summary = _work(job, choice, output, run_id, show_progress)
        except (EngineError, BatchError) as error:
            raise type(error)(_with_remedy(str(error), output.total.num_rows)) from error
    if summary.status == "interrupted":
        raise BatchInterrupted(summary)
    return summary


def _work(job: _Job, choice: EngineChoice, output: Output, run_id: str, show_progress: bool | None) -> BatchSummary:
    """Start the engine, and do what is left to do."""
    reader = Reader(job.files, job.input_format)
    with (
        choice.start(show_progress, reader.num_unread) as engine,
        JobProgress(output.total, show_progress, getattr(engine, "crew", None)) as progress,  # a single engine has none
    ):
        runner = BatchJob(
            reader,
            _row_format(job, run_id, engine),
            output,
            progress,
            is_ordered=job.settings.ordered,
            max_failures=job.settings.max_failures,
        )
        status = runner.run(engine)
        if status == "complete":
            output.finish()
        return job.summary(status, output, progress)


def _with_remedy(message: str, num_done: int) -> str:
    """The first line, which is what a person sees, also says what to do."""
    first, newline, rest = message.partition("\n")
    end = "" if first.endswith((".", "?")) else "."
    return f"{first}{end} {num_done:,} rows are done, and the same job again does the rest{newline}{rest}"


def _row_format(job: _Job, run_id: str, engine: Engine) -> RecordFormat:
    sampling, use_chat = job.settings.sampling, job.settings.chat
    if job.input_format == "openai":
        return OpenAIFormat(sampling, run_id, engine.model_name, engine.tokenizer)
    return PlainFormat(sampling, has_chat_template(engine.tokenizer) if use_chat is None else use_chat)


def _find_output_format(output: Location, given: str | None, input_format: str) -> str:
    """Raises ConfigError if settings contradict each other."""
    if given is not None and given not in _OUTPUT_FORMATS:
        raise ConfigError(f"output_format={given!r} must be one of {', '.join(_OUTPUT_FORMATS)}")
    extension = output.name.rpartition(".")[2]
    by_name = extension if extension in _OUTPUT_FORMATS else None
    if extension in _OTHER_FORMATS:
        raise ConfigError(f"{output} cannot be written as {extension}: name a .jsonl or .parquet file, or a folder")
    if by_name is not None and given not in (None, by_name):
        raise ConfigError(f"output_format={given!r} contradicts the name of {output}")
    chosen = by_name or given or ("parquet" if input_format == "parquet" else "jsonl")
    if chosen == "parquet" and input_format == "openai":
        raise ConfigError("the output of requests in OpenAI's format is JSONL: give a .jsonl file, or a folder")
    return chosen


def write_summary(summary: BatchSummary, url: str) -> None:
    """As a JSON object, to a path or an fsspec URL. Raises BatchError if it cannot be written."""
    try:
        with fsspec.open(url, "w", encoding="utf-8") as opened:
            opened.write(json.dumps(asdict(summary), indent=1) + "\n")
    except (OSError, ValueError, ImportError) as error:
        raise BatchError(f"the summary {url} cannot be written: {error}") from error
