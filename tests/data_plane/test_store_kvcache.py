"""Both ways of writing keys and values into the paged cache equal an indexed copy.

The Triton kernel runs compiled where there is a GPU, and in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.kernels.reference import store_kvcache_torch

StoreKVCache: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", params=["triton", "torch"])
def store(request: pytest.FixtureRequest) -> StoreKVCache:
    if request.param == "torch":
        return store_kvcache_torch
    from workers.kernels.store_kvcache import store_kvcache

    return store_kvcache


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(1, 12),
    num_q_heads=st.integers(0, 5),
    num_kv_heads=st.integers(1, 7),
    head_dim=st.sampled_from([1, 16, 24, 64, 80, 128]),
    block_size=st.integers(1, 17),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_equals_an_indexed_copy(
    store: StoreKVCache,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads = (num_q_heads, num_kv_heads, num_kv_heads)
    # As the model hands them over: views into the output of the fused projection.
    _, k, v = torch.randn(num_tokens, sum(heads), head_dim, device=_DEVICE).to(dtype).split(heads, dim=1)
    num_blocks = num_tokens // block_size + 2
    caches = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, device=_DEVICE).to(dtype)
    expected = caches.clone()
    slots = torch.randperm(num_blocks * block_size)[:num_tokens].to(torch.int32)
    slots[torch.rand(num_tokens) < 0.3] = -1
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // block_size, slot % block_size] = k[token]
            expected[1, slot // block_size, slot % block_size] = v[token]

    store(k, v, caches[0], caches[1], slots.to(_DEVICE))
    assert torch.equal(caches, expected)


@pytest.mark.gpu
@pytest.mark.skipif(_DEVICE == "cpu", reason="needs a GPU: the cache is larger than 2**31 elements")
def test_a_cache_past_two_to_the_31_elements(store: StoreKVCache) -> None:
    num_heads, head_dim, block_size = 8, 128, 16
    num_blocks = 2**31 // (num_heads * head_dim * block_size) + 2
    shape = (num_blocks, block_size, num_heads, head_dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k, v = torch.randn(2, 1, num_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    last = torch.tensor([num_blocks * block_size - 1], dtype=torch.int32, device="cuda")
    store(k, v, k_cache, v_cache, last)
    assert torch.equal(k_cache[-1, -1], k[0])
    assert torch.equal(v_cache[-1, -1], v[0])
    assert k_cache.count_nonzero() == k.count_nonzero()
