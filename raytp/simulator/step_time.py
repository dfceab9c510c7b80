"""How long a step takes: a sum of terms, each a quantity of the step times a coefficient of the GPU.

The coefficients come from `raytp.simulator.fit`. Called by `raytp.simulator.replica`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from raytp.simulator.hardware import ShardSizes
from scheduler.step import Step

Floats: TypeAlias = npt.NDArray[np.float64]
Amount: TypeAlias = float | Floats
"""Of one step, or an array with an item for each of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """What one kind of GPU, with its host, was measured to take."""

    bytes_per_s: float
    """At which weights and the KV cache are read."""
    flop_per_s: float
    """Of the matrix products."""
    layer_s: float
    """Of a layer, whatever it computes: the launches of its kernels, and their shortest times."""
    eager_layer_s: float
    """More than that in a step with prompt tokens, which no CUDA graph replays if it is large."""
    eager_parallel_layer_s: float
    """More than that if there are several ranks."""
    shared_byte_s: float
    """Of KV cache that another row of the step reads, too: it comes out of the GPU's own cache."""
    pair_flop_s: float
    """Of an operation of attention among prompt tokens."""
    all_reduce_layer_s: float
    """Of a layer's two sums over ranks, whatever their size."""
    all_reduce_byte_s: float
    request_s: float
    """Of taking a request in and giving its answer back, on the CPU."""
    driver_step_s: float
    """CPU time of the driver for a step; it passes while the GPU computes."""
    driver_row_s: float
    driver_prompt_token_s: float
    memory_bytes: float
    """Of a GPU, for weights and KV cache."""
    row_layer_s: float = 0.0
    """Of a layer, for each row, where attention takes them one by one."""
    dtype_bytes: float = 2
    """Of a weight and of a cached value, in the type that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What a step, or each of many, has to do. Counts are of the whole model, not of one rank."""

    num_rows: Amount
    num_tokens: Amount
    num_samples: Amount
    num_prompt_tokens: Amount
    """Of rows with more than one token."""
    num_kv_tokens: Amount
    """Whose keys and values rows of one token read."""
    num_pairs: Amount
    """Of query and key, in rows of more than one token."""


def load_of(step: Step) -> StepLoad:
    """Read off a step."""
    counts, ends = step.num_scheduled_tokens.astype(np.int64), step.seq_lens.astype(np.int64)
    is_prompt = counts > 1
    starts = ends - counts
    return StepLoad(
        num_rows=len(counts),
        num_tokens=int(counts.sum()),
        num_samples=int(step.samples.sum()),
        num_prompt_tokens=int(counts[is_prompt].sum()),
        num_kv_tokens=int(ends[~is_prompt].sum()),
        num_pairs=int((counts * starts + counts * (counts + 1) // 2)[is_prompt].sum()),
    )


class StepTimes:
    """The time of steps of one model on one kind of GPU.

    matrices     = max(weights / bandwidth, operations / arithmetic rate)          (the roofline)
    KV cache     = bytes / bandwidth, for bytes that one row alone reads, and bytes * a coefficient for shared ones
    attention    = operations among prompt tokens * a coefficient
    all-reduce   = layers * latency + bytes * a coefficient, for several ranks
    launches     = layers * a coefficient, larger for steps with prompt tokens
    rows         = layers * rows * a coefficient, 0 on a GPU
    """

    def __init__(
        self, coefficients: Coefficients, sizes: ShardSizes, block_size: int, *, slower_by_s: float = 0.0
    ) -> None:
        """`slower_by_s`: what every step takes more than that."""
        self.coefficients = coefficients
        self._sizes = sizes
        self._block_size = block_size
        self._decode_layers_s = sizes.num_layers * coefficients.layer_s + slower_by_s
        if sizes.num_ranks > 1:
            self._decode_layers_s += sizes.num_layers * coefficients.all_reduce_layer_s
        eager_layer_s = coefficients.eager_layer_s
        if sizes.num_ranks > 1:
            eager_layer_s += coefficients.eager_parallel_layer_s
        self._eager_s = sizes.num_layers * eager_layer_s
        self._row_s = sizes.num_layers * coefficients.row_layer_s
        self._weights_s = sizes.weight_bytes / coefficients.bytes_per_s

    def slowed(self, seconds: float) -> StepTimes:
        """The same for a GPU on which every step takes so much longer."""
        return StepTimes(self.coefficients, self._sizes, self._block_size, slower_by_s=seconds)

    def gpu_s(self, load: StepLoad, num_used_blocks: Amount) -> Amount:
        """Seconds on the GPU of a step, or of each of many. `num_used_blocks`: of the pool, after it was scheduled."""
        costs, sizes = self.coefficients, self._sizes
        flop = sizes.flop_per_token * load.num_tokens + sizes.flop_per_sample * load.num_samples
        seconds = self._decode_layers_s + np.maximum(self._weights_s, flop / costs.flop_per_s)
        seconds += sizes.reduced_bytes_per_token * load.num_tokens * costs.all_reduce_byte_s
        seconds += self._eager_s * (load.num_prompt_tokens > 0)
        seconds += self._row_s * load.num_rows
        seconds += sizes.flop_per_pair * load.num_pairs * costs.pair_flop_s
        shared = np.maximum(0, load.num_kv_tokens - num_used_blocks * self._block_size)
        seconds += (load.num_kv_tokens - shared) * sizes.kv_bytes_per_token / costs.bytes_per_s
        seconds += shared * sizes.kv_bytes_per_token * costs.shared_byte_s
        return cast(Amount, seconds)

    def driver_s(self, load: StepLoad, num_new_requests: int) -> Amount:
        """Seconds of the driver before a step is sent."""
        costs = self.coefficients
        work = costs.driver_row_s * load.num_rows + costs.driver_prompt_token_s * load.num_prompt_tokens
        return costs.driver_step_s + work + costs.request_s * num_new_requests


def plain_load(num_rows: int, num_kv_tokens: Floats) -> StepLoad:
    """Of steps in which each of the rows has one token."""
    return StepLoad(
        num_rows=num_rows,
        num_tokens=num_rows,
        num_samples=num_rows,
        num_prompt_tokens=0,
        num_kv_tokens=num_kv_tokens,
        num_pairs=0,
    )


def max_times(start_s: float, least_s: float, gpu_s: Floats) -> Floats:
    """Ends of the driver's turns, of which each takes as long as the step before on the GPU, and at least `least_s`.

    (n + 1,): the start, then an end for each of the n steps.
    """
    return np.cumsum(np.concatenate(([start_s], np.maximum(least_s, gpu_s))))
