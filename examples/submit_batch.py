"""Run a batch job on a cluster: ray submit cluster.yaml examples/submit_batch.py -- INPUT OUTPUT --model MODEL

`ray submit` copies this one file to the head node and runs it there. So INPUT and OUTPUT are URLs, or paths on a disk
of the head node. Ended in any way, the same command again does the rows that are left.
"""

import argparse
import os
import sys

import raytp


def parse_arguments() -> argparse.Namespace:
    """The arguments after `--`."""
    parser = argparse.ArgumentParser(description="Answer every row of files on the cluster.")
    parser.add_argument("input", metavar="INPUT", help="file, glob or folder, or an fsspec URL of one")
    parser.add_argument("output", metavar="OUTPUT", help=".jsonl or .parquet file, or a folder; may be a URL")
    parser.add_argument("--model", help="Hugging Face folder that every node sees, or a hub name")
    parser.add_argument("--tensor-parallel-size", "-t", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--device", default="cuda", help="cuda waits for GPU nodes; cpu is for a try")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int)
    return parser.parse_args()


def main() -> int:
    """Exit status 0 if every row succeeded, 3 if some failed; their records say why."""
    args = parse_arguments()
    os.environ.setdefault("RAY_ADDRESS", "auto")  # the cluster of this node; without it, raytp starts a Ray of its own
    summary = raytp.batch(
        args.input,
        args.output,
        model=args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        sampling_params=raytp.SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens),
        device=args.device,
        placement_timeout_s=1800,  # a GPU node that is launched for this job takes minutes to come up
    )
    print(summary.as_text())
    return 3 if summary.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
