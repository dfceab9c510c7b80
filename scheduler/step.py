"""The contract between the planes: what the scheduler asks of the ranks in one step, and what rank 0 answers.

Everything is integers and int32 arrays; how they travel is `workers.frames`' business. Written by
`scheduler.step_builder`, read by `workers.batch`, `workers.decode_graph` and `workers.sampler`.

A running sequence occupies a *slot*, a row of state that the ranks keep between steps: its block table, its last
sampled token, its sampling settings. A step therefore carries only what changed, a few kilobytes even for hundreds of
sequences, and a step can be sent before the tokens that it continues from are known to the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]

TOKEN_ON_DEVICE = -1
"""In `Step.token_ids`: the id that this slot sampled last, which only the ranks know yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSampling:
    """The sampling settings of one slot, sent once when a sequence takes the slot."""

    slot: int
    num_prompt_tokens: int
    temperature: float
    top_k: int
    """0 keeps all."""
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    """0 to 2**63 - 1."""
    min_tokens: int
    logprobs: int
    """-1 for none, 0 for the chosen token's alone, n for the n likeliest as well."""
    stop_token_ids: IntArray
    """Ids that may not be sampled before min_tokens; empty if min_tokens is 0."""
    history: IntArray
    """The sequence's tokens so far, if a penalty needs them, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the model over S rows (one for each scheduled sequence) and T tokens. Arrays are int32."""

    step_id: int
    slots: IntArray
    """(S,) each row's slot."""
    num_scheduled_tokens: IntArray
    """(S,) tokens of each row in this step, at least 1."""
    seq_lens: IntArray
    """(S,) tokens of each sequence after this step; the last `num_scheduled_tokens` of them are computed now."""
    samples: IntArray
    """(S,) 1 where the row's last token is followed by a sampled one, 0 for a prompt's earlier chunks."""
    token_ids: IntArray
    """(T,) the rows' tokens, one row after the other; TOKEN_ON_DEVICE stands for the slot's last sampled id."""
    block_slots: IntArray
    """(U,) slots whose block tables change, in order of application."""
    block_starts: IntArray
    """(U,) index in the block table of the first new id."""
    block_counts: IntArray
    """(U,) how many ids are new."""
    block_ids: IntArray
    """(sum of block_counts,) the new ids."""
    new_slots: tuple[SlotSampling, ...] = ()
    """Slots that a sequence takes with this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogprobs:
    """Log probabilities of one step's sampled rows that asked for them, from the model's unmodified logits."""

    rows: IntArray
    """(N,) index among the step's sampled rows."""
    chosen: FloatArray
    """(N,) of the sampled token."""
    top_ids: IntArray
    """(N, M) likeliest tokens, best first; M is the most that a row asked for."""
    top: FloatArray
    """(N, M) their log probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Rank 0's answer to a step."""

    step_id: int
    token_ids: IntArray
    """(number of rows with samples == 1,) in the order of the rows."""
    logprobs: StepLogprobs | None = None
