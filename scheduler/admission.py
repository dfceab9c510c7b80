"""Which sequences can be served at all. Called by `Scheduler` before it queues one."""

from __future__ import annotations

from scheduler.config import SchedulerConfig
from scheduler.errors import RequestError
from scheduler.sequence import Sequence


def check_admission(seq: Sequence, config: SchedulerConfig) -> None:
    """Raises RequestError if the sequence can never be served, whatever else runs."""
    num_tokens = seq.num_prompt_tokens
    if num_tokens == 0:
        raise RequestError("the prompt is empty: it must have at least one token")
    if num_tokens >= config.max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, but max_model_len={config.max_model_len} leaves room for "
            f"{config.max_model_len - 1} and one generated: shorten it or raise max_model_len"
        )
    if num_tokens >= config.num_kv_tokens:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, but the KV cache holds {config.num_kv_tokens} "
            f"({config.num_kv_blocks} blocks of {config.block_size}), one of them generated: shorten it or give "
            f"the KV cache more memory"
        )
    lowest, highest = int(seq.token_ids.min()), int(seq.token_ids.max())
    if lowest < 0 or highest >= config.vocab_size:
        culprit = lowest if lowest < 0 else highest
        raise RequestError(f"token id {culprit} is outside the vocabulary: ids go from 0 to {config.vocab_size - 1}")
