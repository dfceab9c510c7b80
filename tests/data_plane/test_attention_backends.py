"""Every attention backend that runs here equals float32 attention written out, over ragged paged batches."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from scheduler.errors import ConfigError
from tests.data_plane.ragged_step import BATCHES, GPU_OR_CPU, Step
from workers.kernels.attention import select_backend

_CPU = torch.device("cpu")
_HAS_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (9, 3, 8), (8, 1, 24)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_torch_on_cpu(batch: str, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    step = Step(BATCHES[batch], (num_q_heads, num_kv_heads), head_dim, block_size, torch.float32, device=_CPU)
    torch.testing.assert_close(step.run(select_backend("torch", _CPU, block_size)), step.expected())


def test_torch_computes_in_float32_whatever_the_inputs() -> None:
    step = Step(BATCHES["mixed"], (4, 2), 32, 16, torch.bfloat16, device=_CPU)
    got = step.run(select_backend("torch", _CPU, 16))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, step.expected().bfloat16(), rtol=2**-8, atol=1e-6)  # one rounding


@pytest.mark.gpu
@pytest.mark.skipif(not _HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn", "torch"])
def test_on_gpu(name: str, batch: str, num_kv_heads: int, head_dim: int) -> None:
    """8 query heads, so that 1 to 8 of them share a kv head."""
    for block_size in (16, 256):
        try:
            backend = select_backend(name, GPU_OR_CPU, block_size, torch.bfloat16)
        except ConfigError as error:
            if block_size == 256:
                pytest.skip(str(error))
            continue
        step = Step(BATCHES[batch], (8, num_kv_heads), head_dim, block_size, torch.bfloat16)
        step.caches.nan_to_num_(0.0)  # as the pool is on a GPU
        torch.testing.assert_close(step.run(backend).float(), step.expected(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_cpu_has_torch(name: str) -> None:
    assert select_backend(name, _CPU, 16).name == "torch"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("flash_attn", "needs a CUDA device"), ("flash_attn_3", "needs a CUDA device"), ("xformers", "is none of 'auto'")],
)
def test_a_backend_that_cannot_run_says_why(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' cannot be used: it {reason}"):
        select_backend(name, _CPU, 16)


def test_a_cpu_engine_imports_neither_triton_nor_flash_attn() -> None:
    code = (
        "import sys, torch, workers.models.decoder\n"
        "from workers.kernels.attention import select_backend; from workers.kernels.ops import select_ops\n"
        "select_backend('auto', torch.device('cpu'), 16); select_ops(torch.device('cpu'), 'torch')\n"
        "sys.exit(any(name in sys.modules for name in ('triton', 'flash_attn', 'flash_attn_interface')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
