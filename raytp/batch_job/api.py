"""`raytp.batch`: from paths and settings to a finished job. The only file of the package that starts an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from raytp.batch_job.job import BatchJob, RecordFormat
from raytp.batch_job.openai_response import OpenAIFormat
from raytp.batch_job.output import Output
from raytp.batch_job.plain_format import PlainFormat
from raytp.batch_job.progress import BatchSummary, JobProgress
from raytp.batch_job.readers import InputFile, Reader, find_files, find_format, table_schema
from raytp.batch_job.rows import Engine
from raytp.errors import ConfigError, RequestError
from scheduler.sampling_params import SamplingParams, validate

if TYPE_CHECKING:
    from raytp.llm import LLM

_OUTPUT_FORMATS = ("jsonl", "parquet")
_MODEL_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model")


class BatchInterrupted(KeyboardInterrupt):
    """Ctrl-C, after all that was finished has been committed; `summary` says what."""

    def __init__(self, summary: BatchSummary) -> None:
        super().__init__()
        self.summary = summary


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What is to be done, checked as far as it can be without an engine."""

    files: Sequence[InputFile]
    input_format: str
    output: Path
    output_format: str
    errors: Path | None
    sampling: SamplingParams
    use_chat: bool | None
    is_ordered: bool
    max_failures: int | None

    def identity(self, model: dict[str, str]) -> dict[str, Any]:
        """All that decides which record a row becomes."""
        return {
            "model": model,
            "sampling": asdict(self.sampling),
            "chat": self.use_chat,
            "ordered": self.is_ordered,
            "input": {file.url: {"size": file.size, "version": file.version} for file in self.files},
            "input_format": self.input_format,
            "output_format": self.output_format,
            "errors": None if self.errors is None else str(self.errors.absolute()),
        }


def batch(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    tensor_parallel_size: int = 1,
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
        output: a .jsonl or .parquet file, or a folder of part files.
        model, tensor_parallel_size, options: as for `raytp.LLM`.
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
    sampling = sampling_params or SamplingParams()
    validate(sampling)
    files = find_files(os.fspath(input))
    input_format = find_format(files, input_format)
    path, errors_path = _local(output), None if errors is None else _local(errors)
    if path == errors_path:
        raise ConfigError(f"{path} cannot be both the output and the file of errors: name two")
    job = _Job(
        files=files,
        input_format=input_format,
        output=path,
        output_format=_find_output_format(path, output_format, input_format),
        errors=errors_path,
        sampling=sampling,
        use_chat=chat,
        is_ordered=ordered,
        max_failures=max_failures,
    )
    from raytp.model_source import resolve_model

    source = resolve_model(model)
    identity = job.identity({"name": source.name, "digest": model_digest(source.path)})

    def start() -> LLM:
        from raytp.llm import LLM

        return LLM(model, tensor_parallel_size, show_progress=show_progress, **options)

    return _run(job, identity, start, restart, show_progress)


def _run(job: _Job, identity: dict[str, Any], start: Any, restart: bool, show_progress: bool | None) -> BatchSummary:
    output = Output(job.output, job.errors, job.output_format)
    errors = None if job.errors is None else str(job.errors)
    with ExitStack() as stack:
        stack.callback(output.close)
        schema = table_schema(job.files) if (job.input_format, job.output_format) == ("parquet", "parquet") else None
        run_id = output.open(identity, schema, restart=restart)
        if output.is_finished:
            return JobProgress(output.total, False).summary("complete", output.total, str(job.output), errors)
        engine = stack.enter_context(start())
        row_format = _row_format(job, run_id, engine)
        progress = stack.enter_context(JobProgress(output.total, show_progress))
        runner = BatchJob(
            Reader(job.files, job.input_format),
            row_format,
            output,
            progress,
            is_ordered=job.is_ordered,
            max_failures=job.max_failures,
        )
        status = runner.run(engine)
        if status == "complete":
            output.finish()
        summary = progress.summary(status, output.total, str(job.output), errors)
    if status == "interrupted":
        raise BatchInterrupted(summary)
    return summary


def _row_format(job: _Job, run_id: str, engine: Engine) -> RecordFormat:
    if job.input_format == "openai":
        return OpenAIFormat(job.sampling, run_id, engine.model_name, engine.tokenizer)
    return PlainFormat(job.sampling, _has_chat_template(engine) if job.use_chat is None else job.use_chat)


def _has_chat_template(engine: Engine) -> bool:
    from raytp.prompts import encode_conversation

    tokenizer: Any = engine.tokenizer
    try:
        encode_conversation([{"role": "user", "content": "?"}], tokenizer, {})
    except RequestError:
        return False
    return True


def model_digest(folder: Path) -> str:
    """A digest of a model's folder: its small files' content, and its weights' names and sizes."""
    digest = xxhash.xxh3_128()
    for path in sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)}):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        if path.suffix in (".json", ".jinja"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ConfigError(
            f"{path} is a URL: write to a local or shared folder, which can be locked, and copy from there"
        )
    return Path(path).expanduser()


def _find_output_format(path: Path, given: str | None, input_format: str) -> str:
    """Raises ConfigError if settings contradict each other."""
    if given is not None and given not in _OUTPUT_FORMATS:
        raise ConfigError(f"output_format={given!r} must be one of {', '.join(_OUTPUT_FORMATS)}")
    by_name = path.suffix[1:] if path.suffix[1:] in _OUTPUT_FORMATS else None
    if by_name is not None and given not in (None, by_name):
        raise ConfigError(f"output_format={given!r} contradicts the name of {path}")
    chosen = by_name or given or ("parquet" if input_format == "parquet" else "jsonl")
    if chosen == "parquet" and input_format == "openai":
        raise ConfigError("the output of requests in OpenAI's format is JSONL: give a .jsonl file, or a folder")
    return chosen


def write_summary(summary: BatchSummary, path: Path) -> None:
    """As a JSON object."""
    path.write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
