"""What the scheduler tells its caller: news of sequences, and counts. Plain values, made by `Scheduler` alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.sequence import Sequence
from scheduler.step import FloatArray, IntArray, StepResult


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one output position: of the chosen token, and of the likeliest ones, best first."""

    chosen: float
    top_ids: IntArray
    top: FloatArray


class SequenceUpdate(NamedTuple):
    """News of one sequence: a token, its end, or both. A tuple, since one is made for every token."""

    seq_id: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error", once it has ended."""
    stop_token_id: int | None = None
    """The token that ended it, if one did."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache served."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the scheduler was made, and the present load."""

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_kv_blocks: int
    """Of the present ranks, who may have more or fewer than those before them had."""
    num_steps: int
    num_computed_tokens: int
    """Tokens that steps have computed, recomputation included."""
    num_cached_tokens: int
    """Prompt tokens served by the prefix cache, recomputation excluded."""
    num_preemptions: int


def split_logprobs(result: StepResult, sampled: list[Sequence]) -> dict[int, TokenLogprobs]:
    """By row, with as many of the likeliest as its sequence asked for: the arrays are as wide as the most asked."""
    arrays = result.logprobs
    if arrays is None:
        return {}
    split = {}
    for index, (row, chosen) in enumerate(zip(arrays.rows.tolist(), arrays.chosen.tolist(), strict=True)):
        num_top = sampled[row].sampling.logprobs or 0
        # Copies: a view would keep the whole step's arrays.
        split[row] = TokenLogprobs(chosen, arrays.top_ids[index, :num_top].copy(), arrays.top[index, :num_top].copy())
    return split
