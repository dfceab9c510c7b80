"""How much of a GPU's memory is left for the KV cache, by measurement rather than by formula.

Called by `workers.model_runner` while it starts, after the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from scheduler.step import SlotSampling
from workers.errors import KVCacheMemoryError

if TYPE_CHECKING:
    from workers.decode_graph import DecodeGraphs
    from workers.prefill_graph import PrefillGraphs


def largest_step(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Lengths of prompts that fill a step with as many tokens as it can have."""
    num_tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    num_longest, rest = divmod(num_tokens, max_model_len)
    return [max_model_len] * num_longest + ([rest] if rest else [])


def measure_step_bytes(device: torch.device, run_largest_step: Callable[[], None]) -> int:
    """What the largest step needs at its peak, beyond what is resident."""
    run_largest_step()  # libraries make their work spaces at first use, and keep them
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    resident = torch.cuda.memory_allocated(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return int(peak - resident)


def every_filter(slot: int) -> SlotSampling:
    """Settings that ask the sampler for all that it can do, and so for the most memory."""
    nothing = np.zeros(0, dtype=np.int32)
    return SlotSampling(
        slot=slot,
        num_prompt_tokens=1,
        temperature=1.0,
        top_k=0,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        seed=0,
        min_tokens=0,
        logprobs=0,
        stop_token_ids=nothing,
        history=nothing,
    )


def measure_graph_bytes(device: torch.device, graphs: DecodeGraphs | PrefillGraphs) -> int:
    """What all these graphs together will take, at most, from the two largest sizes: the first owns the pool."""
    largest, next_largest = graphs.sizes[-1], graphs.sizes[:-1][-1:]
    free_before, _ = torch.cuda.mem_get_info(device)
    graphs.capture([largest], lambda fraction: None)
    free_between, _ = torch.cuda.mem_get_info(device)
    graphs.capture(next_largest, lambda fraction: None)
    free_after, _ = torch.cuda.mem_get_info(device)
    return (free_before - free_between) + (free_between - free_after) * (graphs.num_graphs - 1)


def num_fitting_blocks(
    device: torch.device, rank: int, memory_fraction: float, step_bytes: int, graph_bytes: int, block_bytes: int
) -> int:
    """KV-cache blocks that fit in what is left. Raises KVCacheMemoryError if that is none, with what would help."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * memory_fraction)
    used = total - free
    num_blocks = (budget - used - step_bytes - graph_bytes) // block_bytes
    if num_blocks < 1:
        gib = {
            "budget": budget / 2**30,
            "used": used / 2**30,
            "step": step_bytes / 2**30,
            "graphs": graph_bytes / 2**30,
            "block": block_bytes / 2**30,
        }
        raise KVCacheMemoryError(
            "rank {rank}: no memory is left for the KV cache: memory_fraction={fraction} allows {budget:.2f} GiB, of "
            "which weights and other processes hold {used:.2f}, a step of max_num_batched_tokens needs {step:.2f} and "
            "CUDA graphs {graphs:.2f}, and one block takes {block:.4f}: raise memory_fraction, lower "
            "max_num_batched_tokens or max_num_seqs, or use more ranks".format(
                rank=rank, fraction=memory_fraction, **gib
            )
        )
    return num_blocks
