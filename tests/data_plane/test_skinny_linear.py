"""Linear layers of few rows against float32: under the interpreter on a CPU, compiled and in real shapes on a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workers.kernels import reference_ops

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HAS_KERNEL = not ON_GPU or torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HAS_KERNEL, reason="made for Hopper")
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16]
"""In the interpreter, products of bfloat16 are wrong."""
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
Shape = tuple[int, int, int]
"""(M, N, K)."""
SMALL: list[Shape] = [
    (1, 64, 4104),
    (2, 64, 128),
    (5, 96, 512),
    (17, 130, 1024),
    (40, 32, 1032),
    (70, 200, 256),
    (144, 128, 256),
    (200, 2178, 256),
    (256, 66, 1536),
]
REAL = [
    (num_rows, num_features // ranks, num_columns)
    for num_rows in (1, 2, 16, 37, 64, 131, 256)
    for num_features, num_columns in [(4096, 1024), (6144, 1024), (24576, 4096), (6144, 4096)]
    for ranks in (1, 2)
]
"""Column-parallel layers of Qwen3's 0.6B and 8B; transposed they are like the row-parallel ones."""


def make(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight that keeps the variance, and a bias."""
    num_rows, num_features, num_columns = shape
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, num_columns, device=DEVICE).to(dtype)
    weight = torch.randn(num_features, num_columns, device=DEVICE).div_(num_columns**0.5).to(dtype)
    return x, weight, torch.randn(num_features, device=DEVICE).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32, rounded at the end."""
    return reference_ops.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, num_roundings: int = 1) -> None:
    tolerance = num_roundings * TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def check(shape: Shape, dtype: torch.dtype, has_bias: bool) -> None:
    """As it is, in parts, and gated."""
    from workers.kernels.skinny_linear import skinny_linear

    x, weight, bias = make(shape, dtype)
    given_bias = bias if has_bias else None
    expected = exact(x, weight, given_bias)
    actual = skinny_linear(x, weight, given_bias)
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype)
    parts = skinny_linear(x, weight, given_bias, may_split=True)
    assert_close(reference_ops.sum_of_splits(parts, dtype), expected, dtype)
    gate, up = expected.float().chunk(2, dim=-1)
    gated = skinny_linear(x, weight, given_bias, gated=True)
    assert_close(gated, torch.nn.functional.silu(gate) * up, dtype, num_roundings=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SMALL)
def test_any_shape(shape: Shape, has_bias: bool, dtype: torch.dtype) -> None:
    check(shape, dtype, has_bias)


def test_parts_of_a_sum_are_float32_and_many() -> None:
    """So that the tests above have seen some."""
    from workers.kernels.skinny_linear import skinny_linear

    x, weight, _ = make((5, 96, 1024), torch.float16)
    parts = skinny_linear(x, weight, may_split=True)
    assert parts.dtype == torch.float32
    assert parts.shape == (4, 5, 96)


@given(
    num_rows=st.integers(1, 256),
    num_features=st.integers(1, 160_000),
    num_columns=st.integers(1, 3000).map(lambda eighth: 8 * eighth),
    gated=st.booleans(),
    may_split=st.booleans(),
)
def test_every_tiling_fits_and_covers(
    num_rows: int, num_features: int, num_columns: int, gated: bool, may_split: bool
) -> None:
    """All of K, in tiles of 128 columns, in what a multiprocessor of Hopper has."""
    from workers.kernels.skinny_linear import choose_tiling

    tiling = choose_tiling(num_rows, num_features, num_columns, gated=gated, may_split=may_split)
    assert tiling.block_m in (16, 32, 64, 128)
    assert num_columns % tiling.num_splits == 0
    assert tiling.num_splits == 1 or (may_split and num_columns // tiling.num_splits % 128 == 0)
    assert tiling.num_stages >= 2
    assert tiling.num_stages * 128 * 2 * (tiling.block_m + 64 * (1 + gated)) <= 227 * 1024


@given(num_features=st.integers(1, 40_000), num_columns=st.integers(1, 200), gated=st.booleans())
def test_the_warm_up_has_a_step_for_each_kernel(num_features: int, num_columns: int, gated: bool) -> None:
    """Between two of its numbers of tokens no layer changes what a kernel is compiled for."""
    from workers.kernels.skinny_linear import choose_tiling
    from workers.model_runner import _NUM_TOKENS

    for num_fewer, num_tokens in pairwise((1, *_NUM_TOKENS)):
        tilings = [
            choose_tiling(rows, num_features, 64 * num_columns, gated=gated, may_split=not gated)
            for rows in range(num_fewer + 1, num_tokens + 1)
        ]
        assert len({(tiling.block_m, tiling.num_splits, tiling.num_stages) for tiling in tilings}) == 1
    assert num_tokens == 256


@pytest.mark.parametrize(("num_rows", "num_splits"), [(1, 1), (2, 4), (70, 4), (257, 1)])
def test_layers_by_whichever_kernel_is_chosen_agree_with_plain_ones(
    num_rows: int, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.kernels import fused, skinny_linear

    monkeypatch.setattr(skinny_linear, "_is_hopper", lambda device: True)
    x, weight, bias = make((num_rows, 96, 1024), torch.float16)
    expected = exact(x, weight, bias)
    assert_close(fused.linear(x, weight, bias), expected, torch.float16)
    parts = fused.linear(x, weight, bias, may_split=True)
    assert (len(parts) if parts.dim() == 3 else 1) == num_splits
    assert_close(reference_ops.sum_of_splits(parts, torch.float16), expected, torch.float16)
    gated = reference_ops.gated_linear(x.float(), weight.float(), bias.float())
    assert_close(fused.gated_linear(x, weight, bias), gated, torch.float16, num_roundings=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [2, 4])
def test_the_norm_adds_up_what_was_split(num_splits: int, dtype: torch.dtype) -> None:
    from workers.kernels import fused

    torch.manual_seed(0)
    parts = torch.randn(num_splits, 5, 96, device=DEVICE)
    residual, weight = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((5, 96), (96,)))
    expected = reference_ops.add_rms_norm(parts, residual, weight, 1e-6)
    actual = fused.add_rms_norm(parts, residual.clone(), weight, 1e-6)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, dtype)


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, what the tensor memory accelerator can load and cuBLAS is not faster at."""
    from workers.kernels import skinny_linear

    fits = skinny_linear.fits_skinny_linear
    x, weight = (torch.zeros(rows, 64, dtype=torch.bfloat16, device=DEVICE) for rows in (2, 32))
    assert fits(x, weight) == ON_GPU
    monkeypatch.setattr(skinny_linear, "_is_hopper", lambda device: True)
    assert fits(x, weight)
    assert not fits(x[:0], weight)
    assert not fits(x.float(), weight.float())
    assert not fits(x[:, :60].contiguous(), weight[:, :60].contiguous())
    assert not fits(x, weight.t().contiguous().t())
    assert not fits(x.view(-1)[1:65].view(1, 64), weight)
    assert fits(x.repeat(32, 1), weight.repeat(1024, 1))
    assert not fits(x, weight.repeat(1025, 1))
    assert fits(x.repeat(64, 1), weight.repeat(64, 1))
    assert not fits(x.repeat(64, 1), weight.repeat(140, 1)), "of 140 programs some would have to wait"
    assert fits(x.repeat(64, 1), weight.repeat(140, 1), gated=True)
    assert fits(x.repeat(128, 1), weight)
    assert not fits(x.repeat(129, 1), weight)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", REAL)
def test_real_shapes(shape: Shape) -> None:
    num_rows, num_features, num_columns = shape
    check(shape, torch.bfloat16, has_bias=True)
    check((num_rows, num_columns, num_features), torch.bfloat16, has_bias=False)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [2, 64, 131, 256])
def test_layers_that_overlap_read_what_the_layer_before_has_written(num_rows: int) -> None:
    """A graph of layers and norms in a row, whose results take each other's memory in turn: as one by one."""
    from workers.kernels import fused
    from workers.kernels.skinny_linear import skinny_linear

    x, _, _ = make((num_rows, 1, 1024), torch.bfloat16)
    weights = [make((num_rows, 1024, 1024), torch.bfloat16)[1].roll(index, 0) for index in range(24)]
    norm_weight = torch.ones(1024, dtype=torch.bfloat16, device=DEVICE)

    def run(synchronize: bool) -> Tensor:
        y, residual = x, torch.zeros_like(x)
        for index, weight in enumerate(weights):
            parts = skinny_linear(y, weight, may_split=index % 2 == 0)
            if synchronize:
                torch.cuda.synchronize()
            y, residual = fused.add_rms_norm(parts, residual, norm_weight, 1e-6)
            if synchronize:
                torch.cuda.synchronize()
        return y

    expected = run(synchronize=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(synchronize=False)
    for _ in range(50):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)
