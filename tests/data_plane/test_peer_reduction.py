"""The sum over ranks through each other's memory is what an all-reduce and a norm give, whatever comes in a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from workers.kernels.ops import select_ops
from workers.kernels.reference_ops import add_rms_norm, rms_norm
from workers.layers.reduction import Reduction
from workers.parallel import TensorParallel, create_store

_HOST = "127.0.0.1"
_MAX_ROWS = 300
_EPS = 1e-6
_HALF_SHARES = (0.5, 0.25, 0.125, 0.125)
_SHARES = {torch.bfloat16: _HALF_SHARES, torch.float16: _HALF_SHARES, torch.float32: (0.5, 0.5)}
"""Of what a linear layer has left to be added up, in float32: the sum is exact."""
_SHAPES = ((1024, torch.bfloat16), (4096, torch.bfloat16), (896, torch.float16), (1001, torch.float32))


def _parts(step: int, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Both ranks' partial sums of a step, the same on each rank, with the values that could pass for nothing sent."""
    parts = torch.randn(2, num_rows, size, generator=torch.Generator().manual_seed(step)).to(dtype)
    parts[step % 2, :, ::7] = 0.0
    parts[:, num_rows // 2, ::3] = -0.0
    parts[0, 0, 5], parts[1, 0, 6] = torch.inf, torch.nan
    return parts


def _check_sums(tp: TensorParallel, device: torch.device, size: int, dtype: torch.dtype) -> None:
    """Sums of changing numbers of rows after one another, without a host synchronisation between them."""
    reduction = Reduction(tp, select_ops(device, "auto"))
    reduction.use_peer_memory(_MAX_ROWS, size, dtype)
    weight = torch.linspace(0.5, 1.5, size).to(device, dtype)
    rows = [1, 300, 2, 131, 129, 64, 1, 256, 7] * 4
    inputs = [_parts(step, num_rows, size, dtype) for step, num_rows in enumerate(rows)]
    shards = [each[tp.rank].to(device) for each in inputs]
    residuals = [each.flip(0)[0].to(device) if step % 5 else None for step, each in enumerate(inputs)]
    expected_residuals = [None if each is None else each.clone() for each in residuals]
    results = []
    for step, (shard, residual) in enumerate(zip(shards, residuals, strict=True)):
        if residual is not None and step % 4 == 1:
            shard = torch.stack([shard.float() * share for share in _SHARES[dtype]])
        if step % 5 == tp.rank:
            torch.cuda._sleep(300_000)  # now one is late, now the other
        results.append(reduction.add_norm(shard, residual, weight, _EPS))
    for both, residual, (normed, total) in zip(inputs, expected_residuals, results, strict=True):
        summed = (both[0].float() + both[1].float()).to(dtype).to(device)
        expected = (rms_norm(summed, weight, _EPS), summed)
        if residual is not None:
            expected = add_rms_norm(summed, residual, weight, _EPS)
        tolerance = 1e-5 if dtype == torch.float32 else 2**-6  # the norms sum their squares in different orders
        torch.testing.assert_close(total, expected[1], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(normed, expected[0], rtol=tolerance, atol=tolerance, equal_nan=True)
        everywhere = normed.float().clone()
        torch.testing.assert_close(tp.all_reduce(everywhere), 2 * normed.float(), rtol=0, atol=0, equal_nan=True)


def _run_rank(rank: int, ports: Any) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = None
    if rank == 0:
        store, port = create_store(_HOST, 2, 60.0)
        ports.put(port)
        ports.put(port)
    tp = TensorParallel.connect(
        rank=rank,
        world_size=2,
        host=_HOST,
        port=ports.get(),
        backend="nccl",
        timeout_s=60.0,
        store=store,
        device=device,
    )
    with torch.inference_mode():
        for size, dtype in _SHAPES:
            _check_sums(tp, device, size, dtype)
    tp.close()


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sums_through_peer_memory() -> None:
    multiprocessing.spawn(_run_rank, (multiprocessing.get_context("spawn").Queue(),), nprocs=2)
