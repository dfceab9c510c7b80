"""Times the sum over two ranks that ends in a norm, on two GPUs of one host: through peer memory, and through NCCL.

    PYTHONPATH=. python benchmarks/reduction.py --out reduction.json

A CUDA graph holds as many sums as a model's step, one after another, in bfloat16; the time is that of one of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from workers.kernels.ops import select_ops
from workers.layers.reduction import Reduction
from workers.parallel import TensorParallel, create_store

_HOST = "127.0.0.1"
_NUM_SUMS = 56
_NUM_REPLAYS = 20
_SIZES = (1024, 4096)
_ROWS = (1, 8, 32, 64, 131, 256)


def _time_us(reduction: Reduction, num_rows: int, size: int, device: torch.device) -> float:
    """Median time of one sum."""
    part = torch.zeros(num_rows, size, dtype=torch.bfloat16, device=device)
    residual = torch.zeros(num_rows, size, dtype=torch.bfloat16, device=device)
    weight = torch.ones(size, dtype=torch.bfloat16, device=device)

    def run() -> None:
        for _ in range(_NUM_SUMS):
            reduction.add_norm(part, residual, weight, 1e-6)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(_NUM_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _NUM_SUMS)
    return statistics.median(times)


def _run_rank(rank: int, ports: Any, out: Path) -> None:
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
    ops = select_ops(device, "auto")
    results = []
    for size in _SIZES:
        peers, nccl = Reduction(tp, ops), Reduction(tp, ops)
        peers.use_peer_memory(max(_ROWS), size, torch.bfloat16)
        for num_rows in _ROWS:
            times = [round(_time_us(each, num_rows, size, device), 2) for each in (peers, nccl)]
            results.append({"size": size, "rows": num_rows, "peer_us": times[0], "nccl_us": times[1]})
    if rank == 0:
        for result in results:
            print(result)
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        out.write_text(json.dumps(record, indent=1) + "\n")
    tp.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    arguments = parser.parse_args()
    ports = multiprocessing.get_context("spawn").Queue()
    multiprocessing.spawn(_run_rank, (ports, arguments.out), nprocs=2)


if __name__ == "__main__":
    main()
