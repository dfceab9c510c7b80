"""What several engines do together: rows per second of one and of two, and what prefix affinity saves.

    python benchmarks/replicas.py --model qwen3-0.6b --load-format dummy --replicas 1
    python benchmarks/replicas.py --model qwen3-0.6b --load-format dummy --replicas 2
    python benchmarks/replicas.py --affinity        the tiny model on CPUs: cached share with and without affinity

Rows per second are of the batch path as it is, from the first row's reading to the last commit, without the start-up:
all replicas are ready before the first row is read. The rows are those of `raytp bench --workload throughput`, prompts
and outputs of 100 to 1,024 tokens, 512 for each replica. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import raytp
from raytp.bench.workloads import make_cases
from raytp.replicas import pool
from raytp.replicas.homes import Homes

TINY = Path(__file__).parents[1] / "tests" / "models" / "tiny-qwen3-trivia"
SHAPES = Path(raytp.__file__).parent / "bench" / "shapes"
ROWS_PER_REPLICA = 512
NUM_GROUPS, NUM_ROWS_EACH, SHARED_TOKENS, OWN_TOKENS = 24, 16, 320, 32


@contextmanager
def all_ready_first(num_replicas: int) -> Iterator[None]:
    """A job begins when all replicas are ready, not with the first one."""
    enter = pool.ReplicaPool.__enter__

    def wait(self: pool.ReplicaPool) -> pool.ReplicaPool:
        enter(self)
        while sum(replica.takes_rows for replica in self.replicas) < num_replicas:
            self._take_events(0.1)
        return self

    with patch.object(pool.ReplicaPool, "__enter__", wait):
        yield


def run(rows: list[dict[str, Any]], num_replicas: int, **settings: Any) -> dict[str, Any]:
    """A whole job; its numbers."""
    with tempfile.TemporaryDirectory() as folder, all_ready_first(num_replicas):
        source = Path(folder) / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        start = time.monotonic()
        done = raytp.batch(source, Path(folder) / "out.jsonl", replicas=num_replicas, chat=False, **settings)
        wall_s = time.monotonic() - start
    assert (done.status, done.num_succeeded) == ("complete", len(rows)), done
    return {
        "replicas": num_replicas,
        "rows": len(rows),
        "seconds": round(done.seconds, 2),
        "rows_per_s": round(len(rows) / done.seconds, 2),
        "output_tokens_per_s": round(done.output_tokens_per_s),
        "cached_share": round(done.num_cached_tokens / done.num_prompt_tokens, 4),
        "seconds_with_start_up": round(wall_s, 1),
    }


def throughput(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows per second."""
    shape = SHAPES / arguments.model
    num_rows = arguments.rows or ROWS_PER_REPLICA * arguments.replicas
    most = arguments.max_model_len // 2
    [case] = make_cases("throughput", num_rows, arguments.vocab_size)
    rows = [
        {"prompt": prompt[:most], "max_tokens": min(length, most), "ignore_eos": True, "temperature": 0}
        for prompt, length in zip(case.prompts, case.output_lens, strict=True)
    ]
    settings: dict[str, Any] = {"load_format": arguments.load_format, "max_model_len": arguments.max_model_len}
    settings["device"] = arguments.device
    settings |= {"model": shape if shape.is_dir() else arguments.model}
    return run(rows, arguments.replicas, tensor_parallel_size=arguments.tensor_parallel_size, **settings)


def affinity() -> Iterator[dict[str, Any]]:
    """Two replicas on CPUs whose caches hold half of the groups' prefixes, with affinity and without."""
    rng = random.Random(0)
    shared = [[rng.randint(5, 2000) for _ in range(SHARED_TOKENS)] for _ in range(NUM_GROUPS)]
    rows = [
        {"prompt": prefix + [rng.randint(5, 2000) for _ in range(OWN_TOKENS)], "max_tokens": 4, "ignore_eos": True}
        for prefix in shared * NUM_ROWS_EACH
    ]
    rng.shuffle(rows)
    num_blocks = (NUM_GROUPS // 2 + 4) * SHARED_TOKENS // 16 + 8 * (OWN_TOKENS // 16 + 1)
    for name, homes in (("affinity", Homes), ("no affinity", lambda: Homes(min_share=math.inf))):
        with patch.object(pool, "Homes", homes):
            settings = {"model": TINY, "device": "cpu", "max_num_seqs": 8, "num_kv_blocks": num_blocks}
            yield {"rows_go": name} | run(rows, 2, **settings)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--affinity", action="store_true")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=10_000)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    for result in affinity() if arguments.affinity else [throughput(arguments)]:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
