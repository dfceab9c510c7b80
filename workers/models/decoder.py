"""The decoder that all supported architectures share, as this rank's shard of it.

    hidden = embed(ids)
    each layer:  hidden += attention(norm(hidden));  hidden += mlp(norm(hidden))
    logits = head(norm(hidden))

Attention and MLP are each a column-parallel layer, then a row-parallel one whose sum over the ranks, taken by the next
norm, is the only communication. Modules are named as in the checkpoint. Called by the model runner; the weights come
from `workers.weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.kernels.attention import AttentionBackend
from workers.kernels.ops import LayerOps, select_ops
from workers.kv_cache import KVCache
from workers.layers.attention import AttentionMetadata
from workers.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from workers.layers.linear import GatedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from workers.layers.norm import RMSNorm
from workers.layers.parameter import CheckpointModule, CheckpointSlice, ParameterFactory
from workers.layers.reduction import Reduction
from workers.layers.rotary import RotaryEmbedding
from workers.model_config import ModelConfig
from workers.parallel import TensorParallel
from workers.shard_plan import RankShard, Span


@dataclass(frozen=True, slots=True, eq=False)
class ShardContext:
    """What every part of one rank's shard is built from."""

    config: ModelConfig
    shard: RankShard
    backend: AttentionBackend
    ops: LayerOps
    reduction: Reduction
    new_parameter: ParameterFactory

    @property
    def tp(self) -> TensorParallel:
        """The ranks."""
        return self.reduction.tp

    def new_norm(self, size: int) -> RMSNorm:
        """A norm over `size` features."""
        return RMSNorm(size, self.config.rms_norm_eps, self.new_parameter)


class SelfAttention(nn.Module):
    """(T, hidden) -> partial sums of (T, hidden), over this rank's H query and K kv heads; see `RowParallelLinear`."""

    def __init__(self, context: ShardContext) -> None:
        super().__init__()
        config, shard, ops, new_parameter = context.config, context.shard, context.ops, context.new_parameter
        hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.num_q_heads = shard.q_heads.size
        self.qkv_proj = QKVParallelLinear(
            hidden, heads, config.num_key_value_heads, head_dim, shard, config.qkv_bias, ops, new_parameter
        )
        inputs = Span(shard.q_heads.start * head_dim, shard.q_heads.size * head_dim)
        has_bias = config.attention_output_bias
        self.o_proj = RowParallelLinear(heads * head_dim, hidden, inputs, has_bias, context.tp, ops, new_parameter)
        self.qk_weights: tuple[nn.Parameter, nn.Parameter] | None = None
        if config.qk_norm:
            self.q_norm, self.k_norm = context.new_norm(head_dim), context.new_norm(head_dim)
            self.qk_weights = (self.q_norm.weight, self.k_norm.weight)
        self.eps = config.rms_norm_eps
        self.scale = head_dim**-0.5
        self.backend = context.backend
        self.ops = ops

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        kv_cache_layer: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        qkv = self.qkv_proj(x)
        slots = metadata.slot_mapping
        q = self.ops.norm_rope_store(qkv, self.num_q_heads, cos_sin, kv_cache_layer, slots, self.qk_weights, self.eps)
        return self.o_proj(self.backend.forward(q, *kv_cache_layer, metadata, self.scale).flatten(1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), over this rank's columns: (T, hidden) -> partial sums of (T, hidden), as above."""

    def __init__(self, context: ShardContext) -> None:
        super().__init__()
        config, ops, new_parameter = context.config, context.ops, context.new_parameter
        hidden, columns, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        names, span = ("gate_proj", "up_proj"), context.shard.intermediate
        self.gate_up_proj = GatedColumnParallelLinear(hidden, columns, names, span, bias, ops, new_parameter)
        self.down_proj = RowParallelLinear(columns, hidden, span, bias, context.tp, ops, new_parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(self, context: ShardContext) -> None:
        super().__init__()
        self.reduction = context.reduction
        self.input_layernorm = context.new_norm(context.config.hidden_size)
        self.self_attn = SelfAttention(context)
        self.post_attention_layernorm = context.new_norm(context.config.hidden_size)
        self.mlp = MLP(context)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: tuple[Tensor, Tensor],
        kv_cache_layer: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """The last sublayer's partial sums stay apart from the residual stream: the next norm adds them in one go."""
        x, residual = self.input_layernorm(x, residual, self.reduction)
        x = self.self_attn(x, cos_sin, kv_cache_layer, metadata)
        x, residual = self.post_attention_layernorm(x, residual, self.reduction)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Token ids to normalised hidden states."""

    def __init__(self, context: ShardContext) -> None:
        super().__init__()
        config, new_parameter = context.config, context.new_parameter
        self.reduction = context.reduction
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, context.shard.vocab, context.tp, new_parameter
        )
        self.layers = nn.ModuleList(DecoderLayer(context) for _ in range(config.num_hidden_layers))
        self.norm = context.new_norm(config.hidden_size)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, new_parameter.device)

    def forward(
        self, input_ids: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, cos_sin, kv_cache.layer(index), metadata)
        normed: Tensor = self.norm(x, residual, self.reduction)[0]
        return normed


class CausalLM(nn.Module):
    """One rank's shard of a language model, for inference only: no parameter wants a gradient."""

    def __init__(
        self,
        config: ModelConfig,
        shard: RankShard,
        tp: TensorParallel,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        new_parameter = ParameterFactory(dtype, device)
        ops = select_ops(device, backend.name)
        self.reduction = Reduction(tp, ops)
        self.model = Decoder(ShardContext(config, shard, backend, ops, self.reduction, new_parameter))
        tied_weight = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, shard.vocab, tp, ops, new_parameter, tied_weight
        )

    def forward(self, input_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """Run the step's tokens, (T,) ids and (T,) positions, and store their keys and values: (T, hidden)."""
        return self.model(input_ids, self.model.rotary.cos_sin(positions), kv_cache, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(S, hidden) -> (S, V/R): the logits of this rank's part of the vocabulary."""
        return self.lm_head(hidden)

    def gather_logits(self, logits: Tensor) -> Tensor | None:
        """(S, V/R) of each rank -> (S, V) on rank 0, None elsewhere. All ranks must call it."""
        return self.lm_head.gather(logits)

    def checkpoint_slices(self) -> Iterator[CheckpointSlice]:
        """Every piece of this shard, and where in the checkpoint it lies."""
        for name, module in self.named_modules():
            if module is not self and isinstance(module, CheckpointModule):
                yield from module.checkpoint_slices(name)
