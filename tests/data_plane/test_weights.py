"""Loading reads a rank's own slices and nothing else, and says by name what is wrong with a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.data_plane.conftest import Checkpoint
from tests.data_plane.paged_model import build, load
from workers.errors import WeightsError
from workers.parallel import TensorParallel
from workers.weights import load_weights, randomize_weights

_CPU = torch.device("cpu")


def _rank(rank: int, world_size: int) -> TensorParallel:
    """A place in a group that never meets: loading needs no communication."""
    return TensorParallel(rank, world_size, _CPU, None)


def _edited(checkpoint: Checkpoint, folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the checkpoint whose tensors `edit` has changed."""
    shutil.copytree(checkpoint.path, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _split(checkpoint: Checkpoint, folder: Path, num_files: int = 3) -> dict[str, str]:
    """The checkpoint in several files with an index; returns the weight map."""
    shutil.copytree(checkpoint.path, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{i % num_files}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "llama-linear"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ranks_shards_together_are_the_checkpoint(
    kind: str, world_size: int, checkpoints: dict[str, Checkpoint]
) -> None:
    stored = load_file(checkpoints[kind].path / "model.safetensors")
    covered = {name: torch.full_like(tensor, torch.nan) for name, tensor in stored.items()}
    for rank in range(world_size):
        for piece in load(checkpoints[kind].path, _rank(rank, world_size)).checkpoint_slices():
            covered[piece.source].narrow(piece.dim, piece.span.start, piece.span.size).copy_(piece.target)
    for name, tensor in stored.items():
        assert torch.equal(covered[name], tensor), name


def test_an_index_is_obeyed(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    """Files beside it that it does not name are not looked at."""
    checkpoint = checkpoints["qwen3"]
    _split(checkpoint, tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"no safetensors at all")
    expected = load(checkpoint.path, TensorParallel.single()).state_dict()
    for name, tensor in load(tmp_path, TensorParallel.single()).state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_progress_rises_to_one(checkpoints: dict[str, Checkpoint]) -> None:
    path, seen = checkpoints["qwen3"].path, []
    load_weights(build(path, _rank(1, 3)), path, seen.append)
    assert seen == sorted(seen)
    assert seen[0] > 0
    assert seen[-1] == 1


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_floating_types_are_cast(
    stored: torch.dtype, wanted: torch.dtype, checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    path = _edited(checkpoints["qwen2"], tmp_path, lambda t: t.update({n: x.to(stored) for n, x in t.items()}))
    expected = load_file(path / "model.safetensors")["model.norm.weight"].to(wanted)
    got = load(path, TensorParallel.single(), wanted).model.norm.weight
    assert got.dtype == wanted
    assert torch.equal(got, expected)


def test_weights_that_do_not_matter_may_be_there(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(211, 48)}
    load(_edited(checkpoints["qwen3-tied"], tmp_path, lambda tensors: tensors.update(extra)), TensorParallel.single())


def _drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_drop("model.layers.1.self_attn.k_proj.weight"), r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"),
        (_drop("lm_head.weight"), r"lacks lm_head\.weight"),
        (
            _put("model.layers.0.mlp.up_proj.bias", torch.ones(90)),
            r"has unexpected model\.layers\.0\.mlp\.up_proj\.bias",
        ),
        (_put("model.layers.3.mlp.up_proj.weight", torch.ones(1)), r"has unexpected model\.layers\.3"),
        (_put("model.norm.weight", torch.ones(47)), r"model\.norm\.weight in .* has shape \(47,\).* asks for \(48,\)"),
        (_put("lm_head.weight", torch.ones(210, 48)), r"has shape \(210, 48\).* asks for \(211, 48\)"),
        (_put("model.norm.weight", torch.ones(48, dtype=torch.int8)), r"model\.norm\.weight in .* dtype I8"),
    ],
)
def test_a_wrong_checkpoint_is_named(
    edit: Callable[[dict[str, Tensor]], object], message: str, checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=message):
        load(_edited(checkpoints["qwen3"], tmp_path, edit), TensorParallel.single())


def test_many_missing_weights_are_counted(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    path = _edited(checkpoints["qwen3"], tmp_path, lambda tensors: [tensors.pop(n) for n in list(tensors)[1:]])
    with pytest.raises(WeightsError, match=r"lacks .* and \d+ more"):
        load(path, TensorParallel.single())


@pytest.mark.parametrize("size", [0, 4, 100, 20_000])
def test_a_truncated_file_is_named(size: int, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["qwen3"].path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
        load(tmp_path, TensorParallel.single())


def test_a_header_of_garbage_is_named(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["qwen3"].path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 1000)
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
        load(tmp_path, TensorParallel.single())


def test_files_that_the_index_names_must_hold_what_it_says(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    weight_map = _split(checkpoints["qwen3"], tmp_path)
    weight_map["model.norm.weight"] = next(f for f in weight_map.values() if f != weight_map["model.norm.weight"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match=r"part-\d\.safetensors cannot be read.*model\.norm\.weight"):
        load(tmp_path, TensorParallel.single())
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"part-1\.safetensors"):
        load(tmp_path, TensorParallel.single())


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_broken_index_is_named(content: str, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["qwen3"].path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"index\.json holds no weight_map"):
        load(tmp_path, TensorParallel.single())


def test_a_folder_without_weights(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    shutil.copy(checkpoints["qwen3"].path / "config.json", tmp_path)
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        load(tmp_path, TensorParallel.single())


def test_dummy_weights_are_finite_and_repeatable(checkpoints: dict[str, Checkpoint]) -> None:
    first, second = (build(checkpoints["qwen3"].path, TensorParallel.single()) for _ in range(2))
    randomize_weights(first, seed=3)
    randomize_weights(second, seed=3)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
