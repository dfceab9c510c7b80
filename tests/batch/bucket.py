"""An object store for tests, `bucket:///a/name.bucket/key`: objects are files of that folder, for several processes.

As in a real one, an object is put as a whole or not at all, there are no folders, and nothing is appended or renamed.
Importing this makes fsspec know it.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem

PUT_S = 0.02
"""A put takes its time, so that kills hit it."""


class BucketFileSystem(AbstractFileSystem):
    """Whole objects in a folder."""

    protocol = "bucket"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("bucket://").rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        return f"bucket://{self._strip_protocol(name)}"

    def _file(self, path: str) -> Path:
        bucket, _, key = self._strip_protocol(path).partition(".bucket/")
        return Path(f"{bucket}.bucket") / quote(key, safe="")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Objects and prefixes directly below."""
        path = self._strip_protocol(path)
        folder, prefix = self._file(path).parent, unquote(self._file(path).name) + "/"
        found: dict[str, dict[str, Any]] = {}
        for file in sorted(folder.iterdir()) if folder.exists() else ():
            key = unquote(file.name)
            if key == prefix[:-1]:
                found[path] = {"name": path, "size": file.stat().st_size, "type": "file"}
            elif key.startswith(prefix):
                name, slash, _rest = key.removeprefix(prefix).partition("/")
                size, kind = (0, "directory") if slash else (file.stat().st_size, "file")
                found[name] = {"name": f"{path}/{name}", "size": size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return [each if detail else each["name"] for each in found.values()]

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Seen by others once it is whole."""
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        """Seen by others once it is whole."""
        file = self._file(path)
        file.parent.mkdir(exist_ok=True)
        unseen = file.parent.with_suffix(".uploads") / uuid.uuid4().hex
        unseen.parent.mkdir(exist_ok=True)
        unseen.write_bytes(value)
        time.sleep(PUT_S)
        os.replace(unseen, file)

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        self._file(path).unlink()

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise NotImplementedError("an object is put as a whole")
        return open(self._file(path), "rb")


fsspec.register_implementation("bucket", BucketFileSystem)
