"""A Ray job's copy of the folder that `ray job submit --working-dir` packs.

It lies on the node that runs the job's command, in a folder that Ray names by the content of the whole and deletes some
day: good for a small input, and no place for an output. Called by `raytp.batch_job`.
"""

from __future__ import annotations

import os
from pathlib import Path

from raytp.errors import ConfigError

_FOLDER = "working_dir_files"
"""What Ray calls the folder that holds the copies."""


def is_copy(path: str | os.PathLike[str]) -> bool:
    """Whether `path` lies in such a copy."""
    return _FOLDER in Path(path).absolute().parts


def name_in_copy(path: str | os.PathLike[str]) -> str:
    """What to call a file of such a copy: the same name in every job that brings it."""
    parts = Path(path).absolute().parts
    return str(Path(*parts[parts.index(_FOLDER) + 2 :]))


def check_lasting(path: Path) -> None:
    """Raises ConfigError if what is written to `path` would be lost with the job's copy."""
    if is_copy(path):
        raise ConfigError(
            f"{name_in_copy(path)} would be written to the job's copy of --working-dir, which Ray deletes: name an "
            f"absolute path, on a disk that outlives the cluster, or a URL"
        )
