"""The simulator against Ray's own autoscaler: the same experiments on fake nodes and simulated, and when they finish.

    python benchmarks/autoscaling.py --out benchmarks/results/2026-11-30-autoscaling.json

CPU engines of a tiny model, whose steps are made 100 ms longer so that three of them share two cores. The simulator is
told how long nodes and replicas took to come in the very run that it is compared with, and nothing else of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from raytp.experiment.fake_cluster import fake_cluster
from raytp.experiment.reading import read_experiment
from raytp.experiment.real import RealRun
from raytp.experiment.simulated import run_simulated
from raytp.experiment.spec import Run
from raytp.experiment.workloads import make_requests
from raytp.replicas.replica import Replica
from raytp.simulator.results import Results

FILE = Path(__file__).parents[1] / "tests" / "replicas" / "fake_nodes.yaml"
SLOW = {"slow_steps": {"seconds": 0.1}}
BATCH = {"num_requests": 300, "prompt_tokens": 40, "output_tokens": 24}
CASES: dict[str, Mapping[str, Any]] = {
    "batch": {"workload": BATCH},
    "batch, a node lost": {"workload": BATCH, "failures": [SLOW, {"lose_node": {"at_s": 25.0, "node": 0}}]},
    "arrivals, queue:20": {
        "workload": BATCH | {"rate": 4.0},
        "policies": ["queue:20"],
        "cluster.idle_timeout_s": 10,
    },
}


class StartUps:
    """How long replicas waited for a node, and how long they took from then on."""

    def __init__(self) -> None:
        self._replicas: dict[int, Replica] = {}
        self._ready_s: dict[int, float] = {}

    def look(self, replicas: list[Replica]) -> None:
        """Called a few times a second."""
        for replica in replicas:
            self._replicas[replica.number] = replica
            if replica.takes_rows:
                self._ready_s.setdefault(replica.number, time.monotonic())

    def means(self) -> tuple[float, float]:
        """(seconds until there was room, seconds from then until it took rows)"""
        ready = [(self._replicas[number], ready_s) for number, ready_s in self._ready_s.items()]
        waits = [replica.placed_s - replica.began_s for replica, _ in ready if replica.placed_s is not None]
        starts = [ready_s - replica.placed_s for replica, ready_s in ready if replica.placed_s is not None]
        return statistics.mean(waits), statistics.mean(starts)


def run_real(run: Run) -> tuple[Results, tuple[float, float]]:
    """What came of it, and the start-ups' mean times."""
    seen = StartUps()
    with fake_cluster(run.spec.cluster) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            job = RealRun(run, lambda share, text: seen.look(job.pool.replicas))
            return job.go(), seen.means()
        finally:
            ray.shutdown()


def compare(name: str, instead: Mapping[str, Any]) -> dict[str, Any]:
    """One case, on fake nodes and simulated."""
    spec, _ = read_experiment(FILE, instead)
    run = Run(spec=spec, policy=spec.policies[0], seed=0, requests=make_requests(spec.workload, 0))
    load_before = os.getloadavg()[0]
    real, (provisioning_s, startup_s) = run_real(run)
    cluster = replace(spec.cluster, provisioning_s=provisioning_s, startup_s=startup_s)
    simulated = run_simulated(replace(run, spec=replace(spec, cluster=cluster)), lambda *_: None)
    return {
        "case": name,
        "policy": run.policy,
        "provisioning_s": round(provisioning_s, 2),
        "startup_s": round(startup_s, 2),
        "real_s": round(real.seconds, 2),
        "simulated_s": round(simulated.seconds, 2),
        "error": round(simulated.seconds / real.seconds - 1, 4),
        "real": _numbers(real),
        "simulated": _numbers(simulated),
        "nodes": [[round(tick.now_s, 1), tick.nodes, tick.ready] for tick in real.ticks],
        "simulated_nodes": [[round(tick.now_s, 1), tick.nodes, tick.ready] for tick in simulated.ticks],
        "load_before": round(load_before, 1),
        "num_cores": os.cpu_count(),
        "ray": ray.__version__,
    }


def _numbers(results: Results) -> dict[str, Any]:
    assert all(one.error is None for one in results.requests)
    return {
        "output_tokens_per_s": round(results.output_tokens_per_s, 1),
        "latency_s": results.latencies(),
        "gpu_seconds": round(results.gpu_seconds, 1),
        "busy_gpu_seconds": round(results.busy_gpu_seconds, 1),
        "num_steps": results.num_steps,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = []
    for name in arguments.case or CASES:
        found.append(compare(name, CASES[name]))
        print(json.dumps({key: each for key, each in found[-1].items() if "nodes" not in key}), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
