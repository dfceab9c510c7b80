"""Turns a step into the tensors that the model runs on, with array operations only.

Owns the slots' state on the device: their block tables and their last sampled tokens. Everything a step brings is
packed into one int32 buffer and copied once. Called by `workers.model_runner` and the graphs of steps, and for
`to_device` by the sampler; knows nothing of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.step import TOKEN_ON_DEVICE, IntArray, Step
from workers.layers.attention import AttentionMetadata

_ALIGNMENT = 4
"""int32 elements in 16 bytes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs: T tokens, S rows, N of them sampled."""

    input_ids: Tensor
    """(T,) int64."""
    positions: Tensor
    """(T,) int64, index of each token in its sequence."""
    metadata: AttentionMetadata
    last_token_indices: Tensor
    """(N,) int64, index among the T tokens of each sampled row's last one."""


class SlotState:
    """What the ranks remember of each slot between steps."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.device = device
        # One slot more than there are sequences: padding rows of a captured step point there.
        shape = (max_num_seqs + 1, -(-max_model_len // block_size))
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)

    def prepare(self, step: Step) -> Batch:
        """Apply the step's changes to the block tables, and lay out its inputs."""
        counts, seq_lens = step.num_scheduled_tokens, step.seq_lens
        ends = np.cumsum(counts, dtype=np.int32)
        row_of_token = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        positions = np.arange(ends[-1], dtype=np.int32) + (seq_lens - ends)[row_of_token]
        columns = [
            step.token_ids,
            positions,
            step.slots[row_of_token],
            np.concatenate(([0], ends)),
            seq_lens,
            step.slots,
            ends[np.flatnonzero(step.samples)] - 1,
            changed_entries(step, self.block_tables.shape[1]),
            step.block_ids,
        ]
        parts = self._to_device(columns)
        token_ids, device_positions, token_slots, cu_seqlens_q, device_seq_lens, slots, last = parts[:7]
        entries, block_ids = parts[7:]
        self.block_tables.view(-1)[entries.long()] = block_ids
        max_seqlen_k = int(seq_lens.max())
        positions_64, token_slots_64 = device_positions.long(), token_slots.long()
        return Batch(
            input_ids=torch.where(token_ids == TOKEN_ON_DEVICE, self.last_tokens[token_slots_64], token_ids),
            positions=positions_64,
            metadata=AttentionMetadata(
                slot_mapping=self._slot_mapping(token_slots_64, positions_64),
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=device_seq_lens,
                block_tables=self.block_tables[slots.long(), : -(-max_seqlen_k // self.block_size)],
                max_seqlen_q=int(counts.max()),
                max_seqlen_k=max_seqlen_k,
            ),
            last_token_indices=last.long(),
        )

    def remember(self, slots: IntArray, token_ids: Tensor) -> None:
        """Keep the (N,) ids that a step sampled, for the steps that continue them."""
        self.last_tokens[to_device(slots, self.device).long()] = token_ids

    def _slot_mapping(self, token_slots: Tensor, positions: Tensor) -> Tensor:
        blocks = self.block_tables[token_slots, positions // self.block_size]
        return blocks * self.block_size + (positions % self.block_size).int()

    def _to_device(self, columns: list[IntArray]) -> list[Tensor]:
        """The columns as parts of one copy, each at an address that suits kernels that load several elements at once.

        Triton compiles a kernel anew for addresses that are less aligned than those that it has seen.
        """
        starts = np.cumsum([0, *(-(-len(column) // _ALIGNMENT) * _ALIGNMENT for column in columns)])
        packed = np.zeros(starts[-1], dtype=np.int32)
        for start, column in zip(starts, columns, strict=False):
            packed[start : start + len(column)] = column
        on_device = to_device(packed, self.device)
        return [on_device[start : start + len(column)] for start, column in zip(starts, columns, strict=False)]


def changed_entries(step: Step, num_blocks: int) -> IntArray:
    """(sum of block_counts,) indices into flattened tables (slots, num_blocks), one for each of `step.block_ids`."""
    firsts = step.block_slots * num_blocks + step.block_starts
    ends = np.cumsum(step.block_counts, dtype=np.int32)
    return np.repeat(firsts - (ends - step.block_counts), step.block_counts) + np.arange(
        len(step.block_ids), dtype=np.int32
    )


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for it."""
    tensor = torch.from_numpy(np.array(array, order="C"))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
