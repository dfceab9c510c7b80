"""Turns logits into token ids on rank 0, under each slot's sampling settings.

Owns the settings of every slot, and the counts of seen tokens of slots with penalties. The order is that of Hugging
Face transformers' logits processors and of vLLM: penalties, min_tokens, temperature (0 is greedy), top-k, top-p,
min-p, draw. Rows that are greedy or need only a temperature never come here: `workers.candidates` draws them, with
the same noise. A row's token depends on its own logits, settings and position alone. Called by
`workers.parallel_sampler`; must not know of blocks, ranks or requests.

Shapes: N rows to sample, L of them with log probabilities, V token ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.step import IntArray, SlotSampling, StepLogprobs
from workers.batch import to_device
from workers.logit_filters import (
    UNPENALISED_ROW,
    Penalties,
    RankFilter,
    SeenTokens,
    drop_unlikely,
    keep_likeliest,
    penalise,
)
from workers.noise import perturbed_scores, row_keys

_MAX_SELECTED = 1024
"""Up to this top_k only the likeliest logits are ranked; beyond it, and for top_p alone, all of them are."""

_MAX_TEMPERATURE = 1e30
"""As good as infinite, and its product with the noise is finite."""

_SETTINGS = np.dtype(
    [
        ("seed", np.uint64),
        ("num_prompt_tokens", np.int64),
        ("min_tokens", np.int64),
        ("top_k", np.int64),
        ("logprobs", np.int64),
        ("seen_row", np.int64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("log_min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
    ]
)
"""One slot's settings, where top_k = V, top_p = inf and log_min_p = -inf keep every token."""


@dataclass(frozen=True, slots=True)
class LogitFilters:
    """What happens to a batch's logits before the draw; None and empty where no row wants it."""

    penalties: Penalties | None
    banned: tuple[Tensor, Tensor] | None
    """Pairs of (row, token id) that may not be sampled before min_tokens, int64."""
    ranks: tuple[RankFilter, ...]
    log_min_p: Tensor | None
    """(N, 1) float32."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What sampling some rows needs, on the device."""

    temperature: Tensor
    """(N,) float32."""
    keys: Tensor
    """(N, 2) int32 of `noise.row_keys`."""
    filters: LogitFilters
    logprob_rows: Tensor | None
    """(L,) int64 index of the rows that want log probabilities; None if no row does."""
    num_top_logprobs: int
    """The most that a row asked for."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """`StepLogprobs` while still on the device: rows (L,), chosen (L,), top_ids (L, M), top (L, M)."""

    rows: Tensor
    chosen: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step sampled, on the device: `token_ids` (N,) int64, and log probabilities if a row wants them."""

    token_ids: Tensor
    logprobs: LogprobTensors | None


class Sampler:
    """Samples the next token of slots. Token ids from `num_valid_tokens` on are padding and never sampled."""

    def __init__(self, *, max_num_seqs: int, num_valid_tokens: int, device: torch.device) -> None:
        self.num_valid_tokens = num_valid_tokens
        self.device = device
        self._settings = np.zeros(max_num_seqs, dtype=_SETTINGS)
        self._stop_token_ids = [np.zeros(0, dtype=np.int32)] * max_num_seqs
        self.seen_tokens = SeenTokens(num_valid_tokens, device)

    def take_slots(self, new: Sequence[SlotSampling]) -> None:
        """Let sequences take slots; whatever a slot held before is dropped.

        A sequence that takes a slot again after preemption brings its tokens in `history`, so that its penalties go
        on as if it had never left.
        """
        for sampling in new:
            self.seen_tokens.give_back_row(int(self._settings["seen_row"][sampling.slot]))
            stop_ids = sampling.stop_token_ids
            self._stop_token_ids[sampling.slot] = stop_ids[stop_ids < self.num_valid_tokens]
            self._settings[sampling.slot] = self._record(sampling)

    def _record(self, sampling: SlotSampling) -> tuple[Any, ...]:
        """A record of `_SETTINGS`, in which settings that change nothing are off."""
        seen_row = UNPENALISED_ROW
        if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
            num_prompt = sampling.num_prompt_tokens
            seen_row = self.seen_tokens.take_row(sampling.history[:num_prompt], sampling.history[num_prompt:])
        is_greedy = sampling.temperature == 0 or sampling.top_k == 1
        keeps_top_k = not is_greedy and 0 < sampling.top_k < self.num_valid_tokens
        return (
            sampling.seed,
            sampling.num_prompt_tokens,
            sampling.min_tokens if sampling.stop_token_ids.size else 0,
            sampling.top_k if keeps_top_k else self.num_valid_tokens,
            min(sampling.logprobs, self.num_valid_tokens),
            seen_row,
            sampling.top_p if not is_greedy and sampling.top_p < 1 else math.inf,
            0.0 if is_greedy else min(_to_normal_float32(sampling.temperature), _MAX_TEMPERATURE),
            math.log(sampling.min_p) if not is_greedy and sampling.min_p > 0 else -math.inf,
            _to_normal_float32(sampling.repetition_penalty),
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )

    def plain_inputs(self, slots: IntArray, positions: IntArray) -> tuple[npt.NDArray[np.float32], IntArray]:
        """Temperatures (N,) and noise keys (N, 2) of rows, on the host; arguments as in `prepare`."""
        settings = self._settings[slots]
        return settings["temperature"], row_keys(settings["seed"], positions)

    def needs_logits(self, slots: IntArray, positions: IntArray) -> npt.NDArray[np.bool_]:
        """(N,) whether a row is more than plain: it needs all its logits, and `sample`; arguments as in `prepare`."""
        settings = self._settings[slots]
        return (
            self._bans_stop_ids(settings, positions)
            | (settings["seen_row"] != UNPENALISED_ROW)
            | (settings["top_k"] < self.num_valid_tokens)
            | np.isfinite(settings["top_p"])
            | np.isfinite(settings["log_min_p"])
            | (settings["logprobs"] >= 0)
        )

    def prepare(self, slots: IntArray, positions: IntArray) -> SamplingBatch:
        """Gather what sampling some rows needs.

        `slots` (N,) are the rows' slots, all different. `positions` (N,) are the indices in their sequences of the
        tokens to be sampled, so the number of tokens before each.
        """
        settings = self._settings[slots]
        wants_logprobs = settings["logprobs"] >= 0
        return SamplingBatch(
            temperature=self._to_device(settings["temperature"]),
            keys=self._to_device(row_keys(settings["seed"], positions)),
            filters=self._filters(slots, settings, positions),
            logprob_rows=self._to_device(np.flatnonzero(wants_logprobs)) if wants_logprobs.any() else None,
            num_top_logprobs=int(settings["logprobs"].max(initial=0)),
        )

    @staticmethod
    def _bans_stop_ids(settings: npt.NDArray[Any], positions: IntArray) -> npt.NDArray[np.bool_]:
        bans: npt.NDArray[np.bool_] = positions - settings["num_prompt_tokens"] < settings["min_tokens"]
        return bans

    def _filters(self, slots: IntArray, settings: npt.NDArray[Any], positions: IntArray) -> LogitFilters:
        banning = np.flatnonzero(self._bans_stop_ids(settings, positions))
        banned = None
        if banning.size:
            banned_ids = [self._stop_token_ids[slot] for slot in slots[banning]]
            banned_rows = np.repeat(banning, [len(ids) for ids in banned_ids])
            banned = (self._to_device(banned_rows), self._to_device(np.concatenate(banned_ids).astype(np.int64)))
        penalties = None
        if (settings["seen_row"] != UNPENALISED_ROW).any():
            penalties = Penalties(
                seen_rows=self._to_device(settings["seen_row"]),
                repetition=self._to_device(settings["repetition_penalty"][:, None]),
                presence=self._to_device(settings["presence_penalty"][:, None]),
                frequency=self._to_device(settings["frequency_penalty"][:, None]),
            )
        has_min_p = np.isfinite(settings["log_min_p"]).any()
        return LogitFilters(
            penalties=penalties,
            banned=banned,
            ranks=self._rank_filters(settings),
            log_min_p=self._to_device(settings["log_min_p"][:, None]) if has_min_p else None,
        )

    def _rank_filters(self, settings: npt.NDArray[Any]) -> tuple[RankFilter, ...]:
        """At most two, so that one row that needs every logit ranked does not make the others pay for it."""
        top_k = settings["top_k"]
        is_narrow = top_k <= min(_MAX_SELECTED, self.num_valid_tokens - 1)
        is_wide = ~is_narrow & ((top_k < self.num_valid_tokens) | np.isfinite(settings["top_p"]))
        return tuple(
            RankFilter(
                rows=self._to_device(rows),
                top_k=self._to_device(top_k[rows, None]),
                top_p=self._to_device(settings["top_p"][rows, None]),
                width=int(top_k[rows].max()) if is_narrow[rows[0]] else self.num_valid_tokens,
            )
            for rows in (np.flatnonzero(is_narrow), np.flatnonzero(is_wide))
            if rows.size
        )

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(array, self.device)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Sample a token for each row of `logits` (N, at least V), of any float dtype, which are left as they are."""
        logits = logits[:, : self.num_valid_tokens].float()
        filtered = self.filter_logits(logits.clone(), batch.temperature[:, None], batch.filters)
        token_ids = perturbed_scores(filtered, batch.temperature, batch.keys).argmax(dim=1)
        if batch.filters.penalties is not None:
            self.seen_tokens.add_outputs(batch.filters.penalties.seen_rows, token_ids)
        return Sampled(token_ids=token_ids, logprobs=_logprobs(logits, token_ids, batch))

    def filter_logits(self, logits: Tensor, temperature: Tensor, filters: LogitFilters) -> Tensor:
        """Penalise `logits` (N, V) float32 at `temperature` (N, 1); excluded tokens become -inf. Overwrites them."""
        if filters.penalties is not None:
            logits = penalise(logits, filters.penalties, self.seen_tokens)
        if filters.banned is not None:
            logits[filters.banned] = -torch.inf
        for ranks in filters.ranks:
            logits[ranks.rows] = keep_likeliest(logits[ranks.rows], temperature[ranks.rows], ranks)
        if filters.log_min_p is not None:
            logits = drop_unlikely(logits, temperature, filters.log_min_p)
        return logits


def _logprobs(logits: Tensor, token_ids: Tensor, batch: SamplingBatch) -> LogprobTensors | None:
    rows = batch.logprob_rows
    if rows is None:
        return None
    logprobs = logits[rows].log_softmax(dim=1)
    top = logprobs.topk(batch.num_top_logprobs, dim=1)
    chosen = logprobs.gather(1, token_ids[rows, None])[:, 0]
    return LogprobTensors(rows=rows, chosen=chosen, top_ids=top.indices, top=top.values)


def to_step_logprobs(logprobs: LogprobTensors) -> StepLogprobs:
    """Copy log probabilities to the host. Waits for the device, so it is for the thread that waits for the step."""
    return StepLogprobs(
        rows=logprobs.rows.cpu().numpy().astype(np.int32),
        chosen=logprobs.chosen.cpu().numpy(),
        top_ids=logprobs.top_ids.cpu().numpy().astype(np.int32),
        top=logprobs.top.cpu().numpy(),
    )


def _to_normal_float32(value: float) -> float:
    """The nearest positive float32 that is neither zero, subnormal (which a GPU may flush to zero) nor infinite."""
    limits = np.finfo(np.float32)
    return min(max(value, float(limits.tiny)), float(limits.max))
