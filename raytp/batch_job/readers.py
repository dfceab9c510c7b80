"""From paths and URLs to rows: which files there are, of which format, and what each line or table row holds.

A row that cannot be read is a `BadRow`; only a file that cannot be read at all raises. Called by `raytp.batch_job.api`
and `raytp.batch_job.job`.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import fsspec
import xxhash
from fsspec.core import url_to_fs

from raytp.batch_job.json_text import decode, parse_object
from raytp.batch_job.rows import BadRow, Place, Row, RowError
from raytp.errors import BatchError, ConfigError
from raytp.working_dir import is_copy, name_in_copy

_FORMATS = ("openai", "jsonl", "parquet", "text")
_EXTENSIONS = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
    "pq": "parquet",
    "txt": "text",
}
_MAX_LINE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_NUM_PEEKED_LINES = 20
_NUM_TABLE_ROWS = 256
"""Of a Parquet file, read at once."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the input, and what tells whether it has changed."""

    url: str
    name: str
    """What to call it: the same in each run. Its URL, but not if it came with a Ray job, which finds it anywhere."""
    size: int
    version: str
    """Its etag, or when it was changed; of a file that came with a Ray job, a digest of its content."""


class RowFormat(Protocol):
    """Makes a row of the fields of a line or of a table row."""

    def parse(self, place: Place, columns: Mapping[str, Any]) -> Row | BadRow:
        """The row."""


def find_files(pattern: str) -> list[InputFile]:
    """The files of a path or URL, a glob or a folder, in the order of their names. Raises ConfigError if none."""
    try:
        system, path = url_to_fs(pattern)
        is_folder = system.isdir(path)
        if is_folder:
            paths = [each for each in sorted(system.ls(path, detail=False)) if _extension(each) in _EXTENSIONS]
        elif system.exists(path):
            paths = [path]
        else:
            paths = sorted(system.glob(path)) if any(char in path for char in "*?[") else []
        infos = [(each, system.info(each)) for each in paths]
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"the input {pattern} cannot be read: {error}") from error
    for each, info in infos:
        if info["type"] not in ("file", "directory"):
            raise ConfigError(f"the input {each} is no regular file, and a job may have to read it again: make it one")
    files = [_input_file(system, each, info) for each, info in infos if info["type"] == "file"]
    if not files:
        what = f"no file that ends in {', '.join(f'.{name}' for name in _EXTENSIONS)} in" if is_folder else "no file at"
        raise ConfigError(f"there is {what} {pattern}")
    return files


def _input_file(system: Any, path: str, info: Mapping[str, Any]) -> InputFile:
    keys = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
    version = next((info[key] for key in keys if info.get(key) is not None), "")
    is_local = "file" in ([system.protocol] if isinstance(system.protocol, str) else system.protocol)
    if is_local and is_copy(path):
        return InputFile(path, name_in_copy(path), int(info["size"]), _digest(path))
    url = path if is_local else system.unstrip_protocol(path)
    return InputFile(url, url, int(info.get("size") or 0), str(version))


def _check_unchanged(file: InputFile) -> None:
    """Raises BatchError if it is not what it was when the job began: rows may be missing, or halved."""
    system, path = url_to_fs(file.url)
    system.invalidate_cache()
    now = _input_file(system, path, system.info(path))
    if (now.size, now.version) != (file.size, file.version):
        raise BatchError(
            f"{file.url} was changed while it was read: it had {file.size} bytes and has {now.size}. Put it back as it "
            f"was, or do all rows again with --restart"
        )


def _digest(path: str) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as opened:
        while chunk := opened.read(_BUFFER_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def find_format(files: Sequence[InputFile], given: str | None) -> str:
    """One of `_FORMATS`: the one given, or by the files' extensions and first lines. Raises ConfigError."""
    if given is not None:
        if given not in _FORMATS:
            raise ConfigError(f"input_format={given!r} must be one of {', '.join(_FORMATS)}")
        return given
    found = {_EXTENSIONS.get(_extension(file.url), file.url) for file in files}
    if len(found) > 1 or not found <= set(_FORMATS):
        raise ConfigError(f"the format of the input is not clear: give one of {', '.join(_FORMATS)} (--input-format)")
    [only] = found
    return "openai" if only == "jsonl" and _has_requests(files) else only


def _extension(path: str) -> str:
    name = path.rstrip("/").rpartition("/")[2]
    return "" if name.startswith((".", "_")) else name.rpartition(".")[2].lower()


def _has_requests(files: Sequence[InputFile]) -> bool:
    """Whether one of the first lines that can be read is a request to OpenAI's API."""
    for file in files:
        with _opened(file) as opened:
            for (_, line), _ in zip(_lines(opened), range(_NUM_PEEKED_LINES), strict=False):
                try:
                    fields = parse_object(line or b"")
                except RowError:
                    continue
                return "body" in fields and ("custom_id" in fields or "url" in fields)
    return False


class Reader:
    """The rows of files, one after another. Iterate once."""

    def __init__(self, files: Sequence[InputFile], input_format: str) -> None:
        self._files = files
        self._input_format = input_format
        self._num_bytes = sum(file.size for file in files)
        self._num_bytes_read = 0.0
        self.num_read = 0
        """Rows so far."""

    @property
    def fraction(self) -> float:
        """Which part of the input has been read, from 0 to 1."""
        return min(1.0, self._num_bytes_read / self._num_bytes) if self._num_bytes else 0.0

    def num_unread(self) -> int:
        """Rows that are still to be read, by the mean length of those that were."""
        return round(self.num_read * (1 / self.fraction - 1)) if self.fraction else 0

    def rows(self, row_format: RowFormat) -> Iterator[Row | BadRow]:
        """Every row, in order. Raises ConfigError if a file cannot be read, BatchError if it changes meanwhile."""
        num_bytes = 0
        for file in self._files:
            entries = self._table_rows(file) if self._input_format == "parquet" else self._line_rows(file)
            try:
                for line, columns in entries:
                    place = Place(ordinal=self.num_read, source=file.name, line=line)
                    self.num_read += 1
                    if isinstance(columns, RowError):
                        yield BadRow(place=place, id=None, code=columns.code, message=columns.message)
                    else:
                        yield row_format.parse(place, columns)
                _check_unchanged(file)
            except OSError as error:
                raise ConfigError(f"{file.url} cannot be read: {error}") from error
            num_bytes += file.size
            self._num_bytes_read = num_bytes  # exactly: so far it was counted by the row

    def _line_rows(self, file: InputFile) -> Iterator[tuple[int, Mapping[str, Any] | RowError]]:
        is_text = self._input_format == "text"
        with _opened(file) as opened:
            for number, line in _lines(opened):
                self._num_bytes_read += 1 if line is None else len(line) + 1
                if line is not None and not line.strip():
                    continue
                try:
                    if line is None:
                        raise RowError("line_too_long", f"the line has more than {_MAX_LINE_BYTES >> 20} MiB")
                    yield number, {"prompt": decode(line)} if is_text else parse_object(line)
                except RowError as error:
                    yield number, error

    def _table_rows(self, file: InputFile) -> Iterator[tuple[int, Mapping[str, Any] | RowError]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with _opened(file) as opened:
            try:
                table = pq.ParquetFile(opened, buffer_size=_BUFFER_BYTES, pre_buffer=False)
                number, num_bytes = 0, file.size / max(1, table.metadata.num_rows)
                for batch in table.iter_batches(batch_size=_NUM_TABLE_ROWS):
                    for columns in _columns_of(batch):
                        number += 1
                        self._num_bytes_read += num_bytes
                        yield number, columns
            except pa.ArrowException as error:
                raise ConfigError(f"{file.url} cannot be read as Parquet: {error}") from error


@contextmanager
def _opened(file: InputFile) -> Iterator[Any]:
    """Raises ConfigError if it cannot be read."""
    try:
        with fsspec.open(file.url, "rb") as opened:
            yield opened
    except OSError as error:
        raise ConfigError(f"{file.url} cannot be read: {error}") from error


def _lines(opened: Any) -> Iterator[tuple[int, bytes | None]]:
    """(number from 1, line without its end and without a byte order mark), None for a line that is too long."""
    buffered = io.BufferedReader(opened, _BUFFER_BYTES)
    try:
        number = 0
        while line := buffered.readline(_MAX_LINE_BYTES):
            number += 1
            is_long = len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n")
            if number == 1:
                line = line.removeprefix(_BOM)
            yield number, None if is_long else line.removesuffix(b"\n").removesuffix(b"\r")
            while is_long and (line := buffered.readline(_BUFFER_BYTES)):
                is_long = not line.endswith(b"\n")
    finally:
        buffered.detach()  # the file is closed by who opened it


def _columns_of(batch: Any) -> Iterable[Mapping[str, Any] | RowError]:
    """The rows of a pyarrow batch. Some types hold more than Python's have room for, such as a date after 9999."""
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            return itertools.chain.from_iterable(_columns_of(batch.slice(i, 1)) for i in range(batch.num_rows))
        return [RowError("invalid_value", f"the row holds a value that cannot be read: {error}")]


def table_schema(files: Sequence[InputFile]) -> Any:
    """The pyarrow schema that holds the rows of every Parquet file. Raises ConfigError if there is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = []
    for file in files:
        with _opened(file) as opened:
            try:
                schemas.append(pq.read_schema(opened).remove_metadata())
            except pa.ArrowException as error:
                raise ConfigError(f"{file.url} cannot be read as Parquet: {error}") from error
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise ConfigError(f"the input's Parquet files do not have the same columns: {error}") from error
