"""`raytp info`: a model's sizes and how it is split over ranks, from its config.json alone. Called by `raytp.cli.main`.

Starts nothing, and imports neither Ray nor torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from raytp.cli import console
from raytp.config import EngineConfig
from raytp.model_source import resolve_model
from raytp.progress import ProgressBar
from scheduler.errors import ConfigError
from workers.model_config import ModelConfig, RopeConfig, kv_bytes_per_token, load_model_config, num_parameters
from workers.shard_plan import RankShard, Span, plan_shards

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class RankSizes:
    """What one rank holds, in bytes."""

    shard: RankShard
    weight_bytes: int
    kv_bytes_per_token: int


def run(
    model: str | None, tensor_parallel_size: int, dtype: str | None, memory_gib: float | None, *, as_json: bool
) -> None:
    """Print it as tables or as JSON. Raises RaytpError."""
    settings = EngineConfig(tensor_parallel_size=tensor_parallel_size, dtype=dtype or "auto")
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise ConfigError(f"--memory {memory_gib:g} is out of range: it must be a number of GiB above 0")
    with ProgressBar("finding the model", None) as bar:
        source = resolve_model(model, bar.update)
    config = load_model_config(source.path)
    used_dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    ranks = rank_sizes(config, tensor_parallel_size, _DTYPE_BYTES[used_dtype])
    num_tokens = None if memory_gib is None else num_fitting_tokens(ranks, int(memory_gib * _GIB))
    if as_json:
        console.write(json.dumps(_as_dict(source.name, config, used_dtype, ranks, num_tokens)) + "\n")
    else:
        _print_tables(source.name, config, used_dtype, ranks, memory_gib, num_tokens)


def rank_sizes(config: ModelConfig, world_size: int, dtype_bytes: int) -> list[RankSizes]:
    """The sizes of each rank's shard. A shard is itself a decoder, of fewer heads, MLP columns and vocabulary rows."""
    shards = plan_shards(
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        world_size=world_size,
    )
    sizes = []
    for shard in shards:
        held = dataclasses.replace(
            config,
            num_attention_heads=shard.q_heads.size,
            num_key_value_heads=shard.kv_heads.size,
            intermediate_size=shard.intermediate.size,
            vocab_size=shard.vocab.size,
        )
        kv_bytes = kv_bytes_per_token(config, shard.kv_heads.size, dtype_bytes)
        sizes.append(RankSizes(shard, num_parameters(held) * dtype_bytes, kv_bytes))
    return sizes


def num_fitting_tokens(ranks: list[RankSizes], memory_bytes: int) -> int:
    """Tokens of KV cache that fit beside the weights on every rank, if each has `memory_bytes`; at least 0."""
    return max(0, min((memory_bytes - rank.weight_bytes) // rank.kv_bytes_per_token for rank in ranks))


def _as_dict(
    name: str, config: ModelConfig, dtype: str, ranks: list[RankSizes], num_tokens: int | None
) -> dict[str, Any]:
    return {
        "model": name,
        **dataclasses.asdict(config),
        "num_parameters": num_parameters(config),
        "dtype": dtype,
        "checkpoint_dtype": config.dtype,
        "tensor_parallel_size": len(ranks),
        "ranks": [
            {
                **dataclasses.asdict(rank.shard),
                "weight_bytes": rank.weight_bytes,
                "kv_bytes_per_token": rank.kv_bytes_per_token,
            }
            for rank in ranks
        ],
        "num_kv_cache_tokens": num_tokens,
    }


def _print_tables(
    name: str,
    config: ModelConfig,
    dtype: str,
    ranks: list[RankSizes],
    memory_gib: float | None,
    num_tokens: int | None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column()
    for label, value in _facts(name, config, dtype):
        facts.add_row(label, value)
    split = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("rank", "q heads", "kv heads", "intermediate", "vocabulary rows", "weights", "KV bytes/token"):
        split.add_column(heading, justify="right")
    for rank in ranks:
        shard = rank.shard
        spans = [_span(span) for span in (shard.q_heads, shard.kv_heads, shard.intermediate, shard.vocab)]
        split.add_row(str(shard.rank), *spans, _bytes(rank.weight_bytes), f"{rank.kv_bytes_per_token:,}")
    output = Console(highlight=False)
    output.print(facts)
    output.print()
    output.print(split)
    if memory_gib is not None:
        note = "" if num_tokens else "; the weights alone leave no room"
        text = f"\nWith {memory_gib:g} GiB a rank, {num_tokens:,} tokens of KV cache fit beside the weights{note}."
        output.print(text, soft_wrap=True)


def _facts(name: str, config: ModelConfig, dtype: str) -> list[tuple[str, str]]:
    tied = "tied to the head" if config.tie_word_embeddings else "head apart"
    other = "" if dtype == config.dtype else f" (checkpoint: {config.dtype})"
    return [
        ("model", name),
        ("architecture", config.architecture),
        ("parameters", f"{num_parameters(config):,}"),
        ("dtype", dtype + other),
        ("layers", f"{config.num_hidden_layers}"),
        ("hidden size", f"{config.hidden_size:,}; intermediate {config.intermediate_size:,}"),
        ("heads", f"{config.num_attention_heads} query, {config.num_key_value_heads} kv, of size {config.head_dim}"),
        ("vocabulary", f"{config.vocab_size:,}; embedding {tied}"),
        ("context length", f"{config.max_position_embeddings:,} tokens"),
        ("rope", _rope(config.rope)),
    ]


def _rope(rope: RopeConfig) -> str:
    text = f"{rope.rope_type}, theta {rope.theta:,.0f}"
    if rope.rope_type != "default":
        text += f", factor {rope.factor:g}"
    if rope.original_max_position_embeddings:
        text += f" over {rope.original_max_position_embeddings:,} positions"
    return text


def _span(span: Span) -> str:
    return f"{span.start:,}-{span.stop - 1:,}"


def _bytes(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
