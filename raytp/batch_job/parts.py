"""Part files: a few thousand records each, written under another name until they are whole, and joined at the end.

Called by `raytp.batch_job.output`. JSONL goes straight to its file; of Parquet, the records of one part are held.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from raytp.batch_job.json_text import dump_line
from raytp.batch_job.locations import Location
from raytp.batch_job.plain_format import OTHER_COLUMNS


class PartWriter(Protocol):
    """One part on its way."""

    path: Path
    """The file that it writes."""
    num_bytes: int
    """About its size so far."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record."""

    def close(self) -> None:
        """Write what is left."""


class JsonlPart:
    """A part of JSONL."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "wb")  # noqa: SIM115 (closed in close)
        self.num_bytes = 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        self.num_bytes += self._file.write(dump_line(record))

    def close(self) -> None:
        """Write what is left."""
        self._file.close()


class ParquetPart:
    """A part of Parquet: one row group. Its records are held until it is closed."""

    def __init__(self, path: Path, schema: Callable[[Sequence[Mapping[str, Any]]], Any]) -> None:
        """`schema` gives the pyarrow schema of all parts, once it is shown the records of one."""
        self.path = path
        self._schema = schema
        self._records: list[Mapping[str, Any]] = []
        self.num_bytes = 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        self._records.append(record)
        self.num_bytes += sum(len(each) if isinstance(each, (str, bytes, list)) else 8 for each in record.values())

    def close(self) -> None:
        """Write what is left."""
        import pyarrow.parquet as pq

        pq.write_table(as_table(self._records, self._schema(self._records)), self.path)


def as_table(records: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    """A pyarrow table of the records; what the schema has no place for goes to `OTHER_COLUMNS`, if it has that."""
    import pyarrow as pa

    is_exact = OTHER_COLUMNS in schema.names
    others: list[dict[str, Any]] = [
        {name: value for name, value in record.items() if name not in schema.names and value is not None}
        for record in records
    ]
    columns = []
    for field in schema:
        if field.name == OTHER_COLUMNS:
            texts = [dump_line(each).decode().rstrip("\n") if each else None for each in others]
            columns.append(pa.array(texts, pa.string()))
            continue
        values = [record.get(field.name) for record in records]
        column = _as_array(values, field.type, is_exact)
        columns.append(_fitting(field, values, others, is_exact) if column is None else column)
    return pa.Table.from_arrays(columns, schema=schema)


def _as_array(values: Sequence[Any], kind: Any, is_exact: bool) -> Any | None:
    """A pyarrow array of the values, or None if they do not fit; `is_exact`: nor if they would be rounded or cut."""
    import pyarrow as pa

    try:
        array = pa.array(values, type=kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    return None if is_exact and array.to_pylist() != list(values) else array


def _fitting(field: Any, values: Sequence[Any], others: Sequence[dict[str, Any]], is_exact: bool) -> Any:
    """An array of the values that fit the field's type; the others become null, and their row's other columns."""
    import pyarrow as pa

    kept = []
    for value, other in zip(values, others, strict=True):
        fits = _as_array([value], field.type, is_exact) is not None
        kept.append(value if fits else None)
        if not fits:
            other[field.name] = value
    return pa.array(kept, type=field.type)


def infer_schema(records: Sequence[Mapping[str, Any]], known: Any) -> Any:
    """The schema `known`, behind the other columns of `records` as far as pyarrow finds a type for them."""
    import pyarrow as pa

    fields = []
    for name in dict.fromkeys(name for record in records for name in record):
        if name in known.names or name == OTHER_COLUMNS:
            continue
        try:
            kind = pa.array([record.get(name) for record in records]).type
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue
        if _is_storable(kind):
            fields.append(pa.field(name, kind))
    return pa.schema([*fields, *known, pa.field(OTHER_COLUMNS, pa.string())])


def _is_storable(kind: Any) -> bool:
    """Parquet has no struct without fields, and a column of nothing tells nothing of what comes."""
    import pyarrow as pa

    if pa.types.is_null(kind):
        return False
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return bool(inner or not pa.types.is_struct(kind)) and all(map(_is_storable, inner))


def join_parts(parts: Iterable[Location], target: Location, schema: Any | None) -> None:
    """Make `target` of the parts in their order, all of it or nothing. `schema`: of Parquet, None for JSONL."""
    partial = target.partial()
    with open(partial, "wb") as joined:
        if schema is None:
            for part in parts:
                with part.open() as opened:
                    shutil.copyfileobj(opened, joined, 1 << 20)
        else:
            _join_tables(parts, joined, schema)
    target.take(partial)


def _join_tables(parts: Iterable[Location], joined: Any, schema: Any) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(joined, schema) as writer:
        for part in parts:
            with part.open() as opened:
                writer.write_table(pq.read_table(opened, schema=schema))
