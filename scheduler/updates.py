"""What the scheduler tells its caller: news of sequences, and counts. Plain values, made by `Scheduler` alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.step import FloatArray, IntArray


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
    """Prompt tokens that the prefix cache served, once it has ended."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the scheduler was made, and the present load."""

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_steps: int
    num_computed_tokens: int
    """Tokens that steps have computed, recomputation included."""
    num_cached_tokens: int
    """Prompt tokens served by the prefix cache, recomputation excluded."""
    num_preemptions: int
