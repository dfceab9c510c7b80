"""Where a step's time goes on one GPU: the engine's own scheduler and model runner in one process, without Ray.

    python benchmarks/profile_steps.py qwen3-0.6b --workload throughput --profile

Runs nano-vLLM's throughput workload or decodes at fixed batch sizes, on random weights, and prints the time of a step
and, with --profile, the share of each kernel and of an idle GPU. `raytp bench` measures the whole engine; this one says
what to change next.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import raytp.bench
from scheduler.config import SchedulerConfig
from scheduler.sampling_params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from workers.config import WorkerConfig
from workers.model_config import load_model_config
from workers.model_runner import ModelRunner, StepOutcome
from workers.parallel import TensorParallel


class Pipeline:
    """The scheduler and one rank, one step ahead, as `raytp.engine` runs them."""

    def __init__(self, runner: ModelRunner, limits: SchedulerConfig) -> None:
        self.runner = runner
        self.scheduler = Scheduler(limits)
        self._outcomes: collections.deque[StepOutcome] = collections.deque()
        self.num_steps = 0

    def step(self) -> None:
        step = self.scheduler.schedule()
        if step is not None:
            outcome = self.runner.execute(step)
            assert outcome is not None
            self._outcomes.append(outcome)
            self.num_steps += 1
        if self._outcomes and (step is None or len(self._outcomes) == 2):
            self.scheduler.postprocess(self._outcomes.popleft().wait())
        self.scheduler.take_updates()

    def drain(self) -> None:
        while self.scheduler.has_unfinished or self._outcomes:
            self.step()

    def add(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> None:
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            sampling = ResolvedSampling(temperature=temperature, max_tokens=length, seed=index)
            seq_id = index + 1_000_000 * self.num_steps
            self.scheduler.add(Sequence(seq_id, np.array(prompt, dtype=np.int32), sampling))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("--workload", choices=("throughput", "latency"), default="throughput")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=8192)
    options = parser.parse_args()
    pipeline = make_pipeline(
        options.shape,
        attention_backend=options.backend,
        block_size=options.block_size,
        enforce_eager=options.eager,
        max_num_batched_tokens=options.max_tokens,
    )
    results = throughput(pipeline) if options.workload == "throughput" else latency(pipeline)
    print(json.dumps(results, indent=1))
    if options.profile:
        profile(pipeline)


def make_pipeline(shape: str, **settings: Any) -> Pipeline:
    """One of `raytp bench`'s shapes on the GPU, with random weights; `settings` are of `WorkerConfig`."""
    path = Path(raytp.bench.__file__).parent / "shapes" / shape
    config = replace(
        WorkerConfig(
            model_path=str(path),
            world_size=1,
            device="cuda",
            dtype="bfloat16",
            load_format="dummy",
            attention_backend="auto",
            enforce_eager=False,
            block_size=16,
            num_kv_blocks=None,
            memory_fraction=0.9,
            cpu_kv_cache_bytes=0,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=4096,
            num_valid_tokens=None,
            num_threads=1,
            timeout_s=60,
        ),
        **settings,
    )
    start = time.monotonic()
    runner = ModelRunner(config, TensorParallel.single(), torch.device("cuda", 0))
    report = runner.load(lambda fraction: None)
    runner.allocate(report.num_kv_blocks, lambda fraction: None)
    print(f"ready after {time.monotonic() - start:.1f} s", report, flush=True)
    limits = SchedulerConfig(
        num_kv_blocks=report.num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=load_model_config(path).vocab_size,
    )
    return Pipeline(runner, limits)


def throughput(pipeline: Pipeline) -> dict[str, float]:
    """nano-vLLM's bench.py: 256 prompts of 100 to 1,024 tokens, 100 to 1,024 tokens out."""
    pipeline.add([[1, 2, 3, 4]], [16], 0.6)
    pipeline.drain()
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    pipeline.add(prompts, lengths, 0.6)
    torch.cuda.synchronize()
    start = time.monotonic()
    num_steps = pipeline.num_steps
    host = 0.0
    pipeline.drain()
    torch.cuda.synchronize()
    elapsed = time.monotonic() - start
    num_tokens = sum(lengths)
    return {
        "seconds": elapsed,
        "output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / elapsed,
        "steps": pipeline.num_steps - num_steps,
        "host": host,
    }


def latency(pipeline: Pipeline) -> dict[str, float]:
    """128 tokens in, 129 out, at four batch sizes: milliseconds a token, best of three."""
    results = {}
    for batch in (1, 8, 64, 256):
        times = []
        for _ in range(3):
            prompts = [[random.randint(0, 10000) for _ in range(128)] for _ in range(batch)]
            pipeline.add(prompts, [129] * batch, 0.6)
            torch.cuda.synchronize()
            start = time.monotonic()
            pipeline.drain()
            torch.cuda.synchronize()
            times.append((time.monotonic() - start) / 129 * 1000)
        results[f"ms_at_{batch}"] = min(times)
    return results


def profile(pipeline: Pipeline) -> None:
    """Kernel times of ten decode steps at 1, 32 and 131 sequences of about 840 tokens."""
    for batch in (1, 32, 131):
        prompts = [[random.randint(0, 10000) for _ in range(random.randint(200, 1400))] for _ in range(batch)]
        pipeline.add(prompts, [100] * batch, 0.6)
        while pipeline.scheduler.stats().num_waiting:
            pipeline.step()
        for _ in range(20):
            pipeline.step()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        start = time.monotonic()
        for _ in range(20):
            pipeline.step()
        torch.cuda.synchronize()
        plain = (time.monotonic() - start) / 20
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(10):
                pipeline.step()
            torch.cuda.synchronize()
        totals: collections.Counter[str] = collections.Counter()
        counts: collections.Counter[str] = collections.Counter()
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                totals[event.name] += event.self_device_time_total
                counts[event.name] += 1
        busy = sum(totals.values()) / 10
        print(f"batch {batch}: {plain * 1e6:.0f} us a step, kernels {busy:.0f} us")
        for name, total in totals.most_common(16):
            print(f"  {total / 10:8.1f} us {counts[name] / 10:6.1f} x {name[:100]}")
        pipeline.drain()


if __name__ == "__main__":
    main()
