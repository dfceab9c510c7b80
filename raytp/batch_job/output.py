"""The output of a job: part files, committed one after another, and joined at the end if it is to be one file.

    OUTPUT is a folder               OUTPUT is a file
    OUTPUT/part-000000.jsonl         OUTPUT                        once all rows are done
    OUTPUT/_raytp/manifest.jsonl     OUTPUT.parts/part-000000.jsonl, _raytp/ ...

A part gets its name when it is whole, and counts once the manifest names it. Called by `raytp.batch_job.job`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raytp.batch_job.manifest import Commit, Counts, Identity, Manifest
from raytp.batch_job.parts import (
    JsonlPart,
    ParquetPart,
    PartWriter,
    infer_schema,
    join_parts,
    sync_folder,
)
from raytp.batch_job.row_ids import OrdinalSet, pack_ranges, unpack_ranges
from raytp.batch_job.schema import decode_schema, encode_schema, result_schema
from raytp.errors import BatchError

_WORK = "_raytp"
_MAX_PART_BYTES = 64 << 20


class Output:
    """Takes records, and remembers across runs which rows have theirs. Close it."""

    def __init__(
        self,
        target: Path,
        errors: Path | None,
        output_format: str,
        *,
        max_part_rows: int = 5000,
        max_part_s: float = 5.0,
    ) -> None:
        """`target` is one file if its name ends in .jsonl or .parquet, else a folder."""
        self._target = target if target.suffix in (".jsonl", ".parquet") else None
        self._folder = target if self._target is None else target.with_name(f"{target.name}.parts")
        self._errors = errors
        self._format = output_format
        self._max_part_rows = max_part_rows
        self._max_part_s = max_part_s
        self._manifest = Manifest(self._folder / _WORK / "manifest.jsonl")
        self._lock = -1
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

        Raises BatchError if the output is in use, holds something else, or an earlier run with other settings.
        """
        self._acquire_lock()
        if restart and self._manifest.exists():
            self._discard()
        if not self._manifest.exists():
            self._check_empty()
            run_id = self._manifest.create(identity)
        else:
            run_id = self._manifest.reopen(identity)
        self._load()
        if self._format == "parquet" and self._schema is None and input_schema is not None:
            self._schema = result_schema(input_schema)
        self._remove_uncommitted()
        return run_id

    @property
    def is_finished(self) -> bool:
        """Whether an earlier run has done everything."""
        return self._manifest.is_finished()

    def add(self, ordinal: int, record: Mapping[str, Any], counts: Counts) -> None:
        """Take the record of a row."""
        stream = "errors" if counts.num_failed and self._errors is not None else "output"
        if stream not in self._writers:
            self._writers[stream] = self._open_part(stream)
        self._writers[stream].write(record)
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
        """Make what has been added last."""
        self._part_s = time.monotonic()
        if not self._ordinals:
            return
        names: dict[str, str | None] = {"output": None, "errors": None}
        for stream, writer in self._writers.items():
            writer.close()
            names[stream] = self._part_name(stream)
            os.replace(self._partial(stream), self._folder / self._part_name(stream))
        sync_folder(self._folder)
        schema = encode_schema(self._schema) if self._has_new_schema else None
        self._manifest.append(
            Commit(
                number=self._number,
                ordinals=pack_ranges(self._ordinals),
                output=names["output"],
                errors=names["errors"],
                counts=self._counts,
                schema=schema,
            )
        )
        self.total.add(self._counts)
        self._has_new_schema = False
        self._number += 1
        self._writers, self._ordinals, self._counts = {}, [], Counts()

    def finish(self) -> None:
        """All rows are committed: make the files that consist of all parts, and leave the parts of a folder alone."""
        if self._errors is not None:
            join_parts(self._parts("errors"), self._errors, None)
        if self._target is not None:
            schema = None
            if self._format == "parquet":
                schema = self._schema if self._schema is not None else infer_schema([], result_schema(None))
            join_parts(self._parts("output"), self._target, schema)
        self._manifest.finish([file for file in (self._target, self._errors) if file is not None])
        self._remove_joined()

    def close(self) -> None:
        """Let others use the output. What has not been committed is left out."""
        self._writers = {}
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _acquire_lock(self) -> None:
        """The system releases the lock however its holder ends."""
        path = self._folder / _WORK / "lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BatchError(f"the output {self._folder} cannot be written: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 100, 0).decode(errors="replace").strip()
            raise BatchError(f"another job writes to this output ({holder}): wait for it, or end it") from None
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)

    def _check_empty(self) -> None:
        """Nothing that a person may want to keep is in the way."""
        for file in (self._target, self._errors):
            if file is not None and file.exists() and (file.is_dir() or file.stat().st_size):
                raise BatchError(f"{file} is there already and no earlier run of this job: name another output")
        others = sorted(path.name for path in self._folder.iterdir() if path.name != _WORK)
        if others:
            raise BatchError(
                f"the folder {self._folder} holds {others[0]} and no earlier run of this job: name another output"
            )

    def _load(self) -> None:
        is_finished = self._manifest.is_finished()
        for commit in self._manifest.commits():
            for first, last in unpack_ranges(commit.ordinals):
                self.done.add_range(first, last)
            self.total.add(commit.counts)
            self._number = commit.number + 1
            if commit.schema is not None:
                self._schema = decode_schema(commit.schema)
        needed = [] if is_finished and self._target else [*self._parts("output")]
        needed += [] if is_finished else [*self._parts("errors")]
        needed += [file for file in (self._target, self._errors) if file is not None and is_finished]
        missing = next((path for path in needed if not path.exists()), None)
        if missing is not None:
            raise BatchError(f"{missing}, which the earlier run has written, is gone: --restart does all rows again")

    def _parts(self, stream: str) -> Iterator[Path]:
        for commit in self._manifest.commits():
            name = commit.output if stream == "output" else commit.errors
            if name is not None:
                yield self._folder / name

    def _part_name(self, stream: str) -> str:
        prefix = "part" if stream == "output" else "errors"
        return f"{prefix}-{self._number:06d}.{self._format if stream == 'output' else 'jsonl'}"

    def _partial(self, stream: str) -> Path:
        return self._folder / _WORK / f"{stream}.partial"

    def _open_part(self, stream: str) -> PartWriter:
        if stream == "output" and self._format == "parquet":
            return ParquetPart(self._partial(stream), self._known_schema)
        return JsonlPart(self._partial(stream))

    def _known_schema(self, records: Any) -> Any:
        """That of all parts; the first part's records decide if the input has none of its own."""
        if self._schema is None:
            self._schema = infer_schema(records, result_schema(None))
            self._has_new_schema = True
        return self._schema

    def _own_parts(self) -> Iterator[Path]:
        for prefix in ("part", "errors"):
            yield from self._folder.glob(f"{prefix}-[0-9]*.jsonl")
            yield from self._folder.glob(f"{prefix}-[0-9]*.parquet")

    def _remove_uncommitted(self) -> None:
        """Parts that were written when the run was killed, before the manifest had them."""
        committed = {*self._parts("output"), *self._parts("errors")}
        for path in set(self._own_parts()) - committed:
            path.unlink()
        if self._manifest.is_finished():
            self._remove_joined()

    def _remove_joined(self) -> None:
        for stream, file in (("output", self._target), ("errors", self._errors)):
            for path in self._parts(stream) if file is not None else ():
                path.unlink(missing_ok=True)

    def _discard(self) -> None:
        """Remove what the earlier run has made."""
        for path in [*self._own_parts(), *self._manifest.files()]:
            path.unlink(missing_ok=True)
        self._manifest.remove()
