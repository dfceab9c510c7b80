"""Writes `bursts.jsonl`: a quiet stream of requests with two bursts, a fifth of them with one of three system prompts.

python examples/autoscaling/make_trace.py > examples/autoscaling/bursts.jsonl
"""

from __future__ import annotations

import json
import random

SECONDS = 300
QUIET_RATE, BURST_RATE = 1.0, 8.0
BURSTS = ((60, 90), (180, 200))
PREFIX_TOKENS = 1024


def main() -> None:
    """Print the trace, the same every time."""
    rng = random.Random(0)
    now = 0.0
    while True:
        is_burst = any(start <= now < end for start, end in BURSTS)
        now += rng.expovariate(BURST_RATE if is_burst else QUIET_RATE)
        if now >= SECONDS:
            return
        request = {
            "arrival_s": round(now, 3),
            "prompt_tokens": rng.randint(50, 900),
            "output_tokens": rng.randint(20, 400),
        }
        if rng.random() < 0.2:
            request["prompt_tokens"] += PREFIX_TOKENS
            request |= {"prefix_id": f"system-{rng.randint(1, 3)}", "prefix_tokens": PREFIX_TOKENS}
        print(json.dumps(request))


if __name__ == "__main__":
    main()
