"""Part files: a few thousand records each, written under another name until they are whole, and joined at the end.

Called by `raytp.batch_job.output`. JSONL goes straight to its file; of Parquet, the records of one part are held.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from raytp.batch_job.json_text import dump_line

OTHER_COLUMNS = "other_columns"
"""The Parquet column that holds, as JSON, what does not fit the schema of the first part."""


class PartWriter(Protocol):
    """One part on its way."""

    num_bytes: int
    """About its size so far."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record."""

    def close(self) -> None:
        """Write what is left, and make it last."""


class JsonlPart:
    """A part of JSONL."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 (closed in close)
        self.num_bytes = 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        self.num_bytes += self._file.write(dump_line(record))

    def close(self) -> None:
        """Write what is left, and make it last."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


class ParquetPart:
    """A part of Parquet: one row group. Its records are held until it is closed."""

    def __init__(self, path: Path, schema: Callable[[Sequence[Mapping[str, Any]]], Any]) -> None:
        """`schema` gives the pyarrow schema of all parts, once it is shown the records of one."""
        self._path = path
        self._schema = schema
        self._records: list[Mapping[str, Any]] = []
        self.num_bytes = 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        self._records.append(record)
        self.num_bytes += sum(len(each) if isinstance(each, (str, bytes, list)) else 8 for each in record.values())

    def close(self) -> None:
        """Write what is left, and make it last."""
        import pyarrow.parquet as pq

        pq.write_table(as_table(self._records, self._schema(self._records)), self._path)
        _sync(self._path)


def as_table(records: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    """A pyarrow table of the records; what the schema has no place for goes to `OTHER_COLUMNS`, if it has that."""
    import pyarrow as pa

    others: list[dict[str, Any]] = [
        {name: value for name, value in record.items() if name not in schema.names} for record in records
    ]
    columns = []
    for field in schema:
        if field.name == OTHER_COLUMNS:
            continue
        values = [record.get(field.name) for record in records]
        try:
            columns.append(pa.array(values, type=field.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            columns.append(pa.array(_fitting(field, values, others), type=field.type))
    if OTHER_COLUMNS in schema.names:
        columns.append(
            pa.array([dump_line(each).decode().rstrip("\n") if each else None for each in others], pa.string())
        )
    return pa.Table.from_arrays(columns, schema=schema)


def _fitting(field: Any, values: Sequence[Any], others: Sequence[dict[str, Any]]) -> list[Any]:
    """The values that fit the field's type; the others, as None, are put into their row's other columns."""
    import pyarrow as pa

    kept = []
    for value, other in zip(values, others, strict=True):
        try:
            pa.array([value], type=field.type)
            kept.append(value)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            other[field.name] = value
            kept.append(None)
    return kept


def infer_schema(records: Sequence[Mapping[str, Any]], known: Any) -> Any:
    """The schema `known`, with the other columns of `records` as far as pyarrow finds a type for them."""
    import pyarrow as pa

    fields = []
    for name in dict.fromkeys(name for record in records for name in record):
        if name in known.names or name == OTHER_COLUMNS:
            continue
        try:
            kind = pa.array([record.get(name) for record in records]).type
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue
        # Parquet has no struct without fields, and a column of nothing tells nothing of what comes.
        if not (pa.types.is_null(kind) or pa.types.is_nested(kind)):
            fields.append(pa.field(name, kind))
    return pa.schema([*fields, *known, pa.field(OTHER_COLUMNS, pa.string())])


def join_parts(parts: Iterable[Path], target: Path, schema: Any | None) -> None:
    """Make `target` of the parts in their order, all of it or nothing. `schema`: of Parquet, None for JSONL."""
    partial = target.with_name(f".{target.name}.raytp-partial")
    with open(partial, "wb") as joined:
        if schema is None:
            for part in parts:
                with open(part, "rb") as opened:
                    shutil.copyfileobj(opened, joined, 1 << 20)
        else:
            _join_tables(parts, joined, schema)
    _sync(partial)
    os.replace(partial, target)
    sync_folder(target.parent)


def _join_tables(parts: Iterable[Path], joined: Any, schema: Any) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(joined, schema) as writer:
        for part in parts:
            writer.write_table(pq.read_table(part, schema=schema))


def _sync(path: Path) -> None:
    with open(path, "rb") as opened:
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
