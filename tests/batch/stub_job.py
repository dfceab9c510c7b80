"""A whole batch job with the stub engine, for tests in this process and, as a program, in one that can be killed.

python -m tests.batch.stub_job INPUT OUTPUT SETTINGS, where SETTINGS is a JSON object of arguments of `run_stub`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from raytp.batch_job.job import BatchJob
from raytp.batch_job.locations import locate
from raytp.batch_job.openai_response import OpenAIFormat
from raytp.batch_job.output import Output
from raytp.batch_job.plain_format import PlainFormat
from raytp.batch_job.progress import BatchSummary, JobProgress
from raytp.batch_job.readers import Reader, find_files, find_format, table_schema
from scheduler.sampling_params import SamplingParams
from tests.batch import bucket  # noqa: F401 (makes fsspec know it)
from tests.batch.stub_engine import StubEngine


def run_stub(
    source: str | Path,
    target: str | Path,
    *,
    engine: StubEngine | None = None,
    seed: int = 0,
    delay_s: float = 0.0,
    remembers: bool = True,
    input_format: str | None = None,
    output_format: str = "jsonl",
    errors: str | None = None,
    ordered: bool = False,
    order_window: int = 4096,
    max_failures: int | None = None,
    max_part_rows: int = 7,
    max_part_s: float | None = None,
    use_chat: bool = False,
    restart: bool = False,
    model: str = "stub",
) -> BatchSummary:
    """Run the job, to its end or to where it stops."""
    files = find_files(str(source))
    input_format = find_format(files, input_format)
    identity = {
        "model": model,
        "input": {file.url: {"size": file.size, "version": file.version} for file in files},
        "ordered": ordered,
    }
    output = Output(
        locate(target),
        None if errors is None else locate(errors),
        output_format,
        max_part_rows=max_part_rows,
        max_part_s=max_part_s,
    )
    if engine is None:
        engine = StubEngine(seed, delay_s=delay_s)
        engine.remembers = remembers
    try:
        schema = table_schema(files) if (input_format, output_format) == ("parquet", "parquet") else None
        run_id = output.open(identity, schema, restart=restart)
        progress = JobProgress(output.total, False)
        row_format: Any = PlainFormat(SamplingParams(), use_chat)
        if input_format == "openai":
            row_format = OpenAIFormat(SamplingParams(), run_id, engine.model_name, engine.tokenizer)
        job = BatchJob(
            Reader(files, input_format),
            row_format,
            output,
            progress,
            is_ordered=ordered,
            max_failures=max_failures,
            order_window=order_window,
        )
        status = "complete" if output.is_finished else job.run(engine)
        if status == "complete" and not output.is_finished:
            output.finish()
        return progress.summary(status, output.total, str(target), errors)
    finally:
        output.close()


if __name__ == "__main__":
    summary = run_stub(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
    print(json.dumps({"status": summary.status, "num_rows": summary.num_rows, "num_failed": summary.num_failed}))
