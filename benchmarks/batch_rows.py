"""What the machinery of `raytp batch` costs by itself: rows per second, and peak memory by number of rows.

    python benchmarks/batch_rows.py                  10,000 and 1,000,000 rows, each in a process of its own
    python benchmarks/batch_rows.py 50000            so many
    python benchmarks/batch_rows.py --ordered ...    in the order of the input

The engine is a stub that answers at once, in an order of its own; all else is as in a real job: each row has an id and
is parsed, answered, written and committed, and the parts are joined.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PROGRAM = """
import json, resource, sys, time
import fsspec, pyarrow.parquet
from tests.batch.stub_job import run_stub
start = time.monotonic()
summary = run_stub(sys.argv[1], sys.argv[2], remembers=False, max_part_rows=5000, ordered=sys.argv[3] == "ordered")
seconds = time.monotonic() - start
peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"num_rows": summary.num_rows, "seconds": seconds, "peak_mib": peak_kib / 1024}))
"""


def measure(num_rows: int, is_ordered: bool = False) -> dict[str, float]:
    """Seconds and peak memory of a job of so many rows."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "requests.jsonl"
        with open(source, "w") as opened:
            for number in range(num_rows):
                body = {"model": "stub", "messages": [{"role": "user", "content": f"question {number}"}]}
                request = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions"}
                opened.write(json.dumps(request | {"body": body}) + "\n")
        order = "ordered" if is_ordered else "completion"
        command = [sys.executable, "-c", _PROGRAM, str(source), str(Path(folder) / "answers.jsonl"), order]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        measured: dict[str, float] = json.loads(done.stdout)
        return measured


def main(arguments: list[str]) -> None:
    """Measure and print."""
    is_ordered = "--ordered" in arguments
    for num_rows in [int(each) for each in arguments if each != "--ordered"] or [10_000, 1_000_000]:
        start = time.monotonic()
        found = measure(num_rows, is_ordered)
        rate = found["num_rows"] / found["seconds"]
        print(f"{num_rows:>9,} rows: {rate:,.0f} rows/s, peak {found['peak_mib']:.1f} MiB", end="")
        print(f" ({time.monotonic() - start:.0f} s with start-up and input)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
