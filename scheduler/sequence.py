"""One request's state in the control plane: its tokens, its blocks, and how far it has been computed.

Changed by `Scheduler` and `BlockManager` alone. Knows nothing of text, of requests with several completions, or of
whoever waits for the result.
"""

from __future__ import annotations

import enum

import numpy as np

from scheduler.sampling_params import ResolvedSampling
from scheduler.step import IntArray


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """A prompt and what has been generated after it.

    Known tokens are those in `token_ids`. A token that a sent step will sample is *pending*: it counts towards the
    sequence's length, but its id is not known here yet.
    """

    __slots__ = (
        "_tokens",
        "block_hashes",
        "block_table",
        "cache_salt",
        "has_sampled_in_slot",
        "max_length",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "sampling",
        "seq_id",
        "slot",
        "status",
        "stop_token_ids",
    )

    def __init__(self, seq_id: int, prompt: IntArray, sampling: ResolvedSampling, cache_salt: str = "") -> None:
        """`prompt`: (n,) int32 token ids. `cache_salt`: only sequences of the same salt share cached blocks."""
        self.seq_id = seq_id
        self.sampling = sampling
        self.cache_salt = cache_salt
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.status = SequenceStatus.WAITING
        self._tokens: IntArray = np.array(prompt, dtype=np.int32)
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self.num_pending_tokens = 0
        self.max_length = len(prompt) + sampling.max_tokens
        """Known and pending tokens after which no more are sampled; the scheduler lowers it to `max_model_len`."""
        self.num_computed_tokens = 0
        """Tokens whose keys and values exist or are being written by a step already sent."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the prefix cache served when the sequence first ran; None before that."""
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []
        """Hashes of the leading full blocks, computed once each."""
        self.num_hashed_blocks = 0
        """Leading blocks of `block_table` whose hash is published."""
        self.slot: int | None = None
        self.has_sampled_in_slot = False
        """Whether the ranks hold this sequence's last token in its slot."""

    @property
    def token_ids(self) -> IntArray:
        """(num_tokens,) int32: every known token, prompt first. A view; do not keep it."""
        return self._tokens[: self.num_tokens]

    @property
    def length(self) -> int:
        """Known and pending tokens."""
        return self.num_tokens + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Known generated tokens."""
        return self.num_tokens - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """Add one generated token; amortised O(1)."""
        if self.num_tokens == len(self._tokens):
            grown = np.empty(2 * self.num_tokens + 16, dtype=np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def block_token_bytes(self, index: int, block_size: int) -> bytes:
        """The tokens of full block `index` as int32 bytes: what is hashed and what confirms a hit."""
        return self._tokens[index * block_size : (index + 1) * block_size].tobytes()
