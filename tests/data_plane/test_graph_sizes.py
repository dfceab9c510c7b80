"""The numbers of rows and tokens that steps are captured for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import raytp.bench
from scheduler.step import Step
from workers import decode_graph, prefill_graph
from workers.batch import SlotState
from workers.kernels.attention import select_backend
from workers.kv_cache import KVCache
from workers.model_config import load_model_config
from workers.models.decoder import CausalLM
from workers.parallel import TensorParallel
from workers.shard_plan import plan_shards

SHAPES = Path(raytp.bench.__file__).parent / "shapes"
META = torch.device("meta")


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 12, 16, 20, 100, 256, 512, 1000])
def test_a_decode_step_of_any_size_has_a_graph(max_num_seqs: int) -> None:
    sizes = decode_graph.graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    shared_sizes = decode_graph.shared_graph_sizes(max_num_seqs)
    assert set(shared_sizes) <= set(sizes)
    assert shared_sizes[-1:] == ([max_num_seqs] if max_num_seqs > 1 else [])


@pytest.mark.parametrize("max_num_batched_tokens", [1, 16, 100, 256, 257, 2048, 8192, 100_000])
def test_a_small_models_steps_have_graphs_that_are_little_larger(max_num_batched_tokens: int) -> None:
    sizes = prefill_graph.graph_sizes(max_num_batched_tokens, max_num_seqs=100, layer_weights=1000)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_batched_tokens
    assert len(sizes) < 60
    assert max_num_batched_tokens < 100 or 100 in sizes
    assert all(b - a <= max(128, a / 8) for a, b in pairwise([0, *sizes]))
    assert set(prefill_graph.shared_graph_sizes(sizes, max_num_seqs=100)) <= set(sizes)
    assert not prefill_graph.shared_graph_sizes(sizes, max_num_seqs=1)


@pytest.mark.parametrize(("layer_weights", "largest"), [(16_000_000, 6144), (193_000_000, 512), (10**10, 256)])
def test_a_large_model_has_them_while_launching_takes_longer_than_computing(layer_weights: int, largest: int) -> None:
    assert prefill_graph.graph_sizes(8192, 256, layer_weights)[-1] == largest


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_all_ranks_have_the_same_graphs_whatever_their_shards(num_ranks: int) -> None:
    """Else one would sum over more tokens than another."""
    model = load_model_config(SHAPES / "qwen3-8b")
    shards = plan_shards(
        num_q_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        world_size=num_ranks,
    )
    backend = select_backend("torch", META, 16)
    sizes = []
    for rank, shard in enumerate(shards):
        causal_lm = CausalLM(model, shard, TensorParallel(rank, num_ranks, META, None), backend, torch.bfloat16, META)
        cache = KVCache.allocate(1, 1, 16, shard.kv_heads.size, model.head_dim, torch.bfloat16, META)
        slots = SlotState(256, 4096, 16, META)
        graphs = prefill_graph.PrefillGraphs(causal_lm, slots, cache, 8192, cast(Any, None))
        sizes.append(graphs.sizes)
    assert all(each == sizes[0] for each in sizes)
    assert len(sizes[0]) > 5


def test_only_prompts_count_against_a_steps_graph() -> None:
    """Decoding rows take the same kernels with a graph and without."""
    nothing = np.zeros(0, dtype=np.int32)
    step = Step(
        step_id=0,
        slots=np.arange(3, dtype=np.int32),
        num_scheduled_tokens=np.array([100, 1, 3], dtype=np.int32),
        seq_lens=np.array([1000, 2**30, 2**30], dtype=np.int32),
        samples=np.ones(3, dtype=np.int32),
        token_ids=np.zeros(104, dtype=np.int32),
        block_slots=nothing,
        block_starts=nothing,
        block_counts=nothing,
        block_ids=nothing,
    )
    assert prefill_graph.num_prompt_pairs(step) == 100 * 1000 + 3 * 2**30
