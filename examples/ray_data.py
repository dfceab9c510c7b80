"""Rows through Ray Data: Parquet in, Parquet out, and as many engines as there is work and room for, up to four.

pip install "raytp[data]"
python examples/ray_data.py questions.parquet answers/ --model ./my-model

The input has a column `prompt` or `messages`; the output has that, and `text`, `error_code` and others beside it.
"""

from __future__ import annotations

import argparse

import ray

from raytp import SamplingParams
from raytp.data import Predictor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--model")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-engines", type=int, default=4)
    arguments = parser.parse_args()
    engine = {
        "model": arguments.model,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "sampling_params": SamplingParams(temperature=0, max_tokens=128),
    }
    answers = ray.data.read_parquet(arguments.input).map_batches(
        Predictor,
        fn_constructor_kwargs=engine,
        batch_format="pyarrow",
        batch_size=1024,  # an engine works on one batch at a time: much more than it runs at once
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=arguments.max_engines),
        num_cpus=0,  # the ranks take what they need by themselves
    )
    answers.write_parquet(arguments.output)


if __name__ == "__main__":
    main()
