"""The decoder's logits equal transformers', however the tokens are cut into steps and the model over ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.data_plane.conftest import KINDS, Checkpoint
from tests.data_plane.paged_model import PagedModel, load, prefill_then_decode, shard_of
from workers.parallel import TensorParallel, create_store

_NUM_DECODED = 5
_SPLIT_KINDS = ("qwen3", "qwen3-bias", "qwen2", "llama-linear", "mistral", "qwen3-tied")


def _paged(path: Path, tp: TensorParallel, num_sequences: int) -> PagedModel:
    return PagedModel(load(path, tp), shard_of(path, tp).kv_heads.size, num_sequences, max_len=64)


def _assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert torch.equal(mine.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_prefill_and_decode(kind: str, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints[kind]
    paged = _paged(checkpoint.path, TensorParallel.single(), len(checkpoint.prompts))
    _assert_same(prefill_then_decode(paged, checkpoint.prompts, _NUM_DECODED), checkpoint.logits)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 17])
def test_chunked_prefill_beside_decode(chunk_size: int, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["qwen3"]
    paged = _paged(checkpoint.path, TensorParallel.single(), len(checkpoint.prompts))
    parts: list[list[Tensor]] = [[] for _ in checkpoint.prompts]
    # Each sequence starts one step after the one before, so that steps mix first chunks, later chunks and single rows.
    for step in range(64 // chunk_size + len(parts) + 1):
        spans = {i: (step - i) * chunk_size for i in range(len(parts)) if step >= i}
        chunks = {i: checkpoint.prompts[i][start : start + chunk_size] for i, start in spans.items()}
        chunks = {i: chunk for i, chunk in chunks.items() if chunk}
        for i, logits in paged.step(chunks).items() if chunks else ():
            parts[i].append(logits)
    _assert_same([torch.cat(each) for each in parts], checkpoint.logits)


def test_sequences_that_share_blocks_in_one_step(checkpoints: dict[str, Checkpoint]) -> None:
    """The second sequence reads blocks that the first one writes in the same step, as the block manager allows."""
    checkpoint = checkpoints["qwen3"]
    prompt, expected = checkpoint.prompts[3], checkpoint.logits[3]
    paged = _paged(checkpoint.path, TensorParallel.single(), 2)
    num_shared_blocks = 8
    paged.block_tables[1, :num_shared_blocks] = paged.block_tables[0, :num_shared_blocks]
    num_shared = paged.lengths[1] = num_shared_blocks * paged.block_size
    logits = paged.step({1: prompt[num_shared:], 0: prompt})
    _assert_same([logits[0], logits[1]], [expected, expected[num_shared:]])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_tensor_parallel(world_size: int, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    """Real processes over gloo; 9 query and 3 kv heads divide over none but 3."""
    prompts = {kind: checkpoints[kind].prompts for kind in _SPLIT_KINDS}
    paths = {kind: checkpoints[kind].path for kind in _SPLIT_KINDS}
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    ranks = [
        context.Process(target=_run_rank, args=(rank, world_size, ports, paths, prompts, tmp_path))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * world_size
    for kind in _SPLIT_KINDS:
        _assert_same(torch.load(tmp_path / f"{kind}.pt"), checkpoints[kind].logits)


def _run_rank(
    rank: int,
    world_size: int,
    ports: multiprocessing.Queue[int],
    paths: dict[str, Path],
    prompts: dict[str, list[list[int]]],
    out: Path,
) -> None:
    torch.set_num_threads(1)
    store = None
    if rank == 0:
        store, port = create_store("127.0.0.1", world_size, 60)
        for _ in range(world_size):
            ports.put(port)
    tp = TensorParallel.connect(
        rank=rank,
        world_size=world_size,
        host="127.0.0.1",
        port=ports.get(),
        backend="gloo",
        timeout_s=60,
        store=store,
        device=torch.device("cpu"),
    )
    assert tp.min_int(10 - rank) == 11 - world_size
    for kind, path in paths.items():
        paged = _paged(path, tp, len(prompts[kind]))
        logits = prefill_then_decode(paged, prompts[kind], _NUM_DECODED)
        if rank == 0:
            torch.save(logits, out / f"{kind}.pt")
    tp.close()
