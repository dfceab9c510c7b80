"""Steps with few prompt tokens as CUDA graphs: the decoder's layers, captured for some numbers of tokens.

Eagerly a layer's kernels take the host half a millisecond to launch, however few tokens there are: some 14 ms a step of
28 layers. A graph is one launch. What a step consists of, prompts, their chunks and
decoding rows in any mixture, is read on the device, so the number of tokens alone decides which graph it is. What
differs from step to step stays outside: the inputs are copied to fixed addresses, and logits and draw are eager.
Called by `workers.model_runner`, for steps that `workers.decode_graph` has no graph for.

Shapes: T tokens of a captured size, of which a step fills the first ones, and as many rows as they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from scheduler.step import Step
from workers.batch import Batch, SlotState
from workers.kv_cache import KVCache
from workers.layers.attention import AttentionMetadata
from workers.model_config import ModelConfig
from workers.models.decoder import CausalLM

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_MAX_LAYER_WORK = 10**11
"""Of a step: tokens times a layer's weights on a rank. That takes an H200 a third of a millisecond, and launches hardly
more."""
_MIN_NUM_TOKENS = 256
"""That there are graphs for, however large the model is."""
_MAX_PAIRS = 2**24
"""Of a prompt's query and a key, in a step. Beyond, a backend that knows lengths on the host is worth its launches."""
_SHARED_NUM_TOKENS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Of steps with rows that share blocks. Larger ones are mostly prompts, and fewer sizes are sooner captured."""


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """Memory at fixed addresses for the largest T and S, that all graphs share: one runs at a time."""

    input_ids: Tensor
    """(T,) int64."""
    positions: Tensor
    """(T,) int64."""
    slot_mapping: Tensor
    """(T,) int32."""
    cu_seqlens_q: Tensor
    """(S + 1,) int32."""
    seq_lens: Tensor
    """(S,) int32."""
    block_tables: Tensor
    """(S, B) int32."""
    num_shared_blocks: Tensor
    """(1,) int32."""
    hidden: Tensor
    """(T, hidden), the result."""


class PrefillGraphs:
    """The graphs of one rank, none of which has been captured yet."""

    def __init__(
        self,
        model: CausalLM,
        slots: SlotState,
        kv_cache: KVCache,
        max_num_batched_tokens: int,
        pool: _POOL_HANDLE,
    ) -> None:
        self._model = model
        self._slots = slots
        self._kv_cache = kv_cache
        self._pool = pool
        # By an equal share, not by this rank's own, which may differ: the ranks must have the same graphs.
        layer_weights = _layer_weights(model.config) // model.reduction.tp.world_size
        self.sizes = graph_sizes(max_num_batched_tokens, slots.max_num_seqs, layer_weights)
        self._shared_sizes = shared_graph_sizes(self.sizes, slots.max_num_seqs)
        self._captured: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._buffers = self._new_buffers(self.sizes[-1], slots.max_num_seqs)

    def capture(self, sizes: Sequence[int], on_progress: Callable[[float], None]) -> None:
        """Capture some of the `sizes`, the largest first, since the others then reuse its memory."""
        for index, size in enumerate(sorted(sizes, reverse=True)):
            self._captured[size, False] = self._capture(size, is_shared=False)
            if size in self._shared_sizes:
                self._captured[size, True] = self._capture(size, is_shared=True)
            on_progress((index + 1) / len(sizes))

    def fits(self, step: Step) -> bool:
        """Whether there is a graph for the step that is faster than its kernels one by one."""
        return len(step.token_ids) <= self.sizes[-1] and num_prompt_pairs(step) <= _MAX_PAIRS

    @property
    def num_graphs(self) -> int:
        """Of all sizes."""
        return len(self.sizes) + len(self._shared_sizes)

    def run(self, batch: Batch, num_shared_blocks: int) -> Tensor:
        """Queue the step: its (T, hidden), which the next step overwrites.

        `num_shared_blocks`: see `AttentionMetadata`.
        """
        num_tokens = len(batch.input_ids)
        is_shared = num_shared_blocks > 0 and num_tokens <= max(self._shared_sizes, default=0)
        size = next(size for size in (self._shared_sizes if is_shared else self.sizes) if size >= num_tokens)
        self._fill(batch, size)
        if is_shared:
            self._buffers.num_shared_blocks.fill_(num_shared_blocks)
        self._captured[size, is_shared].replay()
        return self._buffers.hidden[:num_tokens]

    def _fill(self, batch: Batch, size: int) -> None:
        buffers, metadata = self._buffers, batch.metadata
        num_tokens, num_rows = len(batch.input_ids), len(metadata.seq_lens)
        buffers.input_ids[:num_tokens] = batch.input_ids
        buffers.positions[:num_tokens] = batch.positions
        buffers.slot_mapping[:num_tokens] = metadata.slot_mapping
        buffers.slot_mapping[num_tokens:size] = -1
        buffers.cu_seqlens_q[: num_rows + 1] = metadata.cu_seqlens_q
        buffers.cu_seqlens_q[num_rows + 1 :] = num_tokens
        buffers.seq_lens[:num_rows] = metadata.seq_lens
        buffers.block_tables[:num_rows, : metadata.block_tables.shape[1]] = metadata.block_tables

    def _capture(self, size: int, *, is_shared: bool) -> torch.cuda.CUDAGraph:
        self._buffers.slot_mapping[:] = -1
        self._buffers.cu_seqlens_q[:] = 0
        self._buffers.num_shared_blocks.fill_(0)
        self._forward(size, is_shared)  # compiles kernels and makes work spaces, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._forward(size, is_shared)
        return graph

    def _forward(self, size: int, is_shared: bool) -> None:
        buffers = self._buffers
        num_rows = min(size, self._slots.max_num_seqs)  # a row has one token at least
        metadata = AttentionMetadata(
            slot_mapping=buffers.slot_mapping[:size],
            cu_seqlens_q=buffers.cu_seqlens_q[: num_rows + 1],
            seq_lens=buffers.seq_lens[:num_rows],
            block_tables=buffers.block_tables[:num_rows],
            max_seqlen_q=None,
            max_seqlen_k=self._slots.max_model_len,
            num_shared_blocks=buffers.num_shared_blocks if is_shared else None,
        )
        input_ids, positions = buffers.input_ids[:size], buffers.positions[:size]
        buffers.hidden[:size] = self._model(input_ids, positions, self._kv_cache, metadata)

    def _new_buffers(self, num_tokens: int, num_rows: int) -> _Buffers:
        device, hidden_size = self._slots.device, self._model.config.hidden_size
        shape = (num_rows, self._slots.block_tables.shape[1])
        return _Buffers(
            input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(shape, dtype=torch.int32, device=device),
            num_shared_blocks=torch.zeros(1, dtype=torch.int32, device=device),
            hidden=torch.zeros(num_tokens, hidden_size, dtype=self._kv_cache.data.dtype, device=device),
        )


def graph_sizes(max_num_batched_tokens: int, max_num_seqs: int, layer_weights: int) -> list[int]:
    """Token counts to capture, for a model whose layers have so many weights on each rank.

    From 256 a multiple of 128 for each eighth more; and `max_num_seqs`, the most for which sums over ranks take the
    short way through peer memory.
    """
    largest = max(_MIN_NUM_TOKENS, _MAX_LAYER_WORK // layer_weights // 128 * 128)
    largest = min(largest, max_num_batched_tokens)
    sizes = [16, 32, 64, 128, 192, 256]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + max(128, sizes[-1] // 8 // 128 * 128))
    return sorted({*(size for size in (*sizes, max_num_seqs) if size < largest), largest})


def shared_graph_sizes(sizes: list[int], max_num_seqs: int) -> list[int]:
    """Those of the `sizes` to capture for rows that share blocks, too, which one alone does not."""
    return [size for size in sizes if size in _SHARED_NUM_TOKENS and max_num_seqs > 1]


def num_prompt_pairs(step: Step) -> int:
    """Of a query and a key, at most, in rows of more than one token."""
    counts = step.num_scheduled_tokens.astype(np.int64)
    return int(np.dot(counts, np.where(counts > 1, step.seq_lens, 0)))


def _layer_weights(model: ModelConfig) -> int:
    """Of a layer's matrices, on all ranks together."""
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads)
    return model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)
