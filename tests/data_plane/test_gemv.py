"""Linear layers of one row against float32: under the interpreter on a CPU, compiled and in real shapes on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.kernels import reference_ops

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
Shape = tuple[int, int]
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SMALL: list[Shape] = [(16, 48), (5, 31), (38, 1300), (10, 2100), (6, 5000), (7, 12288)]
"""(N, K)."""
REAL: list[Shape] = [
    (4096, 1024),
    (1024, 2048),
    (1024, 3072),
    (4096, 4096),
    (4096, 6144),
    (4096, 12288),
    (24576, 4096),
    (151936, 1024),
    (151936, 4096),
]
"""Of Qwen3's layers."""


def make(num_features: int, num_columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight that keeps the variance, and a bias."""
    torch.manual_seed(seed)
    x = torch.randn(1, num_columns, device=DEVICE).to(dtype)
    weight = torch.randn(num_features, num_columns, device=DEVICE).div_(num_columns**0.5).to(dtype)
    bias = torch.randn(num_features, device=DEVICE).to(dtype)
    if ON_GPU:
        torch.cuda.synchronize()  # a weight may be read before the kernel that was queued last has ended
    return x, weight, bias


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32, rounded at the end."""
    return reference_ops.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check(shape: Shape, dtype: torch.dtype) -> None:
    """Without and with a bias."""
    from workers.kernels.gemv import gemv

    x, weight, bias = make(*shape, dtype)
    assert_close(gemv(x, weight), exact(x, weight, None))
    assert_close(gemv(x, weight, bias), exact(x, weight, bias))


def check_gated(shape: Shape, dtype: torch.dtype, has_bias: bool = False) -> None:
    from workers.kernels.gemv import gemv

    x, weight, bias = make(*shape, dtype)
    given = bias if has_bias else None
    actual = gemv(x, weight, given, gated=True)
    assert actual.shape == (1, shape[0] // 2)
    gate, up = exact(x, weight, given).float().chunk(2, dim=-1)
    tolerance = 4 * TOLERANCE[dtype]  # of two roundings, each of which is multiplied
    torch.testing.assert_close(actual.float(), torch.nn.functional.silu(gate) * up, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SMALL)
def test_any_shape(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in SMALL if shape[0] % 2 == 0])
def test_gated(shape: Shape, has_bias: bool, dtype: torch.dtype) -> None:
    check_gated(shape, dtype, has_bias)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fused_ops_agree_with_plain_ones(num_rows: int, dtype: torch.dtype) -> None:
    """Also where they leave the product to torch: more rows, or float32, which must stay exact."""
    from workers.kernels import fused

    x, weight, bias = make(64, 96, dtype)
    x = x.repeat(num_rows, 1)
    actual, expected = (ops.linear(x, weight, bias) for ops in (fused, reference_ops))
    assert_close(actual, expected)
    assert_close(fused.gated_linear(x, weight, bias), reference_ops.gated_linear(x, weight, bias))
    if dtype == torch.float32:
        assert torch.equal(actual, expected)


def test_what_fits() -> None:
    from workers.kernels.gemv import fits_gemv

    x, weight = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(32, 16, dtype=torch.bfloat16)
    assert fits_gemv(x, weight)
    assert not fits_gemv(x.repeat(2, 1), weight)
    assert not fits_gemv(x.float(), weight.float())
    assert not fits_gemv(x, torch.zeros(16, 32, dtype=torch.bfloat16).t())
    assert not fits_gemv(x.new_zeros(1, 16_385), weight.new_zeros(1, 16_385))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", REAL)
def test_real_shapes(shape: Shape) -> None:
    check(shape, torch.bfloat16)
    check_gated(shape, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_layers_that_overlap_read_what_the_layer_before_has_written() -> None:
    """A graph of layers in a row, whose results take each other's memory in turn: the same bits as one by one."""
    from workers.kernels.gemv import gemv

    x, _, _ = make(1, 1024, torch.bfloat16)
    weights = [make(1024, 1024, torch.bfloat16, seed=row)[1] for row in range(48)]
    expected = x
    for weight in weights:
        expected = gemv(expected, weight)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for weight in weights:
            y = gemv(y, weight)
    for _ in range(50):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)
