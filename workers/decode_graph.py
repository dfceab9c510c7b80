"""Decode steps as CUDA graphs: one captured for each of some batch sizes, from slot numbers to sampled token ids.

A graph holds everything that depends on nothing but the slots' state: block tables, last tokens, the model, the LM
head, the draw of plain rows, and their collectives. A step fills one packed buffer on the host, and costs one copy and
one launch. Called by `workers.model_runner`, for steps in which every row computes one token that the ranks hold.

Shapes: S rows of a captured size, of which a step fills the first N; the others are padding, with length 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from scheduler.step import IntArray, Step
from workers.batch import SlotState
from workers.kernels.prepare_decode import prepare_decode
from workers.kv_cache import KVCache
from workers.layers.attention import AttentionMetadata
from workers.models.decoder import CausalLM
from workers.parallel_sampler import ParallelSampler

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_NUM_COLUMNS = 6
"""Of the packed input, for each row: slot, length, new block, temperature, and two noise keys."""
_NUM_HOST_BUFFERS = 4
"""More than the steps that can be on their way at once, so that none is overwritten before its copy is done."""


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """Memory at fixed addresses for the largest S, that all graphs share: one runs at a time."""

    packed: Tensor
    """(_NUM_COLUMNS * S + 1,) int32: slots, lengths, new blocks, temperatures (as bits), then pairs of noise keys, and
    the number of shared blocks."""
    input_ids: Tensor
    """(S,) int64."""
    cos_sin: Tensor
    """(2, S, 1, D/2) float32."""
    slot_mapping: Tensor
    """(S,) int32."""
    block_tables: Tensor
    """(S, B) int32."""
    cu_seqlens_q: Tensor
    """(S + 1,) int32."""


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """One graph and what it leaves behind."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    """(S, V/R)."""
    token_ids: Tensor
    """(S,) int64."""


class DecodeGraphs:
    """The graphs of one rank."""

    def __init__(
        self,
        model: CausalLM,
        sampler: ParallelSampler,
        slots: SlotState,
        kv_cache: KVCache,
        pool: _POOL_HANDLE,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._slots = slots
        self._kv_cache = kv_cache
        self.sizes = graph_sizes(slots.max_num_seqs)
        self._shared_sizes = shared_graph_sizes(slots.max_num_seqs)
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._pool = pool
        self._buffers = self._new_buffers(self.sizes[-1])
        shape = (_NUM_HOST_BUFFERS, _NUM_COLUMNS * self.sizes[-1] + 1)
        self._host = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        self._num_steps = 0

    def capture(self, sizes: Sequence[int], on_progress: Callable[[float], None]) -> None:
        """Capture some of the `sizes`, the largest first, since the others then reuse its memory."""
        for index, size in enumerate(sorted(sizes, reverse=True)):
            self._captured[size, False] = self._capture(size, is_shared=False)
            if size in self._shared_sizes:
                self._captured[size, True] = self._capture(size, is_shared=True)
            on_progress((index + 1) / len(sizes))

    @property
    def num_graphs(self) -> int:
        """Of all sizes."""
        return len(self.sizes) + len(self._shared_sizes)

    def fits(self, step: Step) -> bool:
        """Whether every row decodes one token, from the id that its slot sampled last."""
        return not step.new_slots and len(step.token_ids) == len(step.slots) and bool((step.token_ids < 0).all())

    def run(self, step: Step, num_shared_blocks: int) -> tuple[Tensor, Tensor]:
        """Queue the step: this rank's logits (N, V/R) and the ids (N,) as if all rows were plain.

        Both are overwritten by the next step. `num_shared_blocks`: see `AttentionMetadata`; with 0 no kernel looks for
        them.
        """
        num_rows = len(step.slots)
        sizes = self._shared_sizes if num_shared_blocks else self.sizes
        size = next(size for size in sizes if size >= num_rows)
        self._fill(step, size, num_shared_blocks)
        captured = self._captured[size, num_shared_blocks > 0]
        captured.graph.replay()
        return captured.logits[:num_rows], captured.token_ids[:num_rows]

    def _fill(self, step: Step, size: int, num_shared_blocks: int) -> None:
        num_rows = len(step.slots)
        host = self._host[self._num_steps % _NUM_HOST_BUFFERS][: _NUM_COLUMNS * size + 1]
        self._num_steps += 1
        temperature, keys = self._sampler.plain_inputs(step.slots, step.seq_lens)
        packed = host.numpy()
        slots, seq_lens, new_blocks, temperatures = packed[: 4 * size].reshape(4, size)
        slots[:num_rows], slots[num_rows:] = step.slots, self._slots.max_num_seqs  # the slot that nobody has
        seq_lens[:num_rows], seq_lens[num_rows:] = step.seq_lens, 0
        new_blocks[:num_rows], new_blocks[num_rows:] = new_block_of_rows(step, self._slots.max_num_seqs), -1
        temperatures[:num_rows], temperatures[num_rows:] = temperature.view(np.int32), 0
        packed[4 * size : -1].reshape(size, 2)[:num_rows] = keys
        packed[-1] = num_shared_blocks
        self._buffers.packed[: len(packed)].copy_(host, non_blocking=True)

    def _capture(self, size: int, *, is_shared: bool) -> _Captured:
        packed = self._buffers.packed
        packed[:size] = self._slots.max_num_seqs
        packed[size : 2 * size] = 0
        packed[2 * size : 3 * size] = -1
        packed[_NUM_COLUMNS * size] = 0
        self._forward(size, is_shared)  # compiles kernels and makes work spaces, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, token_ids = self._forward(size, is_shared)
        return _Captured(graph, logits, token_ids)

    def _forward(self, size: int, is_shared: bool) -> tuple[Tensor, Tensor]:
        buffers, state, rotary = self._buffers, self._slots, self._model.model.rotary
        slots, seq_lens, new_blocks, temperatures = buffers.packed[: 4 * size].view(4, size)
        keys = buffers.packed[4 * size : _NUM_COLUMNS * size].view(size, 2)
        cos, sin = buffers.cos_sin[:, :size]
        prepare_decode(
            slots=slots,
            seq_lens=seq_lens,
            new_blocks=new_blocks,
            last_tokens=state.last_tokens,
            block_tables=state.block_tables,
            inv_freq=rotary.inv_freq,
            attention_factor=rotary.attention_factor,
            block_size=state.block_size,
            input_ids=buffers.input_ids,
            cos=cos,
            sin=sin,
            slot_mapping=buffers.slot_mapping,
            row_tables=buffers.block_tables,
        )
        metadata = AttentionMetadata(
            slot_mapping=buffers.slot_mapping[:size],
            cu_seqlens_q=buffers.cu_seqlens_q[: size + 1],
            seq_lens=seq_lens,
            block_tables=buffers.block_tables[:size],
            max_seqlen_q=1,
            max_seqlen_k=state.max_model_len,
            num_shared_blocks=buffers.packed[_NUM_COLUMNS * size : _NUM_COLUMNS * size + 1] if is_shared else None,
        )
        hidden = self._model.model(buffers.input_ids[:size], (cos, sin), self._kv_cache, metadata)
        logits = self._model.compute_logits(hidden)
        token_ids = self._sampler.draw(logits, temperatures.view(torch.float32), keys)
        state.last_tokens[slots.long()] = token_ids
        return logits, token_ids

    def _new_buffers(self, size: int) -> _Buffers:
        device, half = self._slots.device, self._model.config.head_dim // 2
        return _Buffers(
            packed=torch.zeros(_NUM_COLUMNS * size + 1, dtype=torch.int32, device=device),
            input_ids=torch.zeros(size, dtype=torch.int64, device=device),
            cos_sin=torch.zeros((2, size, 1, half), dtype=torch.float32, device=device),
            slot_mapping=torch.zeros(size, dtype=torch.int32, device=device),
            block_tables=torch.zeros((size, self._slots.block_tables.shape[1]), dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=device),
        )


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Row counts to capture: dense where a step is short, and `max_num_seqs` itself at the end."""
    # Not 8: a step of 16 rows takes no longer (docs/decisions.md).
    sizes = [1, 2, 4, *range(16, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def shared_graph_sizes(max_num_seqs: int) -> list[int]:
    """Row counts to capture for rows that share blocks, too, which one alone does not."""
    sizes = [16, *range(32, max_num_seqs, 32), max_num_seqs]
    return [size for size in sizes if 1 < size <= max_num_seqs and (size == max_num_seqs or size + 16 < max_num_seqs)]


def new_block_of_rows(step: Step, max_num_seqs: int) -> IntArray:
    """(N,) the block that each row of a decode step gets with it, -1 for none."""
    of_slot = np.full(max_num_seqs, -1, dtype=np.int32)
    of_slot[step.block_slots] = step.block_ids
    return of_slot[step.slots]
