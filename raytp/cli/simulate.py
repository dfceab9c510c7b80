"""`raytp simulate`: its arguments, help and output. Registered by `raytp.cli`; hands over to `raytp.simulator`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raytp.cli import console
from raytp.cli import options as opt

if TYPE_CHECKING:
    from raytp.simulator.capacity import Target
    from raytp.simulator.cluster import ClusterConfig
    from raytp.simulator.fleet import ReplicaConfig
    from raytp.simulator.requests import SimulatedRequest
    from raytp.simulator.results import Results

SIMULATE_EXAMPLES = """[bold]Examples[/bold]

raytp simulate --model qwen3-8b --gpu h200 --trace trace.jsonl --replicas 4

raytp simulate -m qwen3-8b -t 2 --rate 50 --num-requests 5000 --ttft 0.5

raytp simulate -m qwen3-0.6b --num-requests 100000 --policy deadline:600 --replicas 0:64 --startup 60 --price 3.5"""

_WORK, _CLUSTER, _GOAL = "Requests", "Cluster", "Question"
_Model = Annotated[str, typer.Option("--model", "-m", help="qwen3-0.6b, qwen3-8b, or a model's folder or hub name.")]
_Gpu = Annotated[str, typer.Option(help="A kind of GPU that was measured: h200; or cpu, roughly.")]
_Bench = Annotated[
    list[Path] | None,
    typer.Option(help="Records of raytp bench -w all --json to fit the GPU's speed to, instead of the built-in."),
]
_Trace = Annotated[
    Path | None,
    typer.Option(help="JSON lines of arrival_s, prompt_tokens, output_tokens.", dir_okay=False, rich_help_panel=_WORK),
]
_Rate = Annotated[
    float | None,
    typer.Option(help="Requests a second that arrive at random. Default: all at once.", rich_help_panel=_WORK),
]
_NumRequests = Annotated[
    int, typer.Option(help="How many requests there are, without a trace.", min=1, max=10**7, rich_help_panel=_WORK)
]
_PromptTokens = Annotated[
    int, typer.Option(help="Tokens of a prompt on average, without a trace.", min=1, rich_help_panel=_WORK)
]
_OutputTokens = Annotated[
    int, typer.Option(help="Tokens of an answer on average, without a trace.", min=1, rich_help_panel=_WORK)
]
_SimulationSeed = Annotated[int, typer.Option(help="Same seed, same requests.", rich_help_panel=_WORK)]
_Replicas = Annotated[
    str, typer.Option(help="How many replicas: COUNT, or MIN:MAX for a policy.", rich_help_panel=_CLUSTER)
]
_Policy = Annotated[
    str,
    typer.Option(
        help="What decides on their number: fixed, queue:SECONDS, deadline:SECONDS or MODULE:FUNCTION.",
        rich_help_panel=_CLUSTER,
    ),
]
_Startup = Annotated[
    float, typer.Option(help="Seconds that a replica takes to start.", min=0, rich_help_panel=_CLUSTER)
]
_Provisioning = Annotated[
    float, typer.Option(help="Seconds that a new node takes to come.", min=0, rich_help_panel=_CLUSTER)
]
_GpusPerNode = Annotated[
    int | None, typer.Option(help="GPUs of a node. Default: those of a replica.", min=1, rich_help_panel=_CLUSTER)
]
_LoseNode = Annotated[
    list[float] | None,
    typer.Option(
        metavar="AT_S",
        help="Lose a node so many seconds after the beginning: the first that has come; given again, the next.",
        min=0,
        rich_help_panel=_CLUSTER,
    ),
]
_MAX_REPLICAS = 10_000
_OPTIONS_OF_A_CLUSTER = ("replicas", "policy", "startup", "provisioning", "gpus_per_node", "lose_node")
_Price = Annotated[
    float | None, typer.Option(help="Price of a GPU for an hour.", min=0, max=1e9, rich_help_panel=_CLUSTER)
]
_Ttft = Annotated[
    float | None,
    typer.Option(help="Find the replicas for which 99% have their first token after so many s.", rich_help_panel=_GOAL),
]
_PerToken = Annotated[
    float | None,
    typer.Option(help="Find the replicas for which 99% take at most so many s a token.", rich_help_panel=_GOAL),
]
_FinishIn = Annotated[
    float | None, typer.Option(help="Find the replicas that are done in so many s.", rich_help_panel=_GOAL)
]
_MaxReplicas = Annotated[int, typer.Option(help="Where the search ends.", min=1, rich_help_panel=_GOAL)]


def simulate(
    context: typer.Context,
    model: _Model = "qwen3-8b",
    gpu: _Gpu = "h200",
    tensor_parallel_size: opt.TensorParallelSize = 1,
    bench: _Bench = None,
    trace: _Trace = None,
    rate: _Rate = None,
    num_requests: _NumRequests = 1000,
    prompt_tokens: _PromptTokens = 512,
    output_tokens: _OutputTokens = 256,
    seed: _SimulationSeed = 0,
    replicas: _Replicas = "1",
    policy: _Policy = "fixed",
    startup: _Startup = 0.0,
    provisioning: _Provisioning = 0.0,
    gpus_per_node: _GpusPerNode = None,
    lose_node: _LoseNode = None,
    price: _Price = None,
    ttft: _Ttft = None,
    per_token: _PerToken = None,
    finish_in: _FinishIn = None,
    max_replicas: _MaxReplicas = 1024,
    json: opt.Json = False,
) -> None:
    """Predict throughput, latency and cost without a GPU, or the replicas that a target needs.

    The real scheduler runs; only the GPU's time is simulated, by a model fitted to raytp bench.
    """
    from raytp.scaling.limits import read_limits
    from raytp.simulator.capacity import Target
    from raytp.simulator.setup import load_replica, make_cluster, make_requests

    requests = make_requests(trace, rate, num_requests, prompt_tokens, output_tokens, seed)
    target = Target(ttft_s=ttft, per_token_s=per_token, finish_s=finish_in)
    if target.is_given:
        _refuse_options_of_a_cluster(context)
    replica = load_replica(model, gpu, bench or [], tensor_parallel_size, requests, startup)
    limits = read_limits(replicas, "--replicas", _MAX_REPLICAS)
    cluster = make_cluster(replica, limits, policy, provisioning, gpus_per_node, lose_node or [])
    count, results = _answer(cluster, requests, target, max_replicas)
    summary = {"replicas": count, "tensor_parallel_size": tensor_parallel_size, **results.summary(price)}
    if json:
        console.write(json_format.dumps({**summary, "series": results.series()}) + "\n")
    else:
        _print(summary)
    if refusal := results.refusal():
        console.print_note(refusal)


def _refuse_options_of_a_cluster(context: typer.Context) -> None:
    """A target asks for a steady number of replicas, all of them there from the beginning."""
    from raytp.errors import ConfigError

    for name in _OPTIONS_OF_A_CLUSTER:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with --ttft, --per-token or --finish-in, which ask for a "
                f"steady number of replicas: leave out the one or the other"
            )


def _answer(
    cluster: ClusterConfig, requests: list[SimulatedRequest], target: Target, max_replicas: int
) -> tuple[int | None, Results]:
    """The number of replicas that was looked for, or the given one if it is fixed; and the run."""
    from raytp.progress import ProgressBar
    from raytp.simulator.capacity import least_replicas
    from raytp.simulator.cluster import simulate as run

    with ProgressBar("simulating", None, names_stages=True) as bar:
        if target.is_given:
            replica: ReplicaConfig = cluster.replica

            def show(count: int, share: float) -> None:
                bar.update(f"trying {count:,} replica{'' if count == 1 else 's'}", share)

            return least_replicas(replica, requests, target, max_replicas, show)
        results = run(cluster, requests, lambda share: bar.update("simulating", share))
        is_fixed = cluster.min_replicas == cluster.max_replicas
        return (cluster.max_replicas if is_fixed else None), results


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    numbers = Table(box=None, pad_edge=False, show_header=False)
    numbers.add_column()
    numbers.add_column(justify="right")
    if summary["replicas"] is not None:
        numbers.add_row("replicas", f"{summary['replicas']:,}")
    numbers.add_row("most replicas ready", f"{summary['peak_replicas']:,}")
    numbers.add_row("requests", f"{summary['num_requests']:,}")
    if summary["num_failed"]:
        numbers.add_row("requests refused", f"{summary['num_failed']:,}")
    numbers.add_row("seconds", f"{summary['seconds']:,.1f}")
    numbers.add_row("output tokens/s", f"{summary['output_tokens_per_s']:,.0f}")
    numbers.add_row("GPU-seconds, paid", f"{summary['gpu_seconds']:,.0f}")
    numbers.add_row("GPU-seconds, wasted", f"{summary['wasted_gpu_seconds']:,.0f}")
    if summary["cost"] is not None:
        numbers.add_row("cost", f"{summary['cost']:,.2f}")
    latencies = Table("seconds", box=None, pad_edge=False, header_style="dim")
    for name in ("p50", "p90", "p99"):
        latencies.add_column(name, justify="right")
    for label, key in (("to the first token", "ttft"), ("a token", "per_token"), ("end to end", "end_to_end")):
        values = summary["latency_s"][key]
        latencies.add_row(label, *(f"{values[name]:.3f}" if values else "-" for name in ("p50", "p90", "p99")))
    output = Console(highlight=False)
    output.print(numbers)
    output.print(latencies)
