"""What one rank's share of a model asks of its GPU: bytes, operations, layers. Read by `raytp.simulator.step_time`."""

from __future__ import annotations

from dataclasses import dataclass

from workers.model_config import ModelConfig, kv_bytes_per_token, num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSizes:
    """One of R ranks. Every count is of one rank."""

    num_ranks: int
    num_layers: int
    weight_bytes: float
    """Read by each step; of the input embedding only few rows are."""
    resident_bytes: float
    """Of all weights, in the GPU's memory."""
    kv_bytes_per_token: int
    flop_per_token: float
    """In the layers' matrices."""
    flop_per_sample: float
    """In the head's."""
    flop_per_pair: float
    """Of attention, for each query and each key that it sees."""
    reduced_bytes_per_token: float
    """Summed over ranks in a step, for each token; 0 for one rank."""


def shard_sizes(model: ModelConfig, num_ranks: int, dtype_bytes: int = 2) -> ShardSizes:
    """The sizes of an even share; kv heads are replicated where there are fewer than ranks.

    `dtype_bytes`: of a weight and of a cached value; 2 is bfloat16.
    """
    embedding = model.vocab_size * model.hidden_size
    layers = num_parameters(model) - embedding * (1 if model.tie_word_embeddings else 2)
    num_kv_heads = -(-model.num_key_value_heads // num_ranks)
    num_layers = model.num_hidden_layers
    return ShardSizes(
        num_ranks=num_ranks,
        num_layers=num_layers,
        weight_bytes=(layers + embedding) * dtype_bytes / num_ranks,
        resident_bytes=num_parameters(model) * dtype_bytes / num_ranks,
        kv_bytes_per_token=kv_bytes_per_token(model, num_kv_heads, dtype_bytes),
        flop_per_token=2 * layers / num_ranks,
        flop_per_sample=2 * embedding / num_ranks,
        flop_per_pair=4 * num_layers * model.num_attention_heads * model.head_dim / num_ranks,
        reduced_bytes_per_token=2 * num_layers * model.hidden_size * dtype_bytes if num_ranks > 1 else 0,
    )


def num_kv_blocks(sizes: ShardSizes, memory_bytes: float, block_size: int) -> int:
    """Blocks that fit beside the weights into `memory_bytes` of a GPU; 0 if the weights do not fit."""
    free = memory_bytes - sizes.resident_bytes
    return max(0, int(free // (sizes.kv_bytes_per_token * block_size)))
