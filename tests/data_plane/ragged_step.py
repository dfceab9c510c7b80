"""A step of sequences of any lengths over a paged cache, and its attention written out. For tests of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.kernels.attention import AttentionBackend
from workers.layers.attention import AttentionMetadata

GPU_OR_CPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCHES = {
    "decode": [(1, 1), (1, 2), (1, 16), (1, 17), (1, 300), (1, 8192)],
    "prefill": [(1, 1), (5, 5), (16, 16), (257, 257), (512, 512)],
    "chunks": [(3, 4), (16, 32), (100, 1000), (512, 8000)],
    "mixed": [(1, 77), (31, 31), (1, 4097), (64, 200), (2, 2)],
}
"""(rows in this step, keys) of each sequence."""


class Step:
    """Random queries over a random cache; slots that no sequence owns hold NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        num_blocks: int = 0,
        device: torch.device = GPU_OR_CPU,
        num_shared_blocks: int | None = None,
    ) -> None:
        """`lengths`: as in BATCHES; `heads`: query and kv heads; `num_blocks`: at least.

        `num_shared_blocks`: of the first sequence, with which all others begin as well, but for those without keys.
        """
        generator = torch.Generator().manual_seed(0)
        blocks_of = [-(-seq_len // block_size) for _, seq_len in lengths]
        num_blocks = max(num_blocks, sum(blocks_of) + 3)
        # The highest ids of all are in use, and the lowest are not.
        order = num_blocks - 1 - torch.randperm(sum(blocks_of), generator=generator)
        tables = torch.zeros(len(lengths), max(blocks_of) + 2, dtype=torch.int32)
        shape = (2, num_blocks, block_size, heads[1], head_dim)
        self.caches = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.keys: list[Tensor] = []
        for row, (blocks, (q_len, seq_len)) in enumerate(zip(order.split(blocks_of), lengths, strict=True)):
            tables[row, : len(blocks)] = blocks
            kv = torch.randn(2, seq_len, heads[1], head_dim, generator=generator).to(device, dtype)
            if row and num_shared_blocks and seq_len:
                num_keys = num_shared_blocks * block_size
                # Decoding rows' own tables lead to NaN there: shared blocks are to be read by the first one's.
                tables[row, :num_shared_blocks] = tables[0, :num_shared_blocks] if q_len > 1 else 0
                kv[:, :num_keys] = self.keys[0][:, :num_keys]
            slots = (blocks.unsqueeze(1) * block_size + torch.arange(block_size)).flatten()[:seq_len]
            self.caches.flatten(1, 2)[:, slots.to(device)] = kv
            self.keys.append(kv)
        self.q_lens = [q_len for q_len, _ in lengths]
        starts = torch.tensor([0, *self.q_lens]).cumsum(0).int()
        # As a fused projection hands them over: each token's heads side by side, the tokens apart.
        rows = torch.randn(int(starts[-1]), heads[0] + 2, head_dim, generator=generator)
        self.q = rows.to(device, dtype)[:, : heads[0]]
        self.metadata = AttentionMetadata(
            slot_mapping=torch.full((len(self.q),), -1, dtype=torch.int32, device=device),
            cu_seqlens_q=starts.to(device),
            seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            max_seqlen_q=max(self.q_lens),
            max_seqlen_k=max(seq_len for _, seq_len in lengths),
            num_shared_blocks=None
            if num_shared_blocks is None
            else torch.tensor([num_shared_blocks], dtype=torch.int32, device=device),
        )

    def run(self, backend: AttentionBackend) -> Tensor:
        return backend.forward(self.q, self.caches[0], self.caches[1], self.metadata, self.q.shape[-1] ** -0.5)

    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        """Each sequence's queries in float32, and its keys and values."""
        return list(zip(self.q.float().split(self.q_lens), self.keys, strict=True))

    def expected(self) -> Tensor:
        """softmax(q k^T / sqrt(D)) v in float32, a sequence at a time; zeros where there are no keys."""
        outputs = []
        for q, kv in self.sequences():
            if kv.shape[1] == 0:
                outputs.append(torch.zeros_like(q))
                continue
            k, v = kv.float().repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            is_future = torch.ones(scores.shape[1:], device=q.device).triu(len(k) - len(q) + 1).bool()
            weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outputs)
