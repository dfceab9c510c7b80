"""`raytp bench`: its arguments and help. Registered by `raytp.cli`; hands over to `raytp.bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raytp.cli import console
from raytp.cli import options as opt

BENCH_EXAMPLES = """[bold]Examples[/bold]

raytp bench

raytp bench qwen3-8b --tensor-parallel-size 2 --workload all --profile --json results.json

raytp bench ./my-model --workload latency --num-prompts 8 --device cpu"""

_MEASUREMENT, _MODEL = "Measurement", "Model and engine"
_ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="qwen3-0.6b or qwen3-8b, with random weights; or a Hugging Face folder, a .gguf file or a hub name.",
    ),
]
_Workload = Annotated[
    str,
    typer.Option(
        "--workload", "-w", help="throughput, latency, shared-prefix, prefill or all.", rich_help_panel=_MEASUREMENT
    ),
]
_Runs = Annotated[int, typer.Option(help="Runs, of which the median counts.", min=1, rich_help_panel=_MEASUREMENT)]
_NumPrompts = Annotated[
    int | None,
    typer.Option(
        help="Make the workload smaller: so many prompts, or for latency the largest batch.",
        min=1,
        rich_help_panel=_MEASUREMENT,
    ),
]
_Profile = Annotated[
    bool, typer.Option("--profile", help="Find out how idle the GPU is in steady decode.", rich_help_panel=_MEASUREMENT)
]
_JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Add the results to this file, a list of records.", dir_okay=False, rich_help_panel=_MEASUREMENT
    ),
]
_MaxNumSeqs = Annotated[int | None, typer.Option(help="Most sequences that run at once.", rich_help_panel=_MODEL)]
_MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Most tokens in a step.", rich_help_panel=_MODEL)]
_BlockSize = Annotated[int | None, typer.Option(help="Tokens in a KV-cache block.", rich_help_panel=_MODEL)]
_AttentionBackend = Annotated[
    str | None, typer.Option(help="Default: the fastest that is installed.", rich_help_panel=_MODEL)
]
_EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.", rich_help_panel=_MODEL)]


def bench(
    model: _ModelArgument = "qwen3-0.6b",
    workload: _Workload = "throughput",
    runs: _Runs = 3,
    num_prompts: _NumPrompts = None,
    profile: _Profile = False,
    json: _JsonFile = None,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    max_model_len: opt.MaxModelLen = None,
    memory_fraction: opt.MemoryFraction = None,
    max_num_seqs: _MaxNumSeqs = None,
    max_num_batched_tokens: _MaxNumBatchedTokens = None,
    block_size: _BlockSize = None,
    attention_backend: _AttentionBackend = None,
    enforce_eager: _EnforceEager = False,
) -> None:
    """Measure speed, and compare it with the least time that the hardware needs.

    throughput: nano-vLLM's benchmark, 256 prompts of 100 to 1,024 tokens, and as many out.
    latency: 128 tokens in and 129 out, at batch 1, 8, 64 and 256.
    shared-prefix: 256 prompts of 2,100 tokens, 2,000 of them in common.
    prefill: 64 prompts of 2,048 tokens.

    Nothing that one run computes is reused by the next.
    """
    given = {
        "device": device,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "memory_fraction": memory_fraction,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "attention_backend": attention_backend,
        "enforce_eager": enforce_eager or None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    from raytp.bench.plan import make_plan
    from raytp.bench.run import run
    from raytp.bench.table import print_records
    from raytp.ray_runtime import silence_ray

    silence_ray()
    plan = make_plan(model, workload, num_prompts, tensor_parallel_size, options)
    print_records(run(plan, runs, use_profile=profile, file=json, report=console.print_note))
