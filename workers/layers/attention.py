"""The description of a step that attention works from.

Built by `workers.batch` (and by `workers.decode_graph` and `workers.prefill_graph` for captured steps), handed through
the model's forward to the backends of `workers.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Where the T tokens of a step lie among its S sequences and in the cache. Tensors are int32, on the device.

    Row i of a sequence with q_len rows in this step stands at position seq_len - q_len + i, and sees all up to it.
    """

    slot_mapping: Tensor
    """(T,) block id * P + offset where a token's key and value go; -1 writes nothing."""
    cu_seqlens_q: Tensor
    """(S + 1,) where each sequence's rows begin, and T."""
    seq_lens: Tensor
    """(S,) keys of each sequence, this step's included."""
    block_tables: Tensor
    """(S, B) ids of each sequence's blocks; what lies beyond its seq_len is any valid id."""
    max_seqlen_q: int | None
    """None: known on the device alone, in a captured step."""
    max_seqlen_k: int
    num_shared_blocks: Tensor | None = None
    """(1,) blocks with which all sequences begin; each has a key more. A backend may read those once for all of them,
    or take no notice."""
