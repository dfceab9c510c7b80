"""Turns logits into token ids on rank 0, under each slot's sampling settings.

Owns the settings of every slot, and the counts of seen tokens of slots with penalties. The order is that of Hugging
Face transformers' logits processors and of vLLM: penalties, min_tokens, temperature (0 is greedy), top-k, top-p,
min-p, draw. Rows that are greedy or need only a temperature take one function, `gumbel_argmax`; the others are worked
on as a subset and cost the plain rows nothing. A row's token depends on its own logits, settings and position alone.
Called by the model runner after the LM head's gather; must not know of blocks, ranks or requests.

Shapes: N rows that sample in a step, K of them that are special, L that want log probabilities, V token ids.
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
from workers.logit_filters import (
    UNPENALISED_ROW,
    Penalties,
    RankFilter,
    SeenTokens,
    drop_unlikely,
    keep_likeliest,
    penalise,
)
from workers.noise import gumbel_argmax, row_keys

_MAX_SELECTED = 1024
"""Up to this top_k only the likeliest logits are ranked; beyond it, and for top_p alone, all of them are."""

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
class SpecialRows:
    """The rows of a batch that need more than a temperature; indices are int64."""

    rows: Tensor
    """(K,) index in the batch."""
    other_rows: Tensor
    """(N - K,) index in the batch of the plain rows."""
    penalties: Penalties | None
    banned: tuple[Tensor, Tensor] | None
    """Pairs of (index among the K, token id) that may not be sampled before min_tokens."""
    filters: tuple[RankFilter, ...]
    log_min_p: Tensor | None
    """(K, 1) float32; None if no row has a min_p."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What sampling one step needs, on the device."""

    temperature: Tensor
    """(N,) float32."""
    keys: Tensor
    """(N, 2) int32 of `noise.row_keys`."""
    is_greedy: bool
    """Whether every temperature is 0, so that no noise is needed."""
    special: SpecialRows | None
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
            0.0 if is_greedy else _to_normal_float32(sampling.temperature),
            math.log(sampling.min_p) if not is_greedy and sampling.min_p > 0 else -math.inf,
            _to_normal_float32(sampling.repetition_penalty),
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )

    def prepare(self, slots: IntArray, positions: IntArray) -> SamplingBatch:
        """Gather what sampling a batch needs.

        `slots` (N,) are the rows' slots, all different. `positions` (N,) are the indices in their sequences of the
        tokens to be sampled, so the number of tokens before each.
        """
        settings = self._settings[slots]
        bans_stop_ids = positions - settings["num_prompt_tokens"] < settings["min_tokens"]
        is_special = (
            bans_stop_ids
            | (settings["seen_row"] != UNPENALISED_ROW)
            | (settings["top_k"] < self.num_valid_tokens)
            | np.isfinite(settings["top_p"])
            | np.isfinite(settings["log_min_p"])
        )
        wants_logprobs = settings["logprobs"] >= 0
        special = self._special_rows(is_special, slots, settings, bans_stop_ids) if is_special.any() else None
        return SamplingBatch(
            temperature=self._to_device(settings["temperature"]),
            keys=self._to_device(row_keys(settings["seed"], positions)),
            is_greedy=not settings["temperature"].any(),
            special=special,
            logprob_rows=self._to_device(np.flatnonzero(wants_logprobs)) if wants_logprobs.any() else None,
            num_top_logprobs=int(settings["logprobs"].max(initial=0)),
        )

    def _special_rows(
        self,
        is_special: npt.NDArray[np.bool_],
        slots: IntArray,
        settings: npt.NDArray[Any],
        bans_stop_ids: npt.NDArray[np.bool_],
    ) -> SpecialRows:
        rows = np.flatnonzero(is_special)
        settings = settings[rows]
        banning = np.flatnonzero(bans_stop_ids[rows])
        banned = None
        if banning.size:
            banned_ids = [self._stop_token_ids[slot] for slot in slots[rows[banning]]]
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
        return SpecialRows(
            rows=self._to_device(rows),
            other_rows=self._to_device(np.flatnonzero(~is_special)),
            penalties=penalties,
            banned=banned,
            filters=self._rank_filters(settings),
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
        return torch.from_numpy(np.array(array, order="C")).to(self.device, non_blocking=True)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Sample a token for each row of `logits` (N, at least V), of any float dtype, which are left as they are."""
        logits = logits[:, : self.num_valid_tokens]
        special = batch.special
        token_ids = _draw(logits, batch) if special is None else self._sample_mixed(logits, batch, special)
        return Sampled(token_ids=token_ids, logprobs=_logprobs(logits, token_ids, batch))

    def _sample_mixed(self, logits: Tensor, batch: SamplingBatch, special: SpecialRows) -> Tensor:
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        token_ids[special.other_rows] = _draw(logits[special.other_rows], batch, special.other_rows)
        temperature = batch.temperature[special.rows]
        filtered = self.filter_logits(logits[special.rows].float(), temperature[:, None], special)
        sampled_ids = _draw(filtered, batch, special.rows)
        token_ids[special.rows] = sampled_ids
        if special.penalties is not None:
            self.seen_tokens.add_outputs(special.penalties.seen_rows, sampled_ids)
        return token_ids

    def filter_logits(self, logits: Tensor, temperature: Tensor, special: SpecialRows) -> Tensor:
        """Penalise `logits` (K, V) float32 of the special rows at `temperature` (K, 1); excluded tokens become -inf."""
        if special.penalties is not None:
            logits = penalise(logits, special.penalties, self.seen_tokens)
        if special.banned is not None:
            logits[special.banned] = -torch.inf
        for rank_filter in special.filters:
            rows = rank_filter.rows
            logits[rows] = keep_likeliest(logits[rows], temperature[rows], rank_filter)
        if special.log_min_p is not None:
            logits = drop_unlikely(logits, temperature, special.log_min_p)
        return logits


def _draw(logits: Tensor, batch: SamplingBatch, rows: Tensor | None = None) -> Tensor:
    """Draw a token for each row of `logits`, which are the batch's `rows` (all if None)."""
    if batch.is_greedy:
        return logits.argmax(dim=1)
    if rows is None:
        return gumbel_argmax(logits, batch.temperature, batch.keys)
    return gumbel_argmax(logits, batch.temperature[rows], batch.keys[rows])


def _logprobs(logits: Tensor, token_ids: Tensor, batch: SamplingBatch) -> LogprobTensors | None:
    rows = batch.logprob_rows
    if rows is None:
        return None
    logprobs = logits[rows].float().log_softmax(dim=1)
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
