"""Times linear layers of one row on one GPU, in the shapes of Qwen3: this project's Triton kernel against torch.

    PYTHONPATH=. python benchmarks/gemv.py --out gemv.json

A CUDA graph runs one layer with as many weights in turn as exceed the L2 cache, in bfloat16; the time is that of one of
them. Gated layers include SiLU(gate) * up, with torch as a second kernel. Layers back to back overlap with each other,
which in an engine they do less: "after a norm" has the kernel before them that is mostly there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from workers.kernels import fused
from workers.kernels.gemv import gemv

_WEIGHT_BYTES = 120e6
"""Of all weights of a graph together, at least: twice the L2 cache."""
_BYTES_PER_US = 4.3e6
_NUM_REPLAYS = 20
_EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    name: str
    num_features: int
    num_columns: int
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_features * self.num_columns


def _model(name: str, hidden: int, qkv: int, heads: int, intermediate: int, ranks: int) -> list[Shape]:
    """A rank's layers."""
    return [
        Shape(f"{name} qkv", qkv // ranks, hidden),
        Shape(f"{name} o", hidden, heads // ranks),
        Shape(f"{name} gate_up", 2 * intermediate // ranks, hidden, gated=True),
        Shape(f"{name} down", hidden, intermediate // ranks),
        Shape(f"{name} head", 151936 // ranks, hidden),
    ]


SHAPES = [
    *_model("0.6b", 1024, 4096, 2048, 3072, 1),
    *_model("8b", 4096, 6144, 4096, 12288, 1),
    *_model("0.6b/2", 1024, 4096, 2048, 3072, 2),
    *_model("8b/2", 4096, 6144, 4096, 12288, 2),
]


def _time(run: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Median microseconds of a layer, over replays of a graph that runs them all."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) for start, stop in pairwise(marks)]
    return round(float(statistics.median(times)) * 1e3 / len(weights), 2)


def _measure(shape: Shape) -> dict[str, Any]:
    count = int(_WEIGHT_BYTES // shape.num_bytes) + 1
    weights = torch.empty(count, shape.num_features, shape.num_columns, dtype=torch.bfloat16, device="cuda")
    weights.normal_(0, shape.num_columns**-0.5)
    x = torch.randn(1, shape.num_columns, device="cuda").bfloat16()
    norm_weight = torch.ones(shape.num_columns, device="cuda").bfloat16()

    def with_torch(x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return fused.silu_mul(y) if shape.gated else y

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return gemv(x, weight, gated=shape.gated)

    def after_norm(linear: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda weight: linear(fused.rms_norm(x, norm_weight, _EPS), weight)

    return {
        **asdict(shape),
        "floor_us": round(shape.num_bytes / _BYTES_PER_US, 2),
        "torch_us": _time(lambda weight: with_torch(x, weight), list(weights)),
        "ours_us": _time(lambda weight: ours(x, weight), list(weights)),
        "torch_after_norm_us": _time(after_norm(with_torch), list(weights)),
        "ours_after_norm_us": _time(after_norm(ours), list(weights)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    options = parser.parse_args()
    results = []
    for shape in SHAPES:
        results.append(_measure(shape))
        print(*results[-1].values(), flush=True)
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    options.out.write_text(json.dumps({**environment, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
