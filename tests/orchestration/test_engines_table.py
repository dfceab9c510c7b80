"""What `raytp engines` says of an engine's load."""

from __future__ import annotations

from raytp.cli.engines import _load
from raytp.outputs import EngineDescription
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler


def test_the_kv_cache_is_that_of_the_present_ranks() -> None:
    limits = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "vocab_size": 9}
    scheduler = Scheduler(SchedulerConfig(num_kv_blocks=10, **limits))
    scheduler.replace_pool(40)
    description = EngineDescription(
        name="e", model_name="m", model_digest="", num_ranks=1, stage="ready", stats=scheduler.stats()
    )
    assert _load(description) == "0 running, 0 waiting, KV cache 0%"
