"""What reading a shared prefix once gives a batch, on one GPU: the same requests with it and without, without Ray.

    PYTHONPATH=. python benchmarks/shared_prefix.py qwen3-0.6b --out shared_prefix.json

1,024 prompts that begin with the same tokens and go on with 100 of their own, 32 to 256 tokens out, 256 at a time: as
some end others begin, so most steps hold prompts beside decoding rows. On random weights, with the engine's own
scheduler and model runner in one process. "Apart" is the same engine that takes no notice of what is shared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))

from profile_steps import Pipeline, make_pipeline

_NUM_PROMPTS, _NUM_OWN = 1024, 100
_NEVER = sys.maxsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--num-shared", type=int, nargs="+", default=[0, 256, 512, 2000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    options = parser.parse_args()
    pipeline = make_pipeline(options.shape)
    shared_blocks = pipeline.runner._shared_blocks
    least = shared_blocks._min_spared_keys
    results = []
    run(pipeline, 0)
    for num_shared in options.num_shared:
        seconds: dict[str, list[float]] = {"apart": [], "together": []}
        for _ in range(options.runs):
            for way, min_spared_keys in (("apart", _NEVER), ("together", least)):
                shared_blocks._min_spared_keys = min_spared_keys
                seconds[way].append(run(pipeline, num_shared))
        results.append({"num_shared": num_shared, **seconds})
        apart, together = (statistics.median(times) for times in seconds.values())
        print(f"{num_shared} shared: {apart:.2f} s apart, {together:.2f} s together", flush=True)
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    options.out.write_text(json.dumps({"shape": options.shape, **environment, "seconds": results}, indent=1) + "\n")


def run(pipeline: Pipeline, num_shared: int) -> float:
    """Seconds for all requests. Each run has a prefix of its own, and finds nothing cached."""
    draw = random.Random(pipeline.num_steps)
    prefix = [draw.randint(0, 10000) for _ in range(num_shared)]
    prompts = [prefix + [draw.randint(0, 10000) for _ in range(_NUM_OWN)] for _ in range(_NUM_PROMPTS)]
    draw_length = random.Random(0)
    lengths = [draw_length.randint(32, 256) for _ in range(_NUM_PROMPTS)]
    torch.cuda.synchronize()
    start = time.monotonic()
    pipeline.add(prompts, lengths, 0.6)
    pipeline.drain()
    torch.cuda.synchronize()
    return time.monotonic() - start


if __name__ == "__main__":
    main()
