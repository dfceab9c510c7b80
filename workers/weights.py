"""Fills a model's shard from a checkpoint's safetensors files, reading nothing but the shard's own slices.

Knows no layer: the model lists its `CheckpointSlice`s. Called by the model runner at start-up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from workers.errors import WeightsError
from workers.layers.parameter import CheckpointSlice
from workers.models.decoder import CausalLM

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("BF16", "F16", "F32")
_NUM_NAMED = 8
_DUMMY_STD = 0.02


def load_weights(model: CausalLM, path: Path, on_progress: Callable[[float], None]) -> None:
    """Read this rank's slices of the checkpoint folder `path`, cast to the model's dtype.

    `on_progress` is called with the fraction read so far, lastly with 1. Raises WeightsError, naming file and tensors,
    if weights are missing, unexpected, misshapen, of another dtype, or if a file is damaged.
    """
    files = _find_tensors(path)
    slices = {each.source: each for each in model.checkpoint_slices()}
    _compare_names(slices.keys(), files.keys(), model.config.tie_word_embeddings, path)
    by_file: dict[Path, list[CheckpointSlice]] = defaultdict(list)
    for name, each in slices.items():
        by_file[files[name]].append(each)
    total = sum(each.target.numel() for each in slices.values())
    num_read = 0
    for file, wanted in by_file.items():
        with _opened(file) as tensors:
            for each in wanted:
                _read_slice(tensors, each, file)
                num_read += each.target.numel()
                on_progress(num_read / total)


def randomize_weights(model: CausalLM, seed: int) -> None:
    """Fill the shard with small normal numbers, for measurements without a checkpoint. Norms stay near 1."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator(parameter.device).manual_seed(seed + index)
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, _DUMMY_STD, generator=generator)


def _find_tensors(path: Path) -> dict[str, Path]:
    """Each tensor's file, from the index if there is one."""
    index = path / _INDEX
    if index.is_file():
        try:
            return {name: path / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} holds no weight_map: {error!r}") from error
    single = path / _SINGLE
    if not single.is_file():
        raise WeightsError(f"{path} holds neither {_SINGLE} nor {_INDEX}: save the model as safetensors")
    with _opened(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)  # type: ignore[no-untyped-call]


def _compare_names(wanted: Iterable[str], found: Iterable[str], is_tied: bool, path: Path) -> None:
    """The checkpoint must hold what the model wants, and nothing else that could matter."""
    wanted, found = set(wanted), set(found)
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if is_tied:
        ignored.add("lm_head.weight")
    complaints = [
        f"{kind} {_listing(names)}"
        for kind, names in (("lacks", wanted - found), ("has unexpected", found - wanted - ignored))
        if names
    ]
    if complaints:
        raise WeightsError(f"the checkpoint in {path} {' and '.join(complaints)}")


def _listing(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_NUM_NAMED])
    rest = len(names) - _NUM_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    """The file's tensors; whatever fails while reading it becomes a WeightsError with its name."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} cannot be read: {error}") from error


def _read_slice(tensors: safe_open, wanted: CheckpointSlice, file: Path) -> None:
    stored = tensors.get_slice(wanted.source)  # type: ignore[no-untyped-call]
    shape = tuple(stored.get_shape())
    if shape != wanted.shape:
        raise WeightsError(f"{wanted.source} in {file} has shape {shape}; the config asks for {wanted.shape}")
    if stored.get_dtype() not in _DTYPES:
        supported = ", ".join(_DTYPES)
        raise WeightsError(f"{wanted.source} in {file} has dtype {stored.get_dtype()}; supported: {supported}")
    start, stop = wanted.span.start, wanted.span.stop
    wanted.target.copy_(stored[start:stop] if wanted.dim == 0 else stored[:, start:stop])
