"""A model without its weights: what callers of a shared engine need of it, on nodes that may not have its folder.

Read by `raytp.connection` where an engine is started, kept by `raytp.driver`, unpacked by `raytp.connection` where a
caller connects. `raytp.batch` knows a model by its digest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_DIGESTED_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's config, generation defaults and tokenizer, as they travel."""

    model_name: str
    digest: str
    """See `model_digest`."""
    contents: dict[str, bytes]
    """By the files' names."""

    @classmethod
    def read(cls, folder: Path, model_name: str) -> ModelFiles:
        """The small files of the checkpoint in `folder`."""
        paths = {path for pattern in _SMALL_FILES for path in folder.glob(pattern)}
        contents = {path.name: path.read_bytes() for path in paths if not path.name.endswith(".index.json")}
        return cls(model_name, model_digest(folder), contents)

    @contextmanager
    def unpacked(self) -> Iterator[Path]:
        """A folder that holds them, as long as the block lasts."""
        with tempfile.TemporaryDirectory(prefix="raytp-model-") as folder:
            for name, content in self.contents.items():
                (Path(folder) / name).write_bytes(content)
            yield Path(folder)


def model_digest(folder: Path) -> str:
    """A digest of a checkpoint: its small files' content, and its weights' names and sizes."""
    digest = xxhash.xxh3_128()
    for path in sorted({path for pattern in _DIGESTED_FILES for path in folder.glob(pattern)}):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        if path.suffix in (".json", ".jinja"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
