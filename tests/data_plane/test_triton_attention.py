"""The Triton attention kernels equal float32 attention written out, over ragged paged batches.

They run compiled where there is a GPU, and in Triton's interpreter elsewhere: there in float32 and float16, since its
bfloat16 products are wrong.
"""

from __future__ import annotations

import importlib
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_plane.ragged_step import BATCHES, GPU_OR_CPU, Step
from workers.layers.attention import AttentionMetadata

_HAS_GPU = torch.cuda.is_available()
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_needs_gpu = pytest.mark.skipif(not _HAS_GPU, reason="needs a GPU")


@pytest.fixture(scope="module")
def triton_backend() -> ModuleType:
    return importlib.import_module("workers.kernels.triton_backend")


def check(step: Step, backend: Any, num_layers: int = 2) -> None:
    """Each layer finds the work space as the one before left it. Rows without keys may hold anything."""
    has_keys = torch.cat([torch.full((len(q),), kv.shape[1] > 0) for q, kv in step.sequences()])
    expected = step.expected()
    for _ in range(num_layers):
        got = step.run(backend)
        assert got.dtype == step.q.dtype
        tolerance = _TOLERANCE[step.q.dtype]
        torch.testing.assert_close(got[has_keys].float(), expected[has_keys], rtol=tolerance, atol=tolerance)


_dtypes = st.sampled_from([torch.float32, torch.float16])
_heads = st.sampled_from([(1, 1), (3, 1), (4, 2), (8, 1), (9, 3), (4, 4)])
_head_dims = st.sampled_from([8, 24, 64, 128])
_block_sizes = st.sampled_from([1, 4, 16])


@settings(max_examples=30, deadline=None)
@given(
    seq_lens=st.lists(st.integers(0, 200), min_size=1, max_size=4).filter(any),
    heads=_heads,
    head_dim=_head_dims,
    block_size=_block_sizes,
    dtype=_dtypes,
    tile=st.sampled_from([16, 32, 64]),
    programs=st.integers(1, 3),
    min_units=st.integers(1, 6),
)
def test_decode(
    triton_backend: ModuleType,
    seq_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    tile: int,
    programs: int,
    min_units: int,
) -> None:
    """However the keys are cut among the programs; padding rows, which have none, included."""
    step = Step([(1, seq_len) for seq_len in seq_lens], heads, head_dim, block_size, dtype)
    config = triton_backend.DecodeConfig(tile=tile, programs_per_sm=programs, min_units=min_units)
    check(step, triton_backend.TritonAttention(config))


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100)), min_size=1, max_size=3),
    num_decoding=st.integers(0, 2),
    heads=_heads,
    head_dim=_head_dims,
    block_size=_block_sizes,
    dtype=_dtypes,
    rows=st.sampled_from([16, 32]),
    seed=st.integers(0, 99),
)
def test_prompts_chunks_and_mixed_steps(
    triton_backend: ModuleType,
    lengths: list[tuple[int, int]],
    num_decoding: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    rows: int,
    seed: int,
) -> None:
    all_lengths = [(q_len, q_len + num_before) for q_len, num_before in lengths] + [(1, 70)] * num_decoding
    random.Random(seed).shuffle(all_lengths)
    step = Step(all_lengths, heads, head_dim, block_size, dtype)
    check(step, triton_backend.TritonAttention(prefill=triton_backend.PrefillConfig(rows=rows, tile=32)))


@settings(max_examples=25, deadline=None)
@given(
    own=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    num_shared_blocks=st.integers(0, 9),
    num_padding=st.integers(0, 2),
    num_prompts=st.integers(0, 2),
    heads=_heads,
    head_dim=_head_dims,
    block_size=st.sampled_from([4, 16]),
    dtype=_dtypes,
    tile=st.sampled_from([16, 32]),
    min_units=st.integers(1, 6),
)
def test_a_shared_prefix(
    triton_backend: ModuleType,
    own: list[int],
    num_shared_blocks: int,
    num_padding: int,
    num_prompts: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    tile: int,
    min_units: int,
) -> None:
    """Sequences that begin with the same blocks, or none; with prompts in the step and padding rows, and without."""
    num_shared = num_shared_blocks * block_size
    lengths = [(1, num_shared + num_own) for num_own in own] + [(1, 0)] * num_padding
    lengths += [(5, num_shared + 5), (17, num_shared + 40)][:num_prompts]
    step = Step(lengths, heads, head_dim, block_size, dtype, num_shared_blocks=num_shared_blocks)
    config = triton_backend.DecodeConfig(tile=tile, min_units=min_units)
    check(step, triton_backend.TritonAttention(config, shared=triton_backend.SharedConfig(rows=32, tile=tile)))


def test_each_step_is_planned_anew(triton_backend: ModuleType) -> None:
    """Also after a step of another kind, whose work is cut among the same programs."""
    backend = triton_backend.TritonAttention()
    for lengths in ([(1, 40)], [(1, 3), (1, 90), (1, 17)], [(5, 60), (1, 33)], [(1, 3), (1, 90), (1, 17)]):
        check(Step(lengths, (4, 2), 16, 16, torch.float32), backend)


def test_more_sequences_than_the_plan_reads_at_once(triton_backend: ModuleType) -> None:
    lengths = [(1, 1 + index % 3) for index in range(515)]
    check(Step(lengths, (2, 1), 8, 4, torch.float32), triton_backend.TritonAttention(), num_layers=1)


GPU_BATCHES = BATCHES | {
    "one": [(1, 5000)],
    "decode": [*BATCHES["decode"], (1, 0), (1, 8192)],
    "many": [(1, 1 + 37 * index % 1900) for index in range(131)],
}


@pytest.mark.gpu
@_needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1), (9, 3), (16, 1)])
@pytest.mark.parametrize("batch", GPU_BATCHES)
def test_on_gpu(triton_backend: ModuleType, batch: str, heads: tuple[int, int], head_dim: int) -> None:
    for block_size in (16, 256):
        step = Step(GPU_BATCHES[batch], heads, head_dim, block_size, torch.bfloat16)
        check(step, triton_backend.TritonAttention())


@pytest.mark.gpu
@_needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(16, 8), (8, 1), (9, 3)])
@pytest.mark.parametrize(("num_own", "num_shared"), [(3, 0), (3, 7936), (40, 256), (40, 2048)])
def test_a_shared_prefix_on_gpu(
    triton_backend: ModuleType, num_own: int, num_shared: int, heads: tuple[int, int], head_dim: int
) -> None:
    lengths = [1 + 37 * index % 300 for index in range(num_own)]
    for block_size, prompts in ((16, []), (256, [(40, num_shared + 50)])):
        all_lengths = [*((1, num_shared + length) for length in lengths), (1, 0), *prompts]
        num_blocks = num_shared // block_size
        step = Step(all_lengths, heads, head_dim, block_size, torch.bfloat16, num_shared_blocks=num_blocks)
        check(step, triton_backend.TritonAttention())


@pytest.mark.gpu
@_needs_gpu
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_a_cache_past_two_to_the_31_elements(triton_backend: ModuleType, batch: str) -> None:
    num_blocks = 2**31 // (8 * 128 * 16) + 1000
    step = Step(GPU_BATCHES[batch], (16, 8), 128, 16, torch.bfloat16, num_blocks)
    check(step, triton_backend.TritonAttention())


@pytest.mark.gpu
@_needs_gpu
def test_a_graph_follows_the_lengths(triton_backend: ModuleType) -> None:
    """Captured once, with the lengths and tables of one step, replayed with those of others."""
    backend = triton_backend.TritonAttention()
    batches = [[(1, (first + 997 * row) % 1900 + 1) for row in range(20)] for first in (1900, 7, 500)]
    steps = [Step(lengths, (16, 8), 128, 16, torch.bfloat16, 3000) for lengths in batches]
    captured = steps[0]
    width = max(step.metadata.block_tables.shape[1] for step in steps)
    tables = torch.zeros(20, width, dtype=torch.int32, device=GPU_OR_CPU)
    metadata = AttentionMetadata(
        captured.metadata.slot_mapping,
        captured.metadata.cu_seqlens_q,
        captured.metadata.seq_lens.clone(),
        tables,
        1,
        1900,
    )

    inputs = (captured.q, captured.caches[0], captured.caches[1], metadata, 128**-0.5)
    backend.forward(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [backend.forward(*inputs), backend.forward(*inputs)]
    for step in steps:
        captured.q.copy_(step.q)
        captured.caches.copy_(step.caches)
        metadata.seq_lens.copy_(step.metadata.seq_lens)
        tables[:, : step.metadata.block_tables.shape[1]] = step.metadata.block_tables
        expected = step.expected()
        graph.replay()
        for layer in got:
            torch.testing.assert_close(layer.float(), expected, rtol=1e-2, atol=1e-2)
