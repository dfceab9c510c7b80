"""The Triton attention kernels equal float32 attention written out, over ragged paged batches.

They run compiled where there is a GPU, and in Triton's interpreter elsewhere: there in float32 and float16, since its
bfloat16 products are wrong.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.layers.attention import AttentionMetadata

_HAS_GPU = torch.cuda.is_available()
_DEVICE = torch.device("cuda" if _HAS_GPU else "cpu")
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_needs_gpu = pytest.mark.skipif(not _HAS_GPU, reason="needs a GPU")


@pytest.fixture(scope="module")
def triton_backend() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        if not _HAS_GPU:
            patch.setenv("TRITON_INTERPRET", "1")  # must be set when the kernels are defined
            _mend_interpreter(patch)
        yield importlib.import_module("workers.kernels.triton_backend")


def _mend_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Its scalars are arrays of one element, which numpy 2.4 no longer takes for the bounds of a range."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)


class Step:
    """Random queries over a random cache; slots that no sequence owns hold NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        num_blocks: int = 0,
    ) -> None:
        """`lengths`: (rows, keys) of each sequence; `heads`: query and kv heads; `num_blocks`: at least."""
        generator = torch.Generator().manual_seed(0)
        blocks_of = [-(-seq_len // block_size) for _, seq_len in lengths]
        num_blocks = max(num_blocks, sum(blocks_of) + 3)
        # The highest ids of all are in use, and the lowest are not.
        order = num_blocks - 1 - torch.randperm(sum(blocks_of), generator=generator)
        tables = torch.zeros(len(lengths), max(blocks_of) + 2, dtype=torch.int32)
        shape = (2, num_blocks, block_size, heads[1], head_dim)
        self.caches = torch.full(shape, torch.nan, dtype=dtype, device=_DEVICE)
        self.keys: list[Tensor] = []
        for row, (blocks, (_, seq_len)) in enumerate(zip(order.split(blocks_of), lengths, strict=True)):
            tables[row, : len(blocks)] = blocks
            kv = torch.randn(2, seq_len, heads[1], head_dim, generator=generator).to(_DEVICE, dtype)
            slots = (blocks.unsqueeze(1) * block_size + torch.arange(block_size)).flatten()[:seq_len]
            self.caches.flatten(1, 2)[:, slots.to(_DEVICE)] = kv
            self.keys.append(kv)
        self.q_lens = [q_len for q_len, _ in lengths]
        starts = torch.tensor([0, *self.q_lens]).cumsum(0).int()
        # As a fused projection hands them over: each token's heads side by side, the tokens apart.
        rows = torch.randn(int(starts[-1]), heads[0] + 2, head_dim, generator=generator)
        self.q = rows.to(_DEVICE, dtype)[:, : heads[0]]
        self.metadata = AttentionMetadata(
            slot_mapping=torch.full((len(self.q),), -1, dtype=torch.int32, device=_DEVICE),
            cu_seqlens_q=starts.to(_DEVICE),
            seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=_DEVICE),
            block_tables=tables.to(_DEVICE),
            max_seqlen_q=max(self.q_lens),
            max_seqlen_k=max(seq_len for _, seq_len in lengths),
        )

    def _sequences(self) -> list[tuple[Tensor, Tensor]]:
        """Each sequence's queries in float32, and its keys and values."""
        return list(zip(self.q.float().split(self.q_lens), self.keys, strict=True))

    def expected(self) -> Tensor:
        """softmax(q k^T / sqrt(D)) v in float32, a sequence at a time; zeros where there are no keys."""
        outputs = []
        for q, kv in self._sequences():
            if kv.shape[1] == 0:
                outputs.append(torch.zeros_like(q))
                continue
            k, v = kv.float().repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            is_future = torch.ones(scores.shape[1:], device=q.device).triu(len(k) - len(q) + 1).bool()
            weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outputs)

    def check(self, backend: Any, num_layers: int = 2) -> None:
        """Each layer finds the work space as the one before left it. Rows without keys may hold anything."""
        has_keys = torch.cat([torch.full((len(q),), kv.shape[1] > 0) for q, kv in self._sequences()])
        for _ in range(num_layers):
            got = backend.forward(self.q, self.caches[0], self.caches[1], self.metadata, self.q.shape[-1] ** -0.5)
            assert got.dtype == self.q.dtype
            tolerance = _TOLERANCE[self.q.dtype]
            expected = self.expected()
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
    step.check(triton_backend.TritonAttention(config))


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
    step.check(triton_backend.TritonAttention(prefill=triton_backend.PrefillConfig(rows=rows, tile=32)))


def test_each_step_is_planned_anew(triton_backend: ModuleType) -> None:
    """Also after a step of another kind, whose work is cut among the same programs."""
    backend = triton_backend.TritonAttention()
    for lengths in ([(1, 40)], [(1, 3), (1, 90), (1, 17)], [(5, 60), (1, 33)], [(1, 3), (1, 90), (1, 17)]):
        Step(lengths, (4, 2), 16, 16, torch.float32).check(backend)


def test_more_sequences_than_the_plan_reads_at_once(triton_backend: ModuleType) -> None:
    lengths = [(1, 1 + index % 3) for index in range(515)]
    Step(lengths, (2, 1), 8, 4, torch.float32).check(triton_backend.TritonAttention(), num_layers=1)


GPU_BATCHES = {
    "one": [(1, 5000)],
    "decode": [(1, 1), (1, 2), (1, 16), (1, 17), (1, 300), (1, 0), (1, 8192)],
    "many": [(1, 1 + 37 * index % 1900) for index in range(131)],
    "prefill": [(1, 1), (5, 5), (16, 16), (257, 257), (512, 512)],
    "chunks": [(3, 4), (16, 32), (100, 1000), (512, 8000)],
    "mixed": [(1, 77), (31, 31), (1, 4097), (64, 200), (2, 2)],
}


@pytest.mark.gpu
@_needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1), (9, 3), (16, 1)])
@pytest.mark.parametrize("batch", GPU_BATCHES)
def test_on_gpu(triton_backend: ModuleType, batch: str, heads: tuple[int, int], head_dim: int) -> None:
    for block_size in (16, 256):
        Step(GPU_BATCHES[batch], heads, head_dim, block_size, torch.bfloat16).check(triton_backend.TritonAttention())


@pytest.mark.gpu
@_needs_gpu
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_a_cache_past_two_to_the_31_elements(triton_backend: ModuleType, batch: str) -> None:
    num_blocks = 2**31 // (8 * 128 * 16) + 1000
    step = Step(GPU_BATCHES[batch], (16, 8), 128, 16, torch.bfloat16, num_blocks)
    step.check(triton_backend.TritonAttention())


@pytest.mark.gpu
@_needs_gpu
def test_a_graph_follows_the_lengths(triton_backend: ModuleType) -> None:
    """Captured once, with the lengths and tables of one step, replayed with those of others."""
    backend = triton_backend.TritonAttention()
    batches = [[(1, (first + 997 * row) % 1900 + 1) for row in range(20)] for first in (1900, 7, 500)]
    steps = [Step(lengths, (16, 8), 128, 16, torch.bfloat16, 3000) for lengths in batches]
    captured = steps[0]
    width = max(step.metadata.block_tables.shape[1] for step in steps)
    tables = torch.zeros(20, width, dtype=torch.int32, device=_DEVICE)
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
