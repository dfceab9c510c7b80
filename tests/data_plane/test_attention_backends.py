"""Every attention backend that runs here equals float32 attention written out, over ragged paged batches."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from scheduler.errors import ConfigError
from workers.kernels.attention import AttentionBackend, select_backend
from workers.layers.attention import AttentionMetadata

_CPU = torch.device("cpu")
_HAS_GPU = torch.cuda.is_available()
_DEVICE = torch.device("cuda" if _HAS_GPU else "cpu")

# (rows in this step, keys) of each sequence.
BATCHES = {
    "decode": [(1, 1), (1, 2), (1, 16), (1, 17), (1, 300), (1, 8192)],
    "prefill": [(1, 1), (5, 5), (16, 16), (257, 257), (512, 512)],
    "chunks": [(3, 4), (16, 32), (100, 1000), (512, 8000)],
    "mixed": [(1, 77), (31, 31), (1, 4097), (64, 200), (2, 2)],
}


class Step:
    """Random queries over a random cache; slots that no sequence owns hold NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        blocks_of = [-(-seq_len // block_size) for _, seq_len in lengths]
        order = torch.randperm(sum(blocks_of) + 3, generator=generator).int()
        tables = torch.zeros(len(lengths), max(blocks_of) + 2, dtype=torch.int32)
        self.caches = torch.full((2, len(order), block_size, num_kv_heads, head_dim), torch.nan)
        self.keys: list[Tensor] = []
        for row, (blocks, (_, seq_len)) in enumerate(zip(order.split([*blocks_of, 3]), lengths, strict=False)):
            tables[row, : len(blocks)] = blocks
            kv = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator).to(dtype)
            slots = (blocks.unsqueeze(1) * block_size + torch.arange(block_size)).flatten()[:seq_len]
            self.caches.flatten(1, 2)[:, slots] = kv.float()
            self.keys.append(kv.to(device))
        self.caches = self.caches.to(dtype).to(device)
        q_lens = torch.tensor([q_len for q_len, _ in lengths])
        self.q = torch.randn(int(q_lens.sum()), num_q_heads, head_dim, generator=generator).to(dtype).to(device)
        self.q_lens = q_lens.tolist()
        self.metadata = AttentionMetadata(
            slot_mapping=torch.full((len(self.q),), -1, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.cat((torch.zeros(1), q_lens.cumsum(0))).int().to(device),
            seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            max_seqlen_q=max(self.q_lens),
            max_seqlen_k=max(seq_len for _, seq_len in lengths),
        )

    def run(self, backend: AttentionBackend) -> Tensor:
        return backend.forward(self.q, self.caches[0], self.caches[1], self.metadata, self.q.shape[-1] ** -0.5)

    def expected(self) -> Tensor:
        """softmax(q k^T / sqrt(D)) v in float32, a sequence at a time."""
        outputs = []
        for q, kv in zip(self.q.float().split(self.q_lens), self.keys, strict=True):
            k, v = kv.float().repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            is_future = torch.ones(scores.shape[1:], device=q.device).triu(len(k) - len(q) + 1).bool()
            weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outputs)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (9, 3, 8), (8, 1, 24)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_torch_on_cpu(batch: str, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    step = Step(BATCHES[batch], num_q_heads, num_kv_heads, head_dim, block_size, torch.float32, _CPU)
    torch.testing.assert_close(step.run(select_backend("torch", _CPU, block_size)), step.expected())


def test_torch_computes_in_float32_whatever_the_inputs() -> None:
    step = Step(BATCHES["mixed"], 4, 2, 32, 16, torch.bfloat16, _CPU)
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
            backend = select_backend(name, _DEVICE, block_size, torch.bfloat16)
        except ConfigError as error:
            if block_size == 256:
                pytest.skip(str(error))
            continue
        step = Step(BATCHES[batch], 8, num_kv_heads, head_dim, block_size, torch.bfloat16, _DEVICE)
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
