"""Cuts the keys of a decode step into equal shares, on the GPU, and holds what the programs leave each other.

The keys of all sequences and kv heads form one line, [sequence][kv head][key], measured in units of `UNIT` keys. A
fixed number of programs cut it into equal shares, so a batch of any raggedness, or a single sequence, fills the GPU,
and a CUDA graph captured once holds for all lengths. Keys that all sequences share may be left out, and are
`workers.kernels.shared_prefix`'s then. Done once for all layers of a step. Called by
`workers.kernels.triton_backend`; read by `workers.kernels.triton_decode`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

UNIT = 16
"""Keys in the smallest piece of work."""
PLAN_COLUMNS = 8
_INTERPRETED_NUM_SMS = 3


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the work is laid out on the GPU; changes speed only."""

    tile: int = 32
    """Keys that a program works on at a time."""
    num_warps: int = 2
    num_stages: int = 3
    programs_per_sm: int = 4
    min_units: int = 8
    """No program gets less, unless more multiprocessors have work that way: combining costs, too."""


class DecodeWorkspace:
    """The plan and the partial results of one model's decode steps; every step and layer uses it again.

    Steps that share it must run on one stream. To be made outside of a CUDA graph capture: the counters start at
    zero, and each launch leaves them so.
    """

    def __init__(
        self, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, config: DecodeConfig
    ) -> None:
        num_sms = _INTERPRETED_NUM_SMS
        if device.type == "cuda":
            assert not torch.cuda.is_current_stream_capturing()
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.config = config
        self.num_sms = num_sms
        self.num_programs = num_sms * config.programs_per_sm
        self.num_kv_heads = num_kv_heads
        self.group = num_q_heads // num_kv_heads
        # A program leaves up to two partial results: of the item that its share begins in, and of the one it ends in.
        num_parts = 2 * self.num_programs
        self.plan = torch.zeros(self.num_programs, PLAN_COLUMNS, dtype=torch.int32, device=device)
        self.parts = torch.empty(num_parts, self.group, head_dim, dtype=torch.float32, device=device)
        self.peaks = torch.empty(num_parts, self.group, dtype=torch.float32, device=device)
        self.sums = torch.empty_like(self.peaks)
        self.counters = torch.zeros(self.num_programs, dtype=torch.int32, device=device)

    def fits(self, q: Tensor, k_cache: Tensor) -> bool:
        """Whether it was made for queries (T, H, D) and caches (N, P, K, D) like these."""
        num_kv_heads, head_dim = k_cache.shape[2:]
        group = q.shape[1] // num_kv_heads
        shape = (2 * self.num_programs, group, head_dim)
        return self.num_kv_heads == num_kv_heads and self.parts.shape == shape and self.parts.device == q.device


@triton.jit
def _units(  # type: ignore[no-untyped-def]
    seq_lens_ptr, rows_ptr, sequences, num_seqs, num_shared, UNIT: tl.constexpr, IS_MIXED: tl.constexpr
):
    """Units of each sequence's own keys; none of a padding row, which would cost as much time as a short sequence."""
    is_real = sequences < num_seqs
    num_keys = tl.load(seq_lens_ptr + sequences, mask=is_real, other=0) - num_shared
    units = tl.cdiv(tl.maximum(num_keys, 0), UNIT)
    if IS_MIXED:
        start = tl.load(rows_ptr + sequences, mask=is_real, other=0)
        stop = tl.load(rows_ptr + sequences + 1, mask=is_real, other=0)
        units = tl.where(stop - start == 1, units, 0)
    return units


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "num_sms"])
def _plan_kernel(  # type: ignore[no-untyped-def]
    seq_lens_ptr,
    rows_ptr,
    num_shared_blocks_ptr,
    plan_ptr,
    num_seqs,
    num_programs,
    num_sms,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    UNIT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    IS_MIXED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    num_shared = 0
    if num_shared_blocks_ptr is not None:
        num_shared = tl.load(num_shared_blocks_ptr) * P
    total = 0
    for start in range(0, num_seqs, BLOCK_S):
        sequences = start + tl.arange(0, BLOCK_S)
        total += tl.sum(_units(seq_lens_ptr, rows_ptr, sequences, num_seqs, num_shared, UNIT, IS_MIXED)) * HEADS
    share = tl.maximum(tl.cdiv(total, num_programs), tl.minimum(tl.cdiv(total, num_sms), MIN_UNITS))

    programs = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    begins = programs * share
    sequence = tl.zeros([BLOCK_P], tl.int32)
    sequence_begin = tl.zeros([BLOCK_P], tl.int32)
    before = 0
    for start in range(0, num_seqs, BLOCK_S):
        sequences = start + tl.arange(0, BLOCK_S)
        units = _units(seq_lens_ptr, rows_ptr, sequences, num_seqs, num_shared, UNIT, IS_MIXED) * HEADS
        ends = before + tl.cumsum(units)
        is_past = (ends[None, :] <= begins[:, None]) & (sequences < num_seqs)[None, :]
        sequence += tl.sum(is_past.to(tl.int32), 1)
        sequence_begin = tl.maximum(sequence_begin, tl.max(tl.where(is_past, ends[None, :], 0), 1))
        before += tl.sum(units)

    todo = tl.minimum(tl.maximum(total - begins, 0), share)
    is_program = programs < num_programs
    seq_len = tl.load(seq_lens_ptr + sequence, mask=is_program & (todo > 0), other=0)
    row_ptr = plan_ptr + programs * COLUMNS
    tl.store(row_ptr, sequence, mask=is_program)
    tl.store(row_ptr + 1, begins - sequence_begin, mask=is_program)
    tl.store(row_ptr + 2, seq_len, mask=is_program)
    tl.store(row_ptr + 3, todo, mask=is_program)
    tl.store(row_ptr + 4, share, mask=is_program)


def plan_decode(
    seq_lens: Tensor,
    workspace: DecodeWorkspace,
    cu_seqlens_q: Tensor | None = None,
    num_shared_blocks: Tensor | None = None,
    block_size: int = 1,
) -> None:
    """Cut a step's work into the programs' shares, on the device, and leave them in `workspace.plan`.

    seq_lens (S,) int32 may be 0. With cu_seqlens_q (S + 1,) int32, sequences with other than one row are left out;
    with num_shared_blocks (1,) int32, so are as many keys of each as those hold, of which it must have more.
    """
    block_p = 16
    _plan_kernel[(triton.cdiv(workspace.num_programs, block_p),)](
        seq_lens,
        seq_lens if cu_seqlens_q is None else cu_seqlens_q,
        num_shared_blocks,
        workspace.plan,
        len(seq_lens),
        workspace.num_programs,
        workspace.num_sms,
        HEADS=workspace.num_kv_heads,
        P=block_size,
        UNIT=UNIT,
        MIN_UNITS=workspace.config.min_units,
        IS_MIXED=cu_seqlens_q is not None,
        BLOCK_S=512,
        BLOCK_P=block_p,
        COLUMNS=PLAN_COLUMNS,
    )
