"""An engine on a cluster of real raylets, two of which are killed and one of which comes back. Prints what it answered.

A program of its own, run by `test_smaller_group`: the tests' own process has a Ray of its own already.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

HEALTH = {"period_ms": 500, "failure_threshold": 3, "timeout_ms": 1000}
"""A lost node is noticed after two seconds, not fifteen."""
os.environ |= {"RAY_AUTH_MODE": "disabled"} | {f"RAY_health_check_{name}": str(each) for name, each in HEALTH.items()}

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from raytp import LLM, SamplingParams  # noqa: E402

TRIVIA = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
GREEDY = SamplingParams(temperature=0, max_tokens=60)
QUESTIONS = [each["question"] for each in json.loads((TRIVIA / "questions.json").read_text())[:60]]
LONG = [5] * 200
"""Fits the KV cache of two ranks with 1.25 MB each, not that of one with as much."""


def answers(llm: LLM) -> list[str]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [output.text for output in llm.chat(chats, GREEDY)]


def wait_for_recovery(llm: LLM, number: int) -> None:
    deadline = time.monotonic() + 60
    while len(llm.recoveries()) < number:
        if time.monotonic() > deadline:
            sys.exit(f"no recovery {number}")
        time.sleep(0.2)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    with LLM(
        TRIVIA,
        2,
        min_tensor_parallel_size=1,
        device="cpu",
        placement_strategy="SPREAD",
        placement_timeout_s=3.0,
        cpu_kv_cache_gib=0.0012,
    ) as llm:
        told = {"whole": answers(llm)}
        loss = threading.Timer(0.2, lambda: cluster.remove_node(nodes[1], allow_graceful=False))
        loss.start()
        told["lost"] = answers(llm)
        loss.join()
        wait_for_recovery(llm, 1)
        told["outgrown"] = [output.error for output in llm.generate([LONG, [5]], GREEDY)]
        cluster.add_node(num_cpus=1)
        wait_for_recovery(llm, 2)
        told["grown"] = answers(llm)
        told["fits"] = [llm.generate([LONG], GREEDY)[0].error]
        recoveries = [(recovery.num_ranks, recovery.report) for recovery in llm.recoveries()]
        print(json.dumps({"told": told, "recoveries": recoveries}))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
