"""`Predictor`: an engine as a callable class for `ray.data.Dataset.map_batches`.

What a row may hold, and which columns it gains, is as in a batch job (`raytp.batch_job.plain_format`). Ray Data makes
the object inside an actor of its own; from there the engine places its driver and its ranks as from anywhere else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raytp.batch_job.api import has_chat_template
from raytp.batch_job.job import failed_row
from raytp.batch_job.plain_format import PlainFormat, kept_name
from raytp.batch_job.rows import BadRow, Job, Place, Row
from raytp.config import check_shared_alone
from raytp.llm import LLM
from scheduler.sampling_params import SamplingParams, validate

_TYPES = {
    "text": pa.string(),
    "finish_reason": pa.string(),
    "num_prompt_tokens": pa.int64(),
    "num_cached_tokens": pa.int64(),
    "num_output_tokens": pa.int64(),
    "error_code": pa.string(),
    "error_message": pa.string(),
}
"""Those of a batch job's columns that have a meaning where rows have no numbers and no files."""


class Predictor:
    """Answers the rows of a batch, each by itself: one that fails has its error in its columns, and ends nothing.

    `dataset.map_batches(Predictor, fn_constructor_kwargs={"model": ...}, concurrency=(1, 4), num_cpus=0)`
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        tensor_parallel_size: int = 1,
        *,
        engine: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat: bool | None = None,
        **options: Any,
    ) -> None:
        """The arguments are those of `raytp.batch`. Raises RaytpError."""
        sampling = sampling_params or SamplingParams()
        validate(sampling)
        if engine is None:
            self._llm = LLM(model, tensor_parallel_size, show_progress=False, **options)
        else:
            check_shared_alone(engine, model, tensor_parallel_size, options)
            self._llm = LLM.connect(engine, show_progress=False)
        self._format = PlainFormat(sampling, has_chat_template(self._llm.tokenizer) if chat is None else chat)

    def __call__(self, batch: Any) -> pa.Table:
        """`batch` with the columns of the answers; it is a table of pyarrow, or arrays by the names of columns.

        Raises EngineError if the engine ends.
        """
        table = batch if isinstance(batch, pa.Table) else _table(batch)
        parsed = [
            self._format.parse(Place(ordinal=i, source="", line=i), row) for i, row in enumerate(table.to_pylist())
        ]
        rows = {row.place.ordinal: row for row in parsed if isinstance(row, Row)}
        jobs: list[Job] = [(ordinal, row.request, row.params) for ordinal, row in rows.items()]
        records = {row.place.ordinal: self._format.error_record(row) for row in parsed if isinstance(row, BadRow)}
        for result in self._llm.complete(jobs):
            if result is not None:
                row, output = rows[result[0]], result[1]
                failed = failed_row(row, output)
                record = self._format.error_record(failed) if failed else self._format.record(row, output)
                records[row.place.ordinal] = record
        return _with_results(table, [records[ordinal] for ordinal in range(len(parsed))])

    def shutdown(self) -> None:
        """End the engine; of a shared one, let go of it. Ray Data's actors do it when they end."""
        self._llm.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it may never have started, or Ray may have ended
            self.shutdown()


def _with_results(table: pa.Table, records: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The columns of `table` as they are, except for their names, and those of the results."""
    kept = table.rename_columns([kept_name(name) for name in table.column_names])
    for name, kind in _TYPES.items():
        kept = kept.append_column(name, pa.array([record[name] for record in records], kind))
    return kept


def _table(columns: Mapping[str, Any]) -> pa.Table:
    return pa.table({name: pa.array([_plain(value) for value in values]) for name, values in columns.items()})


def _plain(value: Any) -> Any:
    """As Python has it, whatever arrays are inside."""
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value
