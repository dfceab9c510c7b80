"""Runs steps on one rank: the model shard, its KV-cache pool, the slots' state and, on rank 0, the sampler.

Start-up order: model shard, sampler, warm-up (which measures what a step needs), KV pool. Called by `workers.worker`,
from one thread; knows nothing of frames or connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from scheduler.step import Step, StepResult
from workers.batch import SlotState
from workers.config import LoadReport, WorkerConfig
from workers.errors import KVCacheMemoryError
from workers.kernels.attention import BackendName, select_backend
from workers.kv_cache import KVCache
from workers.layers.attention import AttentionMetadata
from workers.model_config import load_model_config
from workers.models.decoder import CausalLM
from workers.parallel import TensorParallel
from workers.sampler import Sampled, Sampler, to_step_logprobs
from workers.shard_plan import plan_shards
from workers.weights import load_weights, randomize_weights


class StepOutcome:
    """A step that has been queued on the device; `wait` may be called from another thread."""

    def __init__(self, step_id: int, sampled: Sampled | None) -> None:
        self._step_id = step_id
        self._event: torch.cuda.Event | None = None
        self._logprobs = None if sampled is None else sampled.logprobs
        token_ids = torch.empty(0, dtype=torch.int64) if sampled is None else sampled.token_ids
        if token_ids.is_cuda:
            self._token_ids = torch.empty(token_ids.shape, dtype=torch.int64, pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._token_ids = token_ids

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        if self._event is not None:
            self._event.synchronize()
        logprobs = None if self._logprobs is None else to_step_logprobs(self._logprobs)
        return StepResult(step_id=self._step_id, token_ids=self._token_ids.int().numpy(), logprobs=logprobs)


class ModelRunner:
    """One rank's share of the model. `load`, then `allocate`, then any number of `execute`."""

    def __init__(self, config: WorkerConfig, tp: TensorParallel, device: torch.device) -> None:
        self._config = config
        self._tp = tp
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._model_config = load_model_config(Path(config.model_path))
        model = self._model_config
        self._shard = plan_shards(
            num_q_heads=model.num_attention_heads,
            num_kv_heads=model.num_key_value_heads,
            intermediate_size=model.intermediate_size,
            vocab_size=model.vocab_size,
            world_size=config.world_size,
        )[tp.rank]
        self._backend = select_backend(cast(BackendName, config.attention_backend), device, config.block_size)
        self._slots = SlotState(config.max_num_seqs, config.max_model_len, config.block_size, device)
        self._kv_cache: KVCache | None = None

    @torch.inference_mode()
    def load(self, on_progress: Callable[[float], None]) -> LoadReport:
        """Build the shard, fill it with weights, and measure how many KV-cache blocks fit beside it."""
        start = time.monotonic()
        config, model = self._config, self._model_config
        self._model = CausalLM(model, self._shard, self._tp, self._backend, self._dtype, self._device)
        if config.load_format == "dummy":
            randomize_weights(self._model, seed=0)
        else:
            load_weights(self._model, Path(config.model_path), on_progress)
        self._sampler = Sampler(
            max_num_seqs=config.max_num_seqs,
            num_valid_tokens=min(config.num_valid_tokens or model.vocab_size, model.vocab_size),
            device=self._device,
        )
        num_kv_blocks = config.num_kv_blocks if config.num_kv_blocks is not None else self._num_fitting_blocks()
        is_cuda = self._device.type == "cuda"
        return LoadReport(
            rank=self._tp.rank,
            device_name=torch.cuda.get_device_name(self._device) if is_cuda else "CPU",
            attention_backend=self._backend.name,
            num_kv_blocks=num_kv_blocks,
            weight_bytes=sum(p.numel() * p.element_size() for p in self._model.parameters()),
            load_s=time.monotonic() - start,
        )

    @torch.inference_mode()
    def allocate(self, num_kv_blocks: int) -> None:
        """Make the pool, of the size that all ranks have agreed on. Raises KVCacheMemoryError if it does not fit."""
        try:
            self._kv_cache = self._new_kv_cache(num_kv_blocks)
        except torch.OutOfMemoryError as error:
            wanted = num_kv_blocks * self._bytes_per_block() / 2**30
            raise KVCacheMemoryError(
                f"rank {self._tp.rank}: a KV cache of {num_kv_blocks} blocks needs {wanted:.2f} GiB, and "
                f"{torch.cuda.mem_get_info(self._device)[0] / 2**30:.2f} GiB are free: lower num_kv_blocks or "
                f"memory_fraction"
            ) from error

    @torch.inference_mode()
    def execute(self, step: Step) -> StepOutcome | None:
        """Queue one step on the device. Rank 0 returns where its tokens will be; the others return None."""
        assert self._kv_cache is not None
        batch = self._slots.prepare(step)
        hidden = self._model(batch.input_ids, batch.positions, self._kv_cache, batch.metadata)
        is_first = self._tp.rank == 0
        if is_first:
            self._sampler.take_slots(step.new_slots)
        if not step.samples.any():
            return StepOutcome(step.step_id, None) if is_first else None
        logits = self._model.compute_logits(hidden[batch.last_token_indices])
        sampled = self._sample(logits, step) if logits is not None else None
        if sampled is None:
            token_ids = torch.empty(len(batch.sampled_slots), dtype=torch.int64, device=self._device)
        else:
            token_ids = sampled.token_ids
        self._slots.remember(batch, self._tp.broadcast(token_ids))
        return StepOutcome(step.step_id, sampled) if is_first else None

    def _sample(self, logits: Tensor, step: Step) -> Sampled:
        rows = step.samples.astype(bool)
        return self._sampler.sample(logits, self._sampler.prepare(step.slots[rows], step.seq_lens[rows]))

    def _bytes_per_block(self) -> int:
        return KVCache.bytes_per_block(
            num_layers=self._model_config.num_hidden_layers,
            block_size=self._config.block_size,
            num_kv_heads=self._shard.kv_heads.size,
            head_dim=self._model_config.head_dim,
            dtype=self._dtype,
        )

    def _new_kv_cache(self, num_blocks: int) -> KVCache:
        return KVCache.allocate(
            num_layers=self._model_config.num_hidden_layers,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            num_kv_heads=self._shard.kv_heads.size,
            head_dim=self._model_config.head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    def _num_fitting_blocks(self) -> int:
        if self._device.type != "cuda":
            fitting = self._config.cpu_kv_cache_bytes // self._bytes_per_block()
            most = self._config.max_num_seqs * -(-self._config.max_model_len // self._config.block_size)
            return max(1, min(fitting, most))
        self._warm_up()
        free, total = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats(self._device)
        # What one step needs beyond what is resident must stay free beside the pool.
        step_bytes = stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
        available = int(total * self._config.memory_fraction) - (total - free) - step_bytes
        num_blocks = available // self._bytes_per_block()
        if num_blocks < 1:
            raise KVCacheMemoryError(
                f"rank {self._tp.rank}: no memory is left for the KV cache: of {total / 2**30:.1f} GiB the weights and "
                f"other processes hold {(total - free) / 2**30:.1f} and a step needs {step_bytes / 2**30:.1f}, while "
                f"memory_fraction={self._config.memory_fraction} of it is ours: "
                f"raise memory_fraction, lower max_num_batched_tokens, or use more ranks"
            )
        return int(num_blocks)

    def _warm_up(self) -> None:
        """Run the largest step that can come, on a pool of one block, so that its memory can be measured."""
        num_tokens = self._config.max_num_batched_tokens
        seq_len = min(num_tokens, self._config.max_model_len)
        num_seqs = max(1, num_tokens // seq_len)
        num_tokens = num_seqs * seq_len
        num_logits = min(self._config.max_num_seqs, num_tokens)
        metadata = AttentionMetadata(
            slot_mapping=self._int_tensor([-1]).expand(num_tokens).contiguous(),
            cu_seqlens_q=self._int_tensor(range(0, num_tokens + 1, seq_len)),
            seq_lens=self._int_tensor([seq_len] * num_seqs),
            block_tables=self._int_tensor([[0] * -(-seq_len // self._config.block_size)] * num_seqs),
            max_seqlen_q=seq_len,
            max_seqlen_k=seq_len,
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        hidden = self._model(tokens, tokens, self._new_kv_cache(1), metadata)
        logits = self._model.compute_logits(hidden[:num_logits])
        if logits is not None:
            logits.float().softmax(dim=-1)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _int_tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
