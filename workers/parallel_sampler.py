"""Samples a step's tokens on all ranks together, and leaves the same ids on each of them.

Plain rows are drawn by `workers.candidates`: every rank offers its best, and no logits travel. Rows that need all their
logits have them gathered on rank 0, where `workers.sampler` samples them, and the ids are sent round. Every rank knows
every slot's settings, so all agree on which rows are which. Called by `workers.model_runner` and
`workers.decode_graph`.

Shapes: N rows that sample in a step, K of them not plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.step import IntArray, SlotSampling
from workers.batch import to_device
from workers.candidates import best_candidates, unpack_ids
from workers.models.decoder import CausalLM
from workers.parallel import TensorParallel
from workers.sampler import LogprobTensors, Sampler
from workers.shard_plan import Span


class ParallelSampler:
    """The sampler of one rank group, as seen from one of its ranks."""

    def __init__(self, sampler: Sampler, model: CausalLM, vocab: Span, tp: TensorParallel) -> None:
        """`vocab`: the token ids whose logits this rank computes."""
        self._sampler = sampler
        self._model = model
        self._tp = tp
        self._first_id = vocab.start
        self._num_valid_ids = max(0, min(vocab.stop, sampler.num_valid_tokens) - vocab.start)

    def take_slots(self, new: Sequence[SlotSampling]) -> None:
        """See `Sampler.take_slots`."""
        self._sampler.take_slots(new)

    def plain_inputs(self, slots: IntArray, positions: IntArray) -> tuple[npt.NDArray[np.float32], IntArray]:
        """See `Sampler.plain_inputs`."""
        return self._sampler.plain_inputs(slots, positions)

    def draw(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
        """Token ids (N,) of rows as if all were plain, from this rank's `logits` (N, V/R). Fits a CUDA graph."""
        packed = best_candidates(logits[:, : self._num_valid_ids], temperature, keys, self._first_id)
        return unpack_ids(self._tp.all_reduce_max(packed))

    def rows_to_redraw(self, slots: IntArray, positions: IntArray) -> npt.NDArray[np.intp]:
        """(K,) which of the N rows are not plain."""
        return np.flatnonzero(self._sampler.needs_logits(slots, positions))

    def redraw(
        self,
        logits: Tensor,
        token_ids: Tensor,
        rows: npt.NDArray[np.intp],
        slots: IntArray,
        positions: IntArray,
    ) -> LogprobTensors | None:
        """Sample `rows` (K,) of the N again, with all their logits, and overwrite their `token_ids` (N,).

        Returns the log probabilities that rows asked for, on rank 0, with rows counted among the N.
        """
        on_device = to_device(rows, logits.device)
        gathered = self._model.gather_logits(logits[on_device])
        new_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        logprobs = None
        if gathered is not None:
            sampled = self._sampler.sample(gathered, self._sampler.prepare(slots[rows], positions[rows]))
            new_ids, logprobs = sampled.token_ids, sampled.logprobs
        token_ids[on_device] = self._tp.broadcast(new_ids)
        return None if logprobs is None else replace(logprobs, rows=on_device[logprobs.rows])
