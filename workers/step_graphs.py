"""All CUDA graphs of a rank, which share one pool of memory since one runs at a time: see `workers.prefill_graph` and
`workers.decode_graph`. Called by `workers.model_runner`; brings Triton, which a CPU can do without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.batch import SlotState
from workers.decode_graph import DecodeGraphs
from workers.device_memory import measure_graph_bytes
from workers.kv_cache import KVCache
from workers.models.decoder import CausalLM
from workers.parallel_sampler import ParallelSampler
from workers.prefill_graph import PrefillGraphs


class StepGraphs:
    """The graphs for steps with prompt tokens, and those for steps of decoding rows alone."""

    def __init__(
        self,
        model: CausalLM,
        sampler: ParallelSampler,
        slots: SlotState,
        kv_cache: KVCache,
        max_num_batched_tokens: int,
    ) -> None:
        pool = torch.cuda.graph_pool_handle()
        self.prefill = PrefillGraphs(model, slots, kv_cache, max_num_batched_tokens, pool)
        self.decode = DecodeGraphs(model, sampler, slots, kv_cache, pool)

    def capture(self, on_progress: Callable[[float], None]) -> None:
        """Capture all of them; those for prompts, which need most memory, first."""
        self.prefill.capture(self.prefill.sizes, lambda fraction: on_progress(fraction / 2))
        self.decode.capture(self.decode.sizes, lambda fraction: on_progress((1 + fraction) / 2))

    def measure_bytes(self, device: torch.device) -> int:
        """What all of them will take, by capturing some.

        Those for decoding first: each keeps its logits, which must not be found in memory that another one has left.
        """
        return measure_graph_bytes(device, self.decode) + measure_graph_bytes(device, self.prefill)
