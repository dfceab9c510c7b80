"""The numbers of rows and tokens that steps are captured for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from workers import decode_graph, prefill_graph


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 12, 16, 20, 100, 256, 512, 1000])
def test_a_decode_step_of_any_size_has_a_graph(max_num_seqs: int) -> None:
    sizes = decode_graph.graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs


@pytest.mark.parametrize("max_num_batched_tokens", [1, 16, 100, 256, 257, 2048, 8192, 100_000])
def test_a_small_models_steps_have_graphs_that_are_little_larger(max_num_batched_tokens: int) -> None:
    sizes = prefill_graph.graph_sizes(max_num_batched_tokens, layer_weights=1000)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_batched_tokens
    assert len(sizes) < 60
    assert all(b - a <= max(128, a / 8) for a, b in pairwise([0, *sizes]))


@pytest.mark.parametrize(("layer_weights", "largest"), [(16_000_000, 6144), (193_000_000, 512), (10**10, 256)])
def test_a_large_models_have_them_while_launching_takes_longer_than_computing(layer_weights: int, largest: int) -> None:
    assert prefill_graph.graph_sizes(8192, layer_weights)[-1] == largest
