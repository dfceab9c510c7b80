"""The least time that a case can take on given hardware, whatever the engine does.

Pure arithmetic. Called by `raytp.bench.run`, which puts it next to what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from raytp.bench.workloads import Case
from workers.model_config import ModelConfig, kv_bytes_per_token, num_parameters

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2}
"""The types that the measured rates are for."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one GPU was measured to do."""

    bytes_per_s: float
    """Of a copy, read and written bytes together."""
    flop_per_s: float
    """Of a large bf16 matrix product; fp16 runs at the same rate."""


_MEASURED = {"NVIDIA H200": Hardware(bytes_per_s=4.3e12, flop_per_s=790e12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds, by what they are needed for."""

    weights_s: float
    kv_cache_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        """All of it, one after the other."""
        return self.weights_s + self.kv_cache_s + self.prefill_s


def hardware_of(device_names: tuple[str, ...], dtype: str) -> Hardware | None:
    """The rates of the ranks' GPU; None if they differ or were not measured."""
    return _MEASURED.get(device_names[0]) if len(set(device_names)) == 1 and dtype in _DTYPE_BYTES else None


def compute_floor(
    model: ModelConfig, case: Case, *, hardware: Hardware, dtype: str, num_ranks: int, max_num_seqs: int
) -> Floor:
    """Decoding is bound by memory, prefill by arithmetic, and R ranks share both evenly:

        weights  = steps * bytes of the weights / bandwidth / R
        KV cache = sum over decode steps of the live KV bytes / bandwidth / R
        prefill  = (2 * parameters * tokens + 4 * L * H * D * pairs of query and key) / arithmetic rate / R

    The prompt's step gives the first token, so a request of n tokens out takes n - 1 decode steps; decode step k reads
    the prompt and k tokens more. The least number of steps is the longest request's, or what `max_num_seqs` rows a step
    need for all. Shared tokens are computed once, and count once in a step's live bytes. All parameters count, as is
    the custom, although the rows of an untied input embedding are not all read.
    """
    shared = case.num_shared_tokens
    own_lens = [len(prompt) - shared for prompt in case.prompts]
    decodes = [length - 1 for length in case.output_lens]
    num_steps = max(*decodes, -(-sum(decodes) // max_num_seqs))
    num_live = shared * num_steps
    num_live += sum(own * n + _triangle(n) for own, n in zip(own_lens, decodes, strict=True))
    num_computed = shared + sum(own_lens)
    num_pairs = _triangle(shared) + sum(_triangle(shared + own) - _triangle(shared) for own in own_lens)
    dtype_bytes = _DTYPE_BYTES[dtype]
    kv_bytes = kv_bytes_per_token(model, model.num_key_value_heads, dtype_bytes)
    flop_per_pair = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
    bytes_per_s, flop_per_s = hardware.bytes_per_s * num_ranks, hardware.flop_per_s * num_ranks
    return Floor(
        weights_s=num_steps * num_parameters(model) * dtype_bytes / bytes_per_s,
        kv_cache_s=num_live * kv_bytes / bytes_per_s,
        prefill_s=(2 * num_parameters(model) * num_computed + flop_per_pair * num_pairs) / flop_per_s,
    )


def _triangle(n: int) -> int:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2
