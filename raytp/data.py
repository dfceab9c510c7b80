"""`Predictor`: an engine as a callable class for `ray.data.Dataset.map_batches`.

What a row may hold, and which columns it gains, is as in a batch job (`raytp.batch_job.plain_format`). Ray Data makes
the object inside an actor of its own; from there the engine places its driver and its ranks as from anywhere else.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raytp.batch_job.job import failed_row
from raytp.batch_job.plain_format import SAMPLING_COLUMNS, PlainFormat, kept_name
from raytp.batch_job.rows import BadRow, Job, Place, Row
from raytp.config import check_shared_alone
from raytp.llm import LLM
from raytp.prompts import has_chat_template
from scheduler.errors import RequestError, shown
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

_ASKED = {"id", "prompt", "messages", *SAMPLING_COLUMNS}
"""Columns that a row is made of."""


class Predictor:
    """Answers the rows of a batch, each by itself: one that fails has its error in its columns, and ends nothing.

    dataset.map_batches(
        Predictor,
        fn_constructor_kwargs={"model": ...},
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=4),
        num_cpus=0,
    )
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
        sampling = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling_params={shown(sampling_params)} must be a SamplingParams")
        validate(sampling)
        if engine is None:
            self._llm = LLM(model, tensor_parallel_size, show_progress=False, **options)
        else:
            check_shared_alone(engine, model, tensor_parallel_size, options)
            self._llm = LLM.connect(engine, show_progress=False)
        self._format = PlainFormat(sampling, has_chat_template(self._llm.tokenizer) if chat is None else chat)

    def __call__(self, batch: Any) -> pa.Table:
        """`batch` with the columns of the answers; it is a table of pyarrow or pandas, or arrays by their names.

        Raises RequestError if it is no table, EngineError if the engine ends.
        """
        table = _table(batch)
        _check_names(table.column_names)
        parsed = [self._format.parse(Place(ordinal=i, source="", line=i), row) for i, row in enumerate(_rows(table))]
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


def _check_names(names: Sequence[str]) -> None:
    """Raises RequestError if two columns of the results would have the same name."""
    sources: dict[str, str] = {}
    for name in names:
        other = sources.setdefault(kept_name(name), name)
        if other is not name:
            raise RequestError(
                f"the columns {shown(other)} and {shown(name)} would both be {shown(kept_name(name))} beside the "
                f"answers: rename one"
            )


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """What decides on the answers. Other columns may be of types that Python has no values for."""
    names = [name for name in table.column_names if name in _ASKED]
    return table.select(names).to_pylist() if names else [{} for _ in range(table.num_rows)]


def _table(batch: Any) -> pa.Table:
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    pandas = sys.modules.get("pandas")
    try:
        if pandas is not None and isinstance(batch, pandas.DataFrame):
            return pa.Table.from_pandas(batch, preserve_index=False).replace_schema_metadata(None)
        if isinstance(batch, Mapping):
            return pa.table({name: _array(name, values) for name, values in batch.items()})
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"the batch cannot be made a table of pyarrow: {error}") from error
    raise RequestError(
        f"the batch is of type {type(batch).__name__}: it must be a table of pyarrow or pandas, or arrays by the names "
        f"of columns"
    )


def _array(name: str, values: Any) -> pa.Array:
    """A column; raises what pyarrow raises, with the column's name."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
        raise TypeError(
            f"column {shown(name)} is {shown(values)}, and must be an array or a list, a value for each row"
        )
    try:
        if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype != object:
            return pa.array(values)
        return pa.array([_plain(value) for value in values], from_pandas=True)  # NaN is a gap among other values
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise TypeError(f"column {shown(name)}: {error}") from error


def _plain(value: Any) -> Any:
    """As Python has it, whatever arrays are inside."""
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value
