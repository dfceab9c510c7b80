"""A log of entries, each whole or not there, for one writer at a time. Called by `raytp.batch_job.output`, `manifest`.

    on this machine                          in an object store
    manifest.jsonl   a line for each         manifest-000000.json ...   an object for each
    lock             held by its writer      writer                     names the writer that came last

An object store has no locks: there, who comes later takes over, and the earlier one ends when it finds out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from raytp.batch_job.locations import LocalLocation, Location, ObjectLocation, sync_folder
from raytp.errors import BatchError

_NUM_READERS = 16
_OBJECT_NAME = re.compile(r"manifest-\d+\.json$")
Entry = Mapping[str, Any]


class Journal(Protocol):
    """`str()` of it is where it lies."""

    def acquire(self) -> None:
        """Begin to use it. Raises BatchError if another writer is known to be at work."""

    def claim(self) -> None:
        """Become its writer. Comes before all that writes, and after all that may be refused."""

    def release(self) -> None:
        """Let others write."""

    def exists(self) -> bool:
        """Whether it has entries."""

    def create(self, entry: Entry) -> None:
        """Make the first one."""

    def check_writer(self) -> None:
        """Raises BatchError if another writer has taken over."""

    def repair(self) -> None:
        """Remove what a killed writer left unfinished."""

    def append(self, entry: Entry) -> None:
        """Make one more, and wait until it will last."""

    def entries(self) -> Iterator[dict[str, Any]]:
        """All of them. Raises BatchError if one is damaged."""

    def remove(self) -> None:
        """Remove all entries."""


def journal_in(folder: Location) -> Journal:
    """The journal in a folder."""
    if isinstance(folder, LocalLocation):
        return LocalJournal(folder.path / "manifest.jsonl")
    assert isinstance(folder, ObjectLocation)
    return ObjectJournal(folder)


class LocalJournal:
    """Lines of JSON. A kill leaves at most half a line at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = -1
        self._new_folders: list[Path] = []

    def __str__(self) -> str:
        return str(self._path)

    def acquire(self) -> None:
        """See `Journal`. The system releases the lock however its holder ends."""
        folder = self._path.parent
        try:
            self._new_folders = [each for each in (folder, folder.parent) if not each.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BatchError(f"the output {folder.parent} cannot be written: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 100, 0).decode(errors="replace").strip()
            self._close()
            raise BatchError(f"another job writes to this output ({holder}): wait for it, or end it") from None
        except OSError as error:
            self._close()
            raise BatchError(
                f"{folder.parent} lies where no file can be locked ({error}): name another output"
            ) from error
        if os.fstat(self._lock).st_nlink == 0:
            self._close()  # a file that has the lock's name by now is somebody else's
            raise BatchError("another job has just left this output: run the same command again")
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, _this_process().encode(), 0)

    def claim(self) -> None:
        """See `Journal`. Who has the lock is the writer."""

    def release(self) -> None:
        """See `Journal`. What was refused leaves nothing behind."""
        if self._lock < 0:
            return
        if not self.exists():
            (self._path.parent / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody else has put something there
                for folder in self._new_folders:
                    folder.rmdir()
        self._close()

    def exists(self) -> bool:
        """See `Journal`."""
        return self._path.exists()

    def create(self, entry: Entry) -> None:
        """See `Journal`."""
        partial = self._path.with_suffix(".partial")
        with open(partial, "wb") as opened:
            opened.write(_dump(entry))
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, self._path)
        sync_folder(self._path.parent)

    def check_writer(self) -> None:
        """See `Journal`. The lock sees to it."""

    def repair(self) -> None:
        """See `Journal`."""
        with open(self._path, "r+b") as opened:
            end = 0
            for line in opened:
                end += len(line) if line.endswith(b"\n") else 0
            opened.truncate(end)

    def append(self, entry: Entry) -> None:
        """See `Journal`."""
        with open(self._path, "ab") as opened:
            opened.write(_dump(entry))
            opened.flush()
            os.fsync(opened.fileno())

    def entries(self) -> Iterator[dict[str, Any]]:
        """See `Journal`."""
        with open(self._path, "rb") as opened:
            for number, line in enumerate(opened, start=1):
                yield _parse(line, f"{self._path}, line {number},")

    def remove(self) -> None:
        """See `Journal`."""
        self._path.unlink()

    def _close(self) -> None:
        os.close(self._lock)
        self._lock = -1


class ObjectJournal:
    """An object for each entry. They are read once, and then held."""

    def __init__(self, folder: ObjectLocation) -> None:
        self._folder = folder
        self._names: list[str] = []
        self._entries: list[dict[str, Any]] | None = None
        self._token = f"{_this_process()}, {uuid.uuid4().hex}".encode()

    def __str__(self) -> str:
        return str(self._folder)

    def acquire(self) -> None:
        """See `Journal`."""
        self._entries = None
        self._names = sorted(filter(_OBJECT_NAME.match, self._folder.names()), key=_number)

    def claim(self) -> None:
        """See `Journal`. Whoever wrote before cannot go on; what it has written since `acquire` counts."""
        self._folder.child("writer").write(self._token)
        self.acquire()

    def release(self) -> None:
        """See `Journal`."""

    def exists(self) -> bool:
        """See `Journal`."""
        return bool(self._names)

    def create(self, entry: Entry) -> None:
        """See `Journal`. Raises BatchError if another writer has made one a moment ago."""
        if self._names:
            raise BatchError(f"another job has begun to write to {self._folder}: end one")
        self.append(entry)

    def check_writer(self) -> None:
        """See `Journal`."""
        writer = self._folder.child("writer").read()
        if writer != self._token:
            raise BatchError(f"another job has taken over this output ({writer.decode(errors='replace')}): end one")

    def repair(self) -> None:
        """See `Journal`. Half an object is no object."""

    def append(self, entry: Entry) -> None:
        """See `Journal`."""
        self.check_writer()
        entries, data = self._held(), _dump(entry)
        name = f"manifest-{len(self._names):06d}.json"
        self._folder.child(name).write(data)
        self._names.append(name)
        entries.append(json.loads(data))

    def entries(self) -> Iterator[dict[str, Any]]:
        """See `Journal`."""
        yield from self._held()

    def remove(self) -> None:
        """See `Journal`. The last one first: what is left at any moment is a journal."""
        self._entries = None
        while self._names:
            self._folder.child(self._names[-1]).remove()
            self._names.pop()

    def _held(self) -> list[dict[str, Any]]:
        if self._entries is None:
            if [_number(name) for name in self._names] != list(range(len(self._names))):
                raise BatchError(f"an object of the manifest in {self._folder} is gone: --restart discards the run")
            objects = [self._folder.child(name) for name in self._names]
            with ThreadPoolExecutor(_NUM_READERS) as pool:
                texts = pool.map(ObjectLocation.read, objects)
                self._entries = [_parse(text, str(each)) for each, text in zip(objects, texts, strict=True)]
        return self._entries


def _number(name: str) -> int:
    return int(name.removeprefix("manifest-").removesuffix(".json"))


def _this_process() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}"


def _dump(entry: Entry) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:
        raise BatchError(f"{where} is damaged: --restart discards the run") from None
