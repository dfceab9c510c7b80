"""Two replicas wanted, and room for one: a node is added, and killed when it has rows. Prints what was answered.

A program of its own, run by `test_replicas`: the tests' own process has a Ray of its own already.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

HEALTH = {"period_ms": 500, "failure_threshold": 3, "timeout_ms": 1000}
"""A lost node is noticed after two seconds, not fifteen."""
os.environ |= {"RAY_AUTH_MODE": "disabled"} | {f"RAY_health_check_{name}": str(each) for name, each in HEALTH.items()}

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from raytp import SamplingParams  # noqa: E402
from raytp.config import EngineConfig  # noqa: E402
from raytp.replicas.pool import ReplicaPool  # noqa: E402
from raytp.replicas.starting import prepare_start  # noqa: E402
from raytp.scaling import FixedPolicy, Scaler  # noqa: E402
from tests.batch.commands import MODEL, PAIRS  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=40)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    told: dict[str, Any] = {"num_ready": [], "num_lost": 0, "texts": []}
    is_enough: list[bool] = []

    def jobs() -> Iterator[Any]:
        for i in count():
            if is_enough:
                return
            yield i, [{"role": "user", "content": PAIRS[i % len(PAIRS)][0]}], GREEDY

    def changes(pool: ReplicaPool) -> Iterator[None]:
        while len(told["texts"]) < 20:
            yield
        node = cluster.add_node(num_cpus=1)
        while sum(replica.num_done > 20 for replica in pool.replicas) < 2:
            yield
        last = max(pool.replicas, key=lambda replica: (replica.since_s, replica.number))
        cluster.remove_node(node, allow_graceful=False)
        told["num_lost"] = last.load
        while last.open or not last.recovering_since_s:
            yield
        is_enough.append(True)

    config = EngineConfig(device="cpu", max_num_seqs=8, cpu_kv_cache_gib=0.1)
    start = prepare_start(MODEL, config, num_replicas=2)
    deadline = time.monotonic() + 200
    with ReplicaPool(start, Scaler(FixedPolicy(), 1, 2), show_progress=False) as pool:
        steps = changes(pool)
        for result in pool.complete(jobs()):
            told["num_ready"].append(sum(replica.takes_rows for replica in pool.replicas))
            if result is not None:
                told["texts"].append((result[0], result[1].text))
            next(steps, None)
            if time.monotonic() > deadline:
                sys.exit(f"stuck: {[(each.state, each.stage, each.load) for each in pool.replicas]}")
    left = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    assert not left, left
    print(json.dumps(told))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
