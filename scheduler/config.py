"""The scheduler's limits. Made by `raytp.driver` once the ranks have agreed on the size of the KV-cache pool."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits that `Scheduler` and `BlockManager` work within. Raises ConfigError if one is below 1."""

    num_kv_blocks: int
    """Blocks in each rank's pool."""
    block_size: int
    """Tokens in a block."""
    max_num_seqs: int
    """Sequences that run at once; also the number of slots."""
    max_num_batched_tokens: int
    """Tokens in one step."""
    max_model_len: int
    """Tokens in one sequence, prompt and output together."""
    vocab_size: int
    """Token ids of a prompt are below this."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in (
            "num_kv_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "vocab_size",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_kv_blocks * self.block_size
