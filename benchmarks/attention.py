"""Times paged attention of one layer on one GPU: this project's Triton kernels against FlashAttention-3.

    PYTHONPATH=. python benchmarks/attention.py --out attention.json

Every kernel runs in a CUDA graph over the caches of several layers in turn, which together exceed the L2 cache; what a
step computes once for all layers is left out of the time and listed by itself. Decode configurations are swept on one
ragged batch, and the best of them run on the other batches. Each result is compared with attention in float32. What
fails is listed with its error.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from workers.kernels.decode_plan import DecodeConfig, DecodeWorkspace, plan_decode
from workers.kernels.triton_backend import TritonAttention
from workers.kernels.triton_decode import attend_decode
from workers.kernels.triton_prefill import PrefillConfig
from workers.layers.attention import AttentionMetadata

_HEAD_DIM = 128
_BLOCK_SIZE = 16
_NUM_REPLAYS = 25
_CACHE_BYTES = 200e6
"""Of all layers together, at least: four times the L2 cache."""


@dataclass(frozen=True)
class Case:
    name: str
    num_q_heads: int
    num_kv_heads: int
    lengths: list[tuple[int, int]]
    """(rows, keys) of each sequence."""

    @property
    def bytes_read(self) -> int:
        """Keys and values of one layer."""
        return sum(seq_len for _, seq_len in self.lengths) * self.num_kv_heads * _HEAD_DIM * 2 * 2

    @property
    def operations(self) -> int:
        pairs = sum(q_len * (seq_len - q_len) + q_len * (q_len + 1) // 2 for q_len, seq_len in self.lengths)
        return 4 * pairs * self.num_q_heads * _HEAD_DIM


def _ragged(num_seqs: int, low: int, high: int) -> list[tuple[int, int]]:
    return [(1, random.Random(seed).randint(low, high)) for seed in range(num_seqs)]


def _prompts(num_seqs: int, low: int, high: int) -> list[tuple[int, int]]:
    return [(length, length) for _, length in _ragged(num_seqs, low, high)]


SWEPT = Case("16q/8kv, batch 131 (100-1900)", 16, 8, _ragged(131, 100, 1900))
DECODE_CASES = [
    Case("16q/8kv, batch 1 (600)", 16, 8, [(1, 600)]),
    Case("16q/8kv, batch 1 (4096)", 16, 8, [(1, 4096)]),
    Case("16q/8kv, batch 8 (100-1500)", 16, 8, _ragged(8, 100, 1500)),
    Case("16q/8kv, batch 256 (100-1200)", 16, 8, _ragged(256, 100, 1200)),
    Case("16q/8kv, batch 32 (4096)", 16, 8, [(1, 4096)] * 32),
    Case("32q/8kv, batch 131 (100-1900)", 32, 8, _ragged(131, 100, 1900)),
    Case("32q/8kv, batch 32 (4096)", 32, 8, [(1, 4096)] * 32),
    Case("16q/4kv, batch 131 (100-1900)", 16, 4, _ragged(131, 100, 1900)),
    Case("8q/4kv, batch 131 (100-1900)", 8, 4, _ragged(131, 100, 1900)),
]
PREFILL_CASES = [
    Case("prompts 16 x (100-1024)", 16, 8, _prompts(16, 100, 1024)),
    Case("prompt 8192", 16, 8, [(8192, 8192)]),
    Case("chunk 2048 of 8192", 16, 8, [(2048, 8192)]),
    Case("mixed: 128 rows (100-1900), 4 prompts of 512", 16, 8, _ragged(128, 100, 1900) + [(512, 512)] * 4),
]
# (tile, warps, stages, programs per multiprocessor): as many programs as shared memory and registers have room for.
DECODE_SWEEP = [
    DecodeConfig(tile=tile, num_warps=num_warps, num_stages=num_stages, programs_per_sm=programs)
    for tile, num_warps, num_stages, programs in [
        (64, 4, 3, 3),
        (64, 4, 3, 2),
        (64, 4, 4, 2),
        (64, 4, 6, 1),
        (64, 4, 2, 3),
        (64, 2, 3, 3),
        (64, 2, 4, 2),
        (64, 2, 2, 4),
        (64, 8, 3, 2),
        (64, 8, 4, 2),
        (32, 4, 4, 3),
        (32, 4, 5, 3),
        (32, 4, 6, 2),
        (32, 2, 3, 4),
        (32, 2, 4, 4),
        (32, 2, 5, 3),
        (32, 1, 3, 6),
        (32, 1, 4, 4),
        (16, 1, 4, 7),
        (16, 1, 5, 6),
        (16, 1, 7, 4),
        (128, 4, 2, 2),
        (128, 8, 2, 2),
        (128, 4, 3, 1),
        (128, 8, 3, 1),
    ]
]
PREFILL_SWEEP = [
    PrefillConfig(),
    PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=2),
    PrefillConfig(rows=128, tile=128, num_warps=8, num_stages=2),
    PrefillConfig(rows=64, tile=64, num_warps=4, num_stages=3),
]


class Batch:
    """A case's tensors: random pages, and their owners' queries."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        blocks_of = [-(-seq_len // _BLOCK_SIZE) for _, seq_len in case.lengths]
        num_layers = max(4, min(64, int(_CACHE_BYTES / case.bytes_read) + 1))
        shape = (2, num_layers, sum(blocks_of), _BLOCK_SIZE, case.num_kv_heads, _HEAD_DIM)
        self.caches = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        tables = torch.zeros(len(blocks_of), max(blocks_of), dtype=torch.int32)
        for row, blocks in enumerate(torch.randperm(sum(blocks_of)).int().split(blocks_of)):
            tables[row, : len(blocks)] = blocks
        self.q_lens = [q_len for q_len, _ in case.lengths]
        starts = torch.tensor([0, *self.q_lens]).cumsum(0).int()
        self.q = torch.randn(int(starts[-1]), case.num_q_heads, _HEAD_DIM, device="cuda").bfloat16()
        self.metadata = AttentionMetadata(
            slot_mapping=torch.full((len(self.q),), -1, dtype=torch.int32, device="cuda"),
            cu_seqlens_q=starts.cuda(),
            seq_lens=torch.tensor([seq_len for _, seq_len in case.lengths], dtype=torch.int32, device="cuda"),
            block_tables=tables.cuda(),
            max_seqlen_q=max(self.q_lens),
            max_seqlen_k=max(seq_len for _, seq_len in case.lengths),
        )
        self.expected = self._attend()

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.caches[0], self.caches[1], strict=True))

    def _attend(self) -> Tensor:
        """Attention of the first layer in float32, a sequence and a few of its rows at a time."""
        outputs = []
        k_cache, v_cache = self.layers()[0]
        group = self.case.num_q_heads // self.case.num_kv_heads
        for row, (q_all, (q_len, seq_len)) in enumerate(zip(self.q.split(self.q_lens), self.case.lengths, strict=True)):
            blocks = self.metadata.block_tables[row, : -(-seq_len // _BLOCK_SIZE)].long()
            k, v = (cache[blocks].flatten(0, 1)[:seq_len].float() for cache in (k_cache, v_cache))
            for start in range(0, q_len, 512):
                q = q_all[start : start + 512].float().unflatten(1, (-1, group))
                scores = torch.einsum("qhgd,khd->hgqk", q, k) * _HEAD_DIM**-0.5
                is_future = torch.ones(scores.shape[2:], device="cuda").triu(seq_len - q_len + start + 1).bool()
                weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)
                outputs.append(torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2))
        return torch.cat(outputs)


class Report:
    """Prints results as they come, and keeps them in a file."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._deadline = time.monotonic() + seconds
        self._records: list[dict[str, Any]] = []

    def measure(
        self,
        batch: Batch,
        kernel: str,
        run: Callable[[Tensor, Tensor], Tensor],
        config: Any = None,
        checked: bool = True,
    ) -> float:
        """Microseconds of run(k_cache, v_cache); infinite if it failed, or if there was no time left."""
        record: dict[str, Any] = {"case": batch.case.name, "kernel": kernel, "config": config and asdict(config)}
        if time.monotonic() > self._deadline:
            record["failure"] = "no time left"
        else:
            try:
                if checked:
                    difference = run(*batch.layers()[0]).float().view_as(batch.expected) - batch.expected
                    record["error"] = float(difference.norm() / batch.expected.norm())
                record["us"] = _time(run, batch.layers())
            except Exception as failure:  # whatever the kernel's author did: the others are still worth measuring
                record["failure"] = f"{type(failure).__name__}: {failure}"[:300]
        if "us" in record:
            record["gb_per_s"] = batch.case.bytes_read / record["us"] / 1e3
            record["tflop_per_s"] = batch.case.operations / record["us"] / 1e6
        self._records.append(record)
        self._path.write_text(json.dumps({**_environment(), "records": self._records}, indent=1))
        _print(record)
        wrong = not record.get("error", 0.0) < 1e-2  # also if it is not a number
        return float("inf") if "us" not in record or wrong else record["us"]


def _environment() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def _print(record: dict[str, Any]) -> None:
    config = ",".join(f"{value:d}" for value in (record["config"] or {}).values())
    result = record.get("failure") or (
        f"{record['us']:8.1f} us {record['gb_per_s']:6.0f} GB/s {record['tflop_per_s']:5.0f} TFLOP/s"
        f"  error {record.get('error', 0.0):.1e}"
    )
    print(f"{record['case'][:34]:34} {record['kernel']:16} {config:16} {result}", flush=True)


def _time(run: Callable[[Tensor, Tensor], Tensor], layers: list[tuple[Tensor, Tensor]]) -> float:
    """Median microseconds of a layer, over replays of a graph that runs them all."""
    run(*layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            run(*layer)
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) for start, stop in pairwise(marks)]
    return float(statistics.median(times) * 1e3 / len(layers))


def measure_flash(report: Report, batch: Batch) -> None:
    try:
        from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata
    except ImportError as failure:
        print(f"FlashAttention-3 is left out: {failure}")
        return
    case, metadata = batch.case, batch.metadata
    shared = {
        "cache_seqlens": metadata.seq_lens,
        "page_table": metadata.block_tables,
        "causal": True,
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "max_seqlen_q": metadata.max_seqlen_q,
    }

    def measure(kernel: str, **options: Any) -> None:
        report.measure(batch, kernel, lambda k, v: flash_attn_with_kvcache(batch.q, k, v, **shared, **options))

    measure("fa3")
    if metadata.max_seqlen_q > 1:
        return
    measure("fa3 splits=1", num_splits=1)
    try:
        schedule = get_scheduler_metadata(
            len(case.lengths),
            1,
            metadata.max_seqlen_k,
            case.num_q_heads,
            case.num_kv_heads,
            _HEAD_DIM,
            metadata.seq_lens,
            cu_seqlens_q=metadata.cu_seqlens_q,
            page_size=_BLOCK_SIZE,
            causal=True,
        )
    except Exception as failure:  # its arguments differ between releases
        print(f"FlashAttention-3 made no schedule: {failure}")
        return
    measure("fa3 scheduled", scheduler_metadata=schedule)


def measure_decode(report: Report, batch: Batch, config: DecodeConfig) -> float:
    case, metadata = batch.case, batch.metadata
    workspace = DecodeWorkspace(case.num_q_heads, case.num_kv_heads, _HEAD_DIM, batch.q.device, config)
    out = torch.empty_like(batch.q)

    def run(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        keys = (k_cache, v_cache, metadata.seq_lens, metadata.block_tables)
        attend_decode(batch.q, *keys, _HEAD_DIM**-0.5, workspace, out)
        return out

    try:
        plan_decode(metadata.seq_lens, workspace)
    except Exception as failure:
        print(f"no plan: {failure}")
        return float("inf")
    return report.measure(batch, "triton", run, config)


def measure_plan(report: Report, batch: Batch, config: DecodeConfig) -> None:
    workspace = DecodeWorkspace(batch.case.num_q_heads, batch.case.num_kv_heads, _HEAD_DIM, batch.q.device, config)

    def run(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        plan_decode(batch.metadata.seq_lens, workspace)
        return workspace.plan

    report.measure(batch, "triton, planning", run, config, checked=False)


def measure_prefill(report: Report, batch: Batch, backend: TritonAttention, config: PrefillConfig) -> None:
    def run(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return backend.forward(batch.q, k_cache, v_cache, batch.metadata, _HEAD_DIM**-0.5)

    report.measure(batch, "triton", run, config)


def variants(config: DecodeConfig) -> list[DecodeConfig]:
    """What needs no new kernel, or only one: how finely work is cut."""
    return [
        *(replace(config, programs_per_sm=count) for count in range(1, 5) if count != config.programs_per_sm),
        *(replace(config, min_units=units) for units in (1, 2, 8, 16)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--seconds", type=float, default=400, help="start nothing new after this time")
    options = parser.parse_args()
    report = Report(options.out, options.seconds)

    print("case                               kernel           config: tile,warps,stages,programs,min units,in place")
    batch = Batch(SWEPT)
    measure_flash(report, batch)
    times = {config: measure_decode(report, batch, config) for config in DECODE_SWEEP}
    best = sorted(times, key=lambda config: times[config])[:3]
    measure_plan(report, batch, best[0])
    for config in variants(best[0]):
        measure_decode(report, batch, config)
    for case in DECODE_CASES:
        batch = Batch(case)
        measure_flash(report, batch)
        for config in [*best, *variants(best[0])]:
            measure_decode(report, batch, config)
    for case in PREFILL_CASES:
        batch = Batch(case)
        measure_flash(report, batch)
        for prefill in PREFILL_SWEEP:
            measure_prefill(report, batch, TritonAttention(best[0], prefill), prefill)


if __name__ == "__main__":
    main()
