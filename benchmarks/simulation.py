"""What a simulation costs as it grows, and the coefficients that `raytp.simulator.measured` holds.

python benchmarks/simulation.py --out simulation.json      # 10, 100 and 1,000 GPUs, 100 requests each
python benchmarks/simulation.py --fit RECORDS.json ...     # coefficients, from records of raytp bench -w all
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from raytp.simulator.capacity import fixed_cluster, make_replica
from raytp.simulator.cluster import simulate
from raytp.simulator.measured import find_gpu
from raytp.simulator.requests import poisson
from raytp.simulator.setup import load_coefficients, load_model

NUM_GPUS = (10, 100, 1000)
REQUESTS_PER_GPU = 100
RATE_PER_GPU = 10.0


def measure(num_gpus: int) -> dict[str, float]:
    """Seconds of one simulation, and of each step of its schedulers."""
    requests = poisson(num_gpus * REQUESTS_PER_GPU, num_gpus * RATE_PER_GPU, 512, 256, seed=0)
    replica = make_replica(load_model("qwen3-8b"), find_gpu("h200").coefficients, 1, requests)
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    results = simulate(fixed_cluster(replica, num_gpus), requests)
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
    return {
        "num_gpus": num_gpus,
        "num_requests": len(requests),
        "num_steps": results.num_steps,
        "simulated_s": results.seconds,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "cpu_us_per_step": cpu_s / results.num_steps * 1e6,
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, nargs="+", metavar="RECORDS")
    parser.add_argument("--max-gpus", type=int, default=max(NUM_GPUS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.fit:
        print(load_coefficients("h200", arguments.fit))
        return
    results = []
    for num_gpus in NUM_GPUS:
        if num_gpus <= arguments.max_gpus:
            results.append(measure(num_gpus))
            print(json.dumps(results[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
