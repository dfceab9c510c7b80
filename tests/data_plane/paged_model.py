"""Runs a `CausalLM` over a paged cache by hand: tokens in, logits of every one of them out. For tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from workers.kernels.attention import select_backend
from workers.kv_cache import KVCache
from workers.layers.attention import AttentionMetadata
from workers.model_config import load_model_config
from workers.models.decoder import CausalLM
from workers.parallel import TensorParallel
from workers.shard_plan import RankShard, plan_shards
from workers.weights import load_weights

CPU = torch.device("cpu")


def build(path: Path, tp: TensorParallel, dtype: torch.dtype = torch.float32) -> CausalLM:
    """This rank's shard of the checkpoint folder `path`, on the CPU, its weights not yet read."""
    config = load_model_config(path)
    return CausalLM(config, shard_of(path, tp), tp, select_backend("torch", CPU, 16), dtype, CPU)


def load(path: Path, tp: TensorParallel, dtype: torch.dtype = torch.float32) -> CausalLM:
    """The same with its weights."""
    model = build(path, tp, dtype)
    load_weights(model, path, lambda fraction: None)
    return model


def shard_of(path: Path, tp: TensorParallel) -> RankShard:
    config = load_model_config(path)
    return plan_shards(
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        world_size=tp.world_size,
    )[tp.rank]


class PagedModel:
    """Sequences with blocks in random order, in a cache that holds NaN wherever nothing was written."""

    def __init__(
        self, model: CausalLM, num_kv_heads: int, num_sequences: int, max_len: int, block_size: int = 4
    ) -> None:
        config = model.config
        blocks_each = -(-max_len // block_size)
        num_blocks = num_sequences * blocks_each
        self.model = model
        self.block_size = block_size
        self.kv_cache = KVCache.allocate(
            config.num_hidden_layers, num_blocks, block_size, num_kv_heads, config.head_dim, torch.float32, CPU
        )
        self.kv_cache.data.fill_(torch.nan)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int()
        self.block_tables = order.view(num_sequences, blocks_each)
        self.lengths = [0] * num_sequences

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Compute further tokens of some sequences; returns the logits of each, (len(chunk), V), on rank 0."""
        token_ids, positions, slots, q_lens, seq_lens = [], [], [], [0], []
        for sequence, chunk in chunks.items():
            start, stop = self.lengths[sequence], self.lengths[sequence] + len(chunk)
            span = torch.arange(start, stop)
            blocks = self.block_tables[sequence][span // self.block_size]
            token_ids += chunk
            positions.append(span)
            slots.append(blocks * self.block_size + span % self.block_size)
            q_lens.append(len(chunk))
            seq_lens.append(stop)
            self.lengths[sequence] = stop
        metadata = AttentionMetadata(
            slot_mapping=torch.cat(slots).int(),
            cu_seqlens_q=torch.tensor(q_lens).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=self.block_tables[list(chunks)],
            max_seqlen_q=max(q_lens),
            max_seqlen_k=max(seq_lens),
        )
        with torch.inference_mode():
            hidden = self.model(torch.tensor(token_ids), torch.cat(positions), self.kv_cache, metadata)
            logits = self.model.gather_logits(self.model.compute_logits(hidden))
        if logits is None:
            return dict.fromkeys(chunks, torch.empty(0))
        return dict(zip(chunks, logits.split(q_lens[1:]), strict=True))


def prefill_then_decode(paged: PagedModel, prompts: list[list[int]], num_decoded: int) -> list[Tensor]:
    """Every prompt's logits, its last `num_decoded` tokens computed one a step, all prompts in one ragged batch.

    Empty on ranks other than 0.
    """
    steps = [paged.step({i: prompt[:-num_decoded] for i, prompt in enumerate(prompts)})]
    for back in range(num_decoded, 0, -1):
        steps.append(paged.step({i: [prompt[-back]] for i, prompt in enumerate(prompts)}))
    parts = [[step[i] for step in steps] for i in range(len(prompts))]
    return [torch.cat(each) for each in parts] if paged.model.lm_head.tp.rank == 0 else []
