"""The fused Triton kernels against plain torch: under the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.kernels import reference_ops
from workers.noise import row_keys

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """bf16 results may differ by one rounding where float32 sums were added in another order."""
    tolerance = 1e-5 if actual.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (5, 96), (3, 576), (2, 4096)])
def test_rms_norm(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    from workers.kernels import fused

    torch.manual_seed(size)
    x, residual, weight = (
        randn(num_tokens, size, dtype=dtype),
        randn(num_tokens, size, dtype=dtype),
        randn(size, dtype=dtype),
    )
    assert_close(fused.rms_norm(x, weight, 1e-6), reference_ops.rms_norm(x, weight, 1e-6))
    expected, expected_sum = reference_ops.add_rms_norm(x, residual, weight, 1e-6)
    actual, actual_sum = fused.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.equal(actual_sum, expected_sum)
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_columns"), [(1, 48), (4, 1536), (3, 3000)])
def test_silu_mul(num_tokens: int, num_columns: int, dtype: torch.dtype) -> None:
    from workers.kernels import fused

    gate_up = randn(num_tokens, 2 * num_columns, dtype=dtype)
    assert_close(fused.silu_mul(gate_up), reference_ops.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (9, 3, 64), (4, 4, 128), (3, 1, 24)])
def test_norm_rope_store(
    num_q_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    from workers.kernels import fused

    torch.manual_seed(num_q_heads)
    qkv = randn(5, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand(5, 1, head_dim // 2, device=DEVICE) * 6
    cos_sin = (angles.cos(), angles.sin())
    slots = torch.tensor([7, -1, 0, 13, 4], dtype=torch.int32, device=DEVICE)
    weights = (randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)) if has_norm else None
    caches = [torch.zeros(2, 7, 2, num_kv_heads, head_dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    results = [
        module.norm_rope_store(qkv, num_q_heads, cos_sin, (cache[0], cache[1]), slots, weights, 1e-6)
        for module, cache in zip((reference_ops, fused), caches, strict=True)
    ]
    assert_close(results[1], results[0])
    assert_close(caches[1], caches[0])
    assert torch.equal(caches[1][1], caches[0][1])


@pytest.mark.parametrize("first_id", [0, 1000])
@pytest.mark.parametrize("num_ids", [1, 700, 5000])
def test_best_candidates(num_ids: int, first_id: int) -> None:
    from workers.candidates import best_candidates, unpack_ids
    from workers.kernels.candidates import best_candidates as by_triton

    torch.manual_seed(num_ids)
    temperature = torch.tensor([0, 1, 0.5, 2, 1e-30, 0, 1.0])
    keys = torch.from_numpy(row_keys(np.arange(7, dtype=np.uint64), np.arange(7, dtype=np.int32)))
    logits = torch.randn(7, num_ids)
    logits[5] = 1.0  # ties: the first wins
    expected = unpack_ids(best_candidates(logits, temperature, keys, first_id))
    actual = by_triton(logits.to(DEVICE), temperature.to(DEVICE), keys.to(DEVICE), first_id)
    assert unpack_ids(actual).tolist() == expected.tolist()
    assert expected[5] == first_id


def test_prepare_decode() -> None:
    from workers.kernels.prepare_decode import prepare_decode

    ints = {"dtype": torch.int32, "device": DEVICE}
    tables = torch.randint(0, 50, (5, 7), **ints)
    expected_tables = tables.clone()
    expected_tables[0, 2], expected_tables[3, 0] = 33, 22
    last_tokens = torch.arange(5, device=DEVICE) * 10
    slots, seq_lens = torch.tensor([2, 0, 3, 4], **ints), torch.tensor([5, 9, 1, 0], **ints)
    new_blocks = torch.tensor([-1, 33, 22, -1], **ints)
    inv_freq = torch.rand(3, device=DEVICE)
    input_ids = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    cos, sin = torch.zeros(2, 4, 1, 3, device=DEVICE)
    slot_mapping, row_tables = torch.zeros(4, **ints), torch.zeros(4, 7, **ints)
    prepare_decode(
        slots,
        seq_lens,
        new_blocks,
        last_tokens,
        tables,
        inv_freq,
        1.5,
        4,
        input_ids,
        cos,
        sin,
        slot_mapping,
        row_tables,
    )
    assert torch.equal(tables, expected_tables)
    assert input_ids.tolist() == [20, 0, 30, 40]
    assert slot_mapping.tolist() == [int(tables[2, 1]) * 4, 33 * 4, 22 * 4, -1]
    for row, (slot, num_blocks) in enumerate([(2, 2), (0, 3), (3, 1)]):
        assert torch.equal(row_tables[row, :num_blocks], tables[slot, :num_blocks])
    angles = (seq_lens - 1).float()[:, None] * inv_freq
    torch.testing.assert_close(cos[:3, 0], 1.5 * angles[:3].cos(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin[:3, 0], 1.5 * angles[:3].sin(), rtol=1e-5, atol=1e-5)
