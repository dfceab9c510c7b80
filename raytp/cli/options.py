"""The options that commands share, each defined once. Used by them all.

An option that is not given is None, so that the engine's own defaults stand in one place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scheduler.errors import ConfigError, RequestError
from scheduler.sampling_params import SamplingParams, validate

_INPUT, _SAMPLING, _MODEL, _OUTPUT = "Input", "Sampling", "Model and engine", "Output"

Version = Annotated[bool, typer.Option("--version", help="Show the version.")]

Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The prompt; - or nothing reads standard input.", show_default=False),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file", "-f", help="A text file that is one prompt.", exists=True, dir_okay=False, rich_help_panel=_INPUT
    ),
]
Lines = Annotated[
    bool,
    typer.Option(
        "--lines", help="Each line of the input is a prompt; empty lines are left out.", rich_help_panel=_INPUT
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Ask through the model's chat template, or let it continue the bare prompt. Default: the template, if the "
        "model has one.",
        rich_help_panel=_INPUT,
    ),
]
System = Annotated[
    str | None, typer.Option(help="What the model is told ahead of the conversation.", rich_help_panel=_INPUT)
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.", rich_help_panel=_OUTPUT)]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress and no numbers on standard error.", rich_help_panel=_OUTPUT)
]

MaxTokens = Annotated[
    int | None,
    typer.Option(help="Most tokens of an answer. Default: the model's, else 256.", rich_help_panel=_SAMPLING),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 takes the likeliest token. Default: the model's, else 0.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int | None, typer.Option(help="Draw from the k likeliest tokens; 0 from all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Draw from the likeliest tokens that together reach this probability.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Drop tokens less likely than this share of the likeliest.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="<text>", help="Text that ends an answer; may be given several times.", rich_help_panel=_SAMPLING
    ),
]

_MODEL_HELP = (
    "A Hugging Face folder, a .gguf file, or a hub name such as Qwen/Qwen3-0.6B. Default: the small embedded model."
)
Model = Annotated[str | None, typer.Option("--model", "-m", help=_MODEL_HELP, rich_help_panel=_MODEL)]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size", "-t", help="Ranks, one GPU each, that share the model.", rich_help_panel=_MODEL
    ),
]
MinTensorParallelSize = Annotated[
    int | None,
    typer.Option(
        help="Go on with as few ranks as that if nodes are lost and no others come. Default: wait for all ranks.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cuda or cpu. Default: cuda, if there is a GPU.", rich_help_panel=_MODEL)
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16, of weights and KV cache. Default: the model's on a GPU, float32 on a CPU.",
        rich_help_panel=_MODEL,
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="<name>",
        help="An engine that serve-engine has started, instead of one of the command's own.",
        rich_help_panel=_MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of a prompt and its answer together. Default: the model's limit, if the KV cache holds it.",
        rich_help_panel=_MODEL,
    ),
]
MemoryFraction = Annotated[
    float | None, typer.Option(help="Share of each GPU's memory to use. Default: 0.9.", rich_help_panel=_MODEL)
]
Memory = Annotated[
    float | None,
    typer.Option(
        metavar="<GiB>", help="Show how many tokens of KV cache fit in so much memory a rank.", rich_help_panel=_MODEL
    ),
]


def sampling_params(
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    """What the options of the group "Sampling" ask for. Raises ConfigError for a value out of its range."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
    )
    try:
        validate(sampling)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    return sampling
