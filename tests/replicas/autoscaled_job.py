"""`raytp experiment` on fake nodes, one of which is killed when all replicas are at work. Writes what was answered.

A program of its own, run by `test_autoscaler`: the tests' own process has a Ray of its own already.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterable
from pathlib import Path

import ray

from raytp.batch_job.rows import Job
from raytp.cli import app
from raytp.experiment.fake_cluster import kill_raylet
from raytp.outputs import RequestOutput
from raytp.replicas.pool import ReplicaPool

FILE = Path(__file__).parent / "fake_nodes.yaml"
NUM_REPLICAS = 3


def main(results: str, told: str) -> int:
    answers: list[tuple[int, list[int]]] = []
    num_rows_lost: list[int] = []
    complete = ReplicaPool.complete

    def watched(
        pool: ReplicaPool, jobs: Iterable[Job | None]
    ) -> Generator[tuple[int, RequestOutput] | None, None, None]:
        for result in complete(pool, jobs):
            if result is not None:
                answers.append((result[0], result[1].token_ids))
            if not num_rows_lost and sum(replica.num_done > 4 for replica in pool.replicas) == NUM_REPLICAS:
                nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
                assert kill_raylet(nodes[0]["RayletSocketName"])
                num_rows_lost.append(min(replica.load for replica in pool.replicas))
            yield result

    ReplicaPool.complete = watched  # type: ignore[method-assign]
    code: int = app(["experiment", str(FILE), "--output", results], standalone_mode=False) or 0
    Path(told).write_text(json.dumps({"answers": answers, "num_rows_lost": num_rows_lost}))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
