"""Where a job writes: files and folders of this machine, or of an object store through fsspec.

A file appears whole or not at all: here by a rename, there because putting an object is one act. Called by
`raytp.batch_job.output`, `journal` and `parts`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import posixpath
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from raytp.errors import BatchError, ConfigError
from raytp.working_dir import check_lasting
from workers.scratch import ScratchFolder


class Location(Protocol):
    """A file or a folder, which need not be there; as text it is its path or URL. Raises BatchError if it fails."""

    @property
    def name(self) -> str:
        """The last part of its path."""

    def child(self, name: str) -> Location:
        """What has this name in the folder."""

    def sibling(self, name: str) -> Location:
        """What has this name beside it."""

    def names(self) -> list[str]:
        """Of all that is in the folder; none if there is no folder."""

    def exists(self) -> bool:
        """Whether it is there."""

    def is_taken(self) -> bool:
        """Whether there is something that a person may want to keep: not if it is an empty file."""

    def open(self) -> BinaryIO:
        """The file, to be read. Close it."""

    def partial(self) -> Path:
        """Where, on this machine, to write the file before `take`; its folder is there."""

    def take(self, partial: Path) -> None:
        """Make what has been written there the file."""

    def remove(self) -> None:
        """Remove the file; it may be gone already."""


def locate(url: str | os.PathLike[str]) -> Location:
    """The location of a path or an fsspec URL. Raises ConfigError if nothing serves it, or it will not last."""
    text = os.fspath(url)
    if "://" in text:
        try:
            system, key = url_to_fs(text)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"the output {text} cannot be used: {error}") from error
        if not isinstance(system, LocalFileSystem):
            return ObjectLocation(system, key)
        text = key
    path = Path(text).expanduser()
    check_lasting(path)
    return LocalLocation(path)


@dataclass(frozen=True, slots=True)
class LocalLocation:
    """A path of this machine, or of a file system that is shared like one."""

    path: Path

    def __str__(self) -> str:
        return str(self.path.absolute())

    @property
    def name(self) -> str:
        """See `Location`."""
        return self.path.name

    def child(self, name: str) -> LocalLocation:
        """See `Location`."""
        return LocalLocation(self.path / name)

    def sibling(self, name: str) -> LocalLocation:
        """See `Location`."""
        return LocalLocation(self.path.with_name(name))

    def names(self) -> list[str]:
        """See `Location`."""
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def exists(self) -> bool:
        """See `Location`."""
        return self.path.exists()

    def is_taken(self) -> bool:
        """See `Location`."""
        return self.path.exists() and (self.path.is_dir() or self.path.stat().st_size > 0)

    def open(self) -> BinaryIO:
        """See `Location`."""
        return open(self.path, "rb")

    def partial(self) -> Path:
        """See `Location`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.with_name(f".{self.path.name}.raytp-partial")

    def take(self, partial: Path) -> None:
        """See `Location`."""
        with open(partial, "rb") as opened:
            os.fsync(opened.fileno())
        os.replace(partial, self.path)
        sync_folder(self.path.parent)

    def remove(self) -> None:
        """See `Location`."""
        self.path.unlink(missing_ok=True)


class ObjectLocation:
    """A key of an object store, or a prefix of keys."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path.rstrip("/")

    def __str__(self) -> str:
        return str(self._system.unstrip_protocol(self._path))

    @property
    def name(self) -> str:
        """See `Location`."""
        return posixpath.basename(self._path)

    def child(self, name: str) -> ObjectLocation:
        """See `Location`."""
        return ObjectLocation(self._system, f"{self._path}/{name}")

    def sibling(self, name: str) -> ObjectLocation:
        """See `Location`."""
        return ObjectLocation(self._system, posixpath.join(posixpath.dirname(self._path), name))

    def names(self) -> list[str]:
        """See `Location`."""
        with self._failures("listed"):
            self._system.invalidate_cache()  # others may have written
            try:
                paths = [each.rstrip("/") for each in self._system.ls(self._path, detail=False)]
            except FileNotFoundError:
                return []
        return sorted(posixpath.basename(each) for each in paths if each != self._path)

    def exists(self) -> bool:
        """See `Location`."""
        with self._failures("read"):
            self._system.invalidate_cache()
            return bool(self._system.exists(self._path))

    def is_taken(self) -> bool:
        """See `Location`."""
        with self._failures("read"):
            self._system.invalidate_cache()
            try:
                info = self._system.info(self._path)
            except FileNotFoundError:
                return False
        return info["type"] == "directory" or bool(info["size"])

    def open(self) -> BinaryIO:
        """See `Location`."""
        with self._failures("read"):
            opened: BinaryIO = self._system.open(self._path, "rb")
            return opened

    def partial(self) -> Path:
        """See `Location`."""
        opened, path = tempfile.mkstemp(suffix=f"-{self.name}", dir=_scratch().path)
        os.close(opened)
        return Path(path)

    def take(self, partial: Path) -> None:
        """See `Location`."""
        with self._failures("written"):
            self._system.put_file(str(partial), self._path)
        partial.unlink()

    def remove(self) -> None:
        """See `Location`."""
        with self._failures("removed"), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path)

    def read(self) -> bytes:
        """The object."""
        with self._failures("read"):
            return bytes(self._system.cat_file(self._path))

    def write(self, data: bytes) -> None:
        """Put a small object."""
        with self._failures("written"):
            self._system.pipe_file(self._path, data)

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Stores raise kinds of their own."""
        try:
            yield
        except Exception as error:
            raise BatchError(f"{self} cannot be {what}: {error or type(error).__name__}") from error


@functools.cache
def _scratch() -> ScratchFolder:
    """Where this process writes what goes to object stores."""
    folder = ScratchFolder()
    atexit.register(folder.close)
    return folder


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
