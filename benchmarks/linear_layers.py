"""Times a decoder layer's work but for attention, on one GPU: with cuBLAS, and with this project's linear layers.

    PYTHONPATH=. python benchmarks/linear_layers.py --out linear_layers.json

A CUDA graph runs norms, rotary embedding and the four linear layers of as many decoder layers as exceed the L2 cache,
in bfloat16, for each of several numbers of rows. Between kernels of a few microseconds each, what one layer gains
alone says little; hence whole layers: with all linear layers by cuBLAS, and with this project's kernel where it fits.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import triton

from workers.kernels import fused

_WEIGHT_BYTES = 400e6
"""Of all weights together, at least: eight times the L2 cache."""
_NUM_REPLAYS = 8
_ROWS = (1, 2, 8, 16, 32, 48, 64, 96, 128, 144, 160, 192, 224, 256)
_EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """A rank's."""

    hidden: int
    num_q_heads: int
    num_kv_heads: int
    intermediate: int
    head_dim: int = 128


SHAPES = {
    "0.6b": Shape(1024, 16, 8, 3072),
    "0.6b/2": Shape(1024, 8, 4, 1536),
    "8b": Shape(4096, 32, 8, 12288),
    "8b/2": Shape(4096, 16, 4, 6144),
}


class Layers:
    """Decoder layers without attention: the rotated queries stand for its result."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        heads, size = shape.num_q_heads + 2 * shape.num_kv_heads, shape.hidden
        features = [
            (heads * shape.head_dim, size),
            (size, shape.num_q_heads * shape.head_dim),
            (2 * shape.intermediate, size),
            (size, shape.intermediate),
        ]
        layer_bytes = 2 * sum(rows * columns for rows, columns in features)
        self.num_layers = int(_WEIGHT_BYTES // layer_bytes) + 1
        self.weights = [
            [torch.randn(*each, device="cuda").mul_(each[1] ** -0.5).bfloat16() for each in features]
            for _ in range(self.num_layers)
        ]
        self.norm_weight = torch.ones(size, device="cuda").bfloat16()
        self.head_weight = torch.ones(shape.head_dim, device="cuda").bfloat16()

    def time_us(self, num_rows: int) -> float:
        """Median time of one layer."""
        shape = self.shape
        x, residual = (torch.randn(num_rows, shape.hidden, device="cuda").bfloat16() for _ in range(2))
        cos_sin = tuple(torch.ones(2, num_rows, 1, shape.head_dim // 2, device="cuda"))
        cache = torch.zeros(2, num_rows, 16, shape.num_kv_heads, shape.head_dim, device="cuda").bfloat16()
        slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
        qk_weights = (self.head_weight, self.head_weight)

        def run() -> None:
            y = x
            for qkv, o, gate_up, down in self.weights:
                y, _ = fused.add_rms_norm(y, residual, self.norm_weight, _EPS)
                y = fused.linear(y, qkv)
                y = fused.norm_rope_store(y, shape.num_q_heads, cos_sin, (cache[0], cache[1]), slots, qk_weights, _EPS)
                y = fused.linear(y.flatten(1), o, may_split=True)
                y, _ = fused.add_rms_norm(y, residual, self.norm_weight, _EPS)
                y = fused.linear(fused.gated_linear(y, gate_up, None), down, may_split=True)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(stop) for start, stop in pairwise(marks)]
        return round(float(statistics.median(times)) * 1e3 / self.num_layers, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    options = parser.parse_args()
    results = []
    for name, shape in SHAPES.items():
        layers = Layers(shape)
        for num_rows in _ROWS:
            with mock.patch.object(fused, "fits_skinny_linear", return_value=False):
                cublas_us = layers.time_us(num_rows)
            ours_us = layers.time_us(num_rows)
            results.append({"shape": name, "num_rows": num_rows, "cublas_us": cublas_us, "ours_us": ours_us})
            print(*results[-1].values(), flush=True)
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    options.out.write_text(json.dumps({**environment, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
