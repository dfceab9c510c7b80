"""Ranks meet, sum and gather as real processes over gloo, or say in time who could not meet whom."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from multiprocessing.queues import Queue
from typing import Any

import pytest
import torch

from scheduler.errors import ConfigError
from workers.errors import RendezvousError
from workers.kernels.ops import select_ops
from workers.kernels.reference_ops import add_rms_norm
from workers.layers.reduction import Reduction
from workers.parallel import TensorParallel, create_store

_HOST = "127.0.0.1"
_CPU = torch.device("cpu")
_WORLD_SIZE = 3
_WEIGHT = torch.linspace(0.5, 1.5, 5)
_EPS = 1e-6


def _connect(rank: int, port: int, timeout_s: float, **settings: Any) -> TensorParallel:
    return TensorParallel.connect(
        rank=rank,
        world_size=_WORLD_SIZE,
        host=_HOST,
        port=port,
        backend="gloo",
        timeout_s=timeout_s,
        device=_CPU,
        **settings,
    )


def _values(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(_WORLD_SIZE, 2, 5, generator=torch.Generator().manual_seed(0)).to(dtype)


def _run_rank(rank: int, ports: Queue[int], answers: Queue[Any]) -> None:
    torch.set_num_threads(1)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ["NCCL_SOCKET_IFNAME"] = "what the user chose"
    store = None
    if rank == 0:
        store, port = create_store(_HOST, _WORLD_SIZE, 60)
        for _ in range(_WORLD_SIZE):
            ports.put(port)
    tp = _connect(rank, ports.get(), 60, store=store)
    with torch.inference_mode():
        sums = {
            dtype: tp.all_reduce(_values(dtype)[rank]).float().tolist() for dtype in (torch.float32, torch.bfloat16)
        }
        gathered = tp.gather_last_dim(_values(torch.float32)[rank])
        told = tp.broadcast(torch.tensor([rank + 10, 7]))
        reduction = Reduction(tp, select_ops(_CPU, "auto"))
        parts = _values(torch.float32)[rank].expand(rank + 2, -1, -1)  # ranks may split their sums differently
        normed, total = reduction.add_norm(parts, _values(torch.float32)[0], _WEIGHT, _EPS)
    answers.put(
        {
            "rank": rank,
            "sums": sums,
            "gathered": None if gathered is None else gathered.tolist(),
            "min": tp.min_int(100 - rank),
            "told": told.tolist(),
            "normed": normed.tolist(),
            "total": total.tolist(),
            "interfaces": (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]),
        }
    )
    tp.close()


def test_collectives_of_three_processes() -> None:
    context = multiprocessing.get_context("spawn")
    ports, answers = context.Queue(), context.Queue()
    ranks = [context.Process(target=_run_rank, args=(rank, ports, answers)) for rank in range(_WORLD_SIZE)]
    for process in ranks:
        process.start()
    by_rank = {answer["rank"]: answer for answer in (answers.get(timeout=90) for _ in ranks)}
    for process in ranks:
        process.join(30)
    assert [process.exitcode for process in ranks] == [0, 0, 0]

    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-6)):  # each hop rounds
        expected = _values(dtype).float().sum(0)
        for answer in by_rank.values():
            torch.testing.assert_close(torch.tensor(answer["sums"][dtype]), expected, rtol=tolerance, atol=tolerance)
            assert answer["sums"][dtype] == by_rank[0]["sums"][dtype]  # every rank goes on with the very same numbers
    expected_gather = torch.cat(list(_values(torch.float32)), dim=-1).tolist()
    assert [by_rank[rank]["gathered"] for rank in range(_WORLD_SIZE)] == [expected_gather, None, None]
    assert [answer["min"] for answer in by_rank.values()] == [98] * _WORLD_SIZE
    assert [answer["interfaces"] for answer in by_rank.values()] == [("lo", "what the user chose")] * _WORLD_SIZE
    shares = torch.tensor([2.0, 3.0, 4.0])[:, None, None]
    residual = _values(torch.float32)[0]
    summed = (_values(torch.float32) * shares).sum(0)
    for answer in by_rank.values():
        for key, expected in zip(("normed", "total"), add_rms_norm(summed, residual, _WEIGHT, _EPS), strict=True):
            torch.testing.assert_close(torch.tensor(answer[key]), expected, rtol=1e-5, atol=1e-5)
    assert [answer["told"] for answer in by_rank.values()] == [[10, 7]] * _WORLD_SIZE


def test_one_rank_needs_nobody() -> None:
    tp = TensorParallel.single()
    x = torch.ones(2, 3)
    assert tp.all_reduce(x) is x
    assert tp.gather_last_dim(x) is x
    assert tp.broadcast(x) is x
    assert tp.min_int(5) == 5
    tp.close()


def test_a_rank_that_finds_nobody_says_so_in_time() -> None:
    with socket.create_server((_HOST, 0)) as closed:
        port = closed.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=rf"rank 2 on 10\.1\.2\.3 did not meet rank 0 at {_HOST}:{port}.* 1 s"):
        _connect(2, port, 1.0, node_ip="10.1.2.3")
    assert time.monotonic() - start < 3


def test_an_interface_that_there_is_not_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(ConfigError, match=r"names nope0, and .* has .*\blo\b"):
        _connect(1, 1, 60.0)


def test_rank_0_names_the_ranks_that_did_not_come() -> None:
    store, port = create_store(_HOST, _WORLD_SIZE, 1.0)
    with pytest.raises(RendezvousError, match=r"rank 0 .*: ranks \[1, 2\] did not arrive"):
        _connect(0, port, 1.0, store=store)


def test_a_host_that_is_not_ours_cannot_be_listened_on() -> None:
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.200"):
        create_store("192.0.2.200", 2, 1.0)


def test_the_store_listens_on_its_host_alone() -> None:
    store, port = create_store(_HOST, 2, 5.0)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=1)
    del store  # it has listened until here
