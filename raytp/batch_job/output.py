"""The output of a job: part files, committed one after another, and joined at the end if it is to be one file.

    OUTPUT is a folder               OUTPUT is a file
    OUTPUT/part-000000.jsonl         OUTPUT                        once all rows are done
    OUTPUT/_raytp/ ...               OUTPUT.parts/part-000000.jsonl, _raytp/ ...

A part gets its name when it is whole, and counts once the manifest in `_raytp` names it. Called by
`raytp.batch_job.job` and `api`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from raytp.batch_job.journal import journal_in
from raytp.batch_job.locations import LocalLocation, Location, locate
from raytp.batch_job.manifest import Commit, Counts, Identity, Manifest
from raytp.batch_job.parts import JsonlPart, ParquetPart, PartWriter, infer_schema, join_parts
from raytp.batch_job.row_ids import OrdinalSet, pack_ranges, unpack_ranges
from raytp.batch_job.schema import decode_schema, encode_schema, result_schema
from raytp.errors import BatchError

_WORK = "_raytp"
_PART_NAME = re.compile(r"(part|errors)-\d+\.(jsonl|parquet)$")
_MAX_PART_BYTES = 64 << 20
_LOCAL_PART_S, _REMOTE_PART_S = 5.0, 30.0
"""Until a part is committed at the latest. In an object store each one costs a second, and money."""


class Output:
    """Takes records, and remembers across runs which rows have theirs. Close it."""

    def __init__(
        self,
        target: Location,
        errors: Location | None,
        output_format: str,
        *,
        max_part_rows: int = 5000,
        max_part_s: float | None = None,
    ) -> None:
        """`target` is one file if its name ends in .jsonl or .parquet, else a folder."""
        self._target = target if target.name.endswith((".jsonl", ".parquet")) else None
        self._folder = target if self._target is None else target.sibling(f"{target.name}.parts")
        self._errors = errors
        self._format = output_format
        self._max_part_rows = max_part_rows
        default_s = _LOCAL_PART_S if isinstance(target, LocalLocation) else _REMOTE_PART_S
        self._max_part_s = default_s if max_part_s is None else max_part_s
        self._journal = journal_in(self._folder.child(_WORK))
        self._manifest = Manifest(self._journal)
        self._schema: Any = None
        self._has_new_schema = False
        self._number = 0
        self._part_s = time.monotonic()
        self._writers: dict[str, PartWriter] = {}
        self._ordinals: list[int] = []
        self._counts = Counts()
        self.done = OrdinalSet()
        """Rows that had their record when it was opened."""
        self.total = Counts()
        """Of all commits, earlier runs' included."""

    def open(self, identity: Identity, input_schema: Any | None, *, restart: bool) -> str:
        """Begin a run, or go on with the earlier one of the same identity; its name.

        Raises BatchError if the output is in use, cannot be written, holds something else, or an earlier run with other
        settings; ConfigError if the schema cannot be an output's.
        """
        try:
            return self._open(identity, input_schema, restart)
        except OSError as error:
            raise BatchError(f"the output {self._folder} cannot be written: {error}") from error

    def _open(self, identity: Identity, input_schema: Any | None, restart: bool) -> str:
        known = None if input_schema is None else result_schema(input_schema)
        self._journal.acquire()
        if restart and self._journal.exists():
            self._journal.claim()
            self._discard()
        if not self._journal.exists():
            self._check_empty()
            self._journal.claim()
            run_id = self._manifest.create(identity)
        else:
            run_id = self._manifest.reopen(identity)
            self._journal.claim()
        self._load()
        if self._format == "parquet" and self._schema is None:
            self._schema = known
        self._remove_uncommitted()
        return run_id

    @property
    def is_finished(self) -> bool:
        """Whether an earlier run has done everything."""
        return self._manifest.is_finished()

    def add(self, ordinal: int, record: Mapping[str, Any], counts: Counts) -> None:
        """Take the record of a row. Raises BatchError if it cannot be written."""
        stream = "errors" if counts.num_failed and self._errors is not None else "output"
        try:
            if stream not in self._writers:
                self._writers[stream] = self._open_part(stream)
            self._writers[stream].write(record)
        except OSError as error:
            raise BatchError(f"the output {self._folder} cannot be written: {error}") from error
        self._ordinals.append(ordinal)
        self._counts.add(counts)
        is_big = sum(writer.num_bytes for writer in self._writers.values()) >= _MAX_PART_BYTES
        if is_big or len(self._ordinals) >= self._max_part_rows:
            self.commit()

    def commit_if_due(self) -> None:
        """Commit, if the last time is long enough ago."""
        if time.monotonic() - self._part_s >= self._max_part_s:
            self.commit()

    def commit(self) -> None:
        """Make what has been added last. Raises BatchError if that fails; then a later run does those rows again."""
        self._part_s = time.monotonic()
        if not self._ordinals:
            return
        writers, ordinals, counts = self._writers, self._ordinals, self._counts
        self._writers, self._ordinals, self._counts = {}, [], Counts()
        try:
            self._journal.check_writer()
            for stream, writer in writers.items():
                writer.close()
                self._folder.child(self._part_name(stream)).take(writer.path)
            self._manifest.append(
                Commit(
                    number=self._number,
                    ordinals=pack_ranges(ordinals),
                    output=self._part_name("output") if "output" in writers else None,
                    errors=self._part_name("errors") if "errors" in writers else None,
                    counts=counts,
                    schema=encode_schema(self._schema) if self._has_new_schema else None,
                )
            )
        except OSError as error:
            raise BatchError(f"the output {self._folder} cannot be written: {error}") from error
        self.total.add(counts)
        self._has_new_schema = False
        self._number += 1

    def finish(self) -> None:
        """All rows are committed: make the files that consist of all parts, and leave the parts of a folder alone."""
        try:
            self._journal.check_writer()
            if self._errors is not None:
                join_parts(self._parts("errors"), self._errors, None)
            if self._target is not None:
                schema = None
                if self._format == "parquet":
                    schema = self._schema if self._schema is not None else infer_schema([], result_schema(None))
                join_parts(self._parts("output"), self._target, schema)
            self._manifest.finish([str(file) for file in (self._target, self._errors) if file is not None])
        except OSError as error:
            raise BatchError(f"the parts in {self._folder} cannot be joined: {error}") from error
        self._remove_joined()

    def close(self) -> None:
        """Let others use the output. What has not been committed is left out."""
        for writer in self._writers.values():
            writer.path.unlink(missing_ok=True)
        self._writers = {}
        self._journal.release()

    def _check_empty(self) -> None:
        """Nothing that a person may want to keep is in the way."""
        for file in (self._target, self._errors):
            if file is not None and file.is_taken():
                raise BatchError(f"{file} is there already and no earlier run of this job: name another output")
        others = [name for name in self._folder.names() if name != _WORK]
        if others:
            raise BatchError(
                f"the folder {self._folder} holds {others[0]} and no earlier run of this job: name another output"
            )

    def _load(self) -> None:
        for commit in self._manifest.commits():
            for first, last in unpack_ranges(commit.ordinals):
                self.done.add_range(first, last)
            self.total.add(commit.counts)
            self._number = commit.number + 1
            if commit.schema is not None:
                self._schema = decode_schema(commit.schema)
        missing = next(self._missing(), None)
        if missing is not None:
            raise BatchError(f"{missing}, which the earlier run has written, is gone: --restart does all rows again")

    def _missing(self) -> Iterator[Location]:
        """Files that should be there, and are not."""
        is_finished = self._manifest.is_finished()
        files = [file for file in (self._target, self._errors) if file is not None and is_finished]
        yield from (file for file in files if not file.exists())
        present = set(self._folder.names())
        for stream, is_joined in (("output", is_finished and self._target), ("errors", is_finished)):
            yield from (part for part in self._parts(stream) if not is_joined and part.name not in present)

    def _parts(self, stream: str) -> Iterator[Location]:
        for commit in self._manifest.commits():
            name = commit.output if stream == "output" else commit.errors
            if name is not None:
                yield self._folder.child(name)

    def _part_name(self, stream: str) -> str:
        prefix = "part" if stream == "output" else "errors"
        return f"{prefix}-{self._number:06d}.{self._format if stream == 'output' else 'jsonl'}"

    def _open_part(self, stream: str) -> PartWriter:
        path = self._folder.child(_WORK).child(stream).partial()
        if stream == "output" and self._format == "parquet":
            return ParquetPart(path, self._known_schema)
        return JsonlPart(path)

    def _known_schema(self, records: Any) -> Any:
        """That of all parts; the first part's records decide if the input has none of its own."""
        if self._schema is None:
            self._schema = infer_schema(records, result_schema(None))
            self._has_new_schema = True
        return self._schema

    def _own_parts(self) -> Iterator[Location]:
        return (self._folder.child(name) for name in self._folder.names() if _PART_NAME.match(name))

    def _remove_uncommitted(self) -> None:
        """Parts that were written when the run was killed, before the manifest had them."""
        committed = {part.name for stream in ("output", "errors") for part in self._parts(stream)}
        for part in self._own_parts():
            if part.name not in committed:
                part.remove()
        if self._manifest.is_finished():
            self._remove_joined()

    def _remove_joined(self) -> None:
        present = set(self._folder.names())
        for stream, file in (("output", self._target), ("errors", self._errors)):
            for part in self._parts(stream) if file is not None else ():
                if part.name in present:
                    part.remove()

    def _discard(self) -> None:
        """Remove what the earlier run has made."""
        for part in self._own_parts():
            part.remove()
        with contextlib.suppress(BatchError):  # of a damaged manifest
            for file in self._manifest.files():
                locate(file).remove()
        self._journal.remove()
