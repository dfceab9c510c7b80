"""Runs steps on one rank: the model shard, its KV-cache pool, the slots' state and the sampler.

Start-up order: model shard, sampler, warm-up (which measures what a step needs), KV pool, CUDA graphs. Called by
`workers.worker`, from one thread; knows nothing of frames or connections.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from scheduler.step import IntArray, Step, StepResult
from workers.batch import SlotState, to_device
from workers.config import LoadReport, WorkerConfig
from workers.device_memory import every_filter, largest_step, measure_step_bytes, num_fitting_blocks
from workers.errors import KVCacheMemoryError
from workers.host_memory import peak_resident_bytes, resident_bytes
from workers.kernels.attention import select_backend
from workers.kv_cache import KVCache
from workers.layers.attention import AttentionMetadata
from workers.model_config import kv_bytes_per_token, load_model_config
from workers.models.decoder import CausalLM
from workers.parallel import TensorParallel
from workers.parallel_sampler import ParallelSampler
from workers.sampler import LogprobTensors, Sampler, to_step_logprobs
from workers.shard_plan import plan_shards
from workers.shared_blocks import SharedBlocks, min_spared_keys
from workers.weights import load_weights, randomize_weights

if TYPE_CHECKING:
    from workers.step_graphs import StepGraphs


_NUM_TOKENS = (16, 32, 64, 128, 160, 192, 256)
"""Of a step: up to each of them, and to no number between, linear layers use another kernel."""


class StepOutcome:
    """A step that has been queued on the device; `wait` may be called from another thread."""

    def __init__(self, step_id: int, token_ids: Tensor, logprobs: LogprobTensors | None) -> None:
        """`token_ids` (N,) int64 may be overwritten by the next step: they are copied, in the device's own order."""
        self._step_id = step_id
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._token_ids = torch.empty(token_ids.shape, dtype=torch.int64, pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

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
        self._backend = select_backend(config.attention_backend, device, config.block_size, self._dtype)
        self._slots = SlotState(config.max_num_seqs, config.max_model_len, config.block_size, device)
        self._shared_blocks = SharedBlocks(
            config.max_num_seqs, config.max_model_len, config.block_size, min_spared_keys(model, config.world_size)
        )
        self._kv_cache: KVCache | None = None
        self._graphs: StepGraphs | None = None

    @torch.inference_mode()
    def load(self, on_progress: Callable[[float], None]) -> LoadReport:
        """Build the shard, fill it with weights, and measure how many KV-cache blocks fit beside it."""
        start = time.monotonic()
        config, model = self._config, self._model_config
        self._model = CausalLM(model, self._shard, self._tp, self._backend, self._dtype, self._device)
        self._model.reduction.use_peer_memory(config.max_num_seqs, model.hidden_size, self._dtype)
        host_bytes = resident_bytes()
        if config.load_format == "dummy":
            randomize_weights(self._model, seed=0)
            on_progress(1.0)
        else:
            load_weights(self._model, Path(config.model_path), on_progress)
        peak_host_bytes = max(0, peak_resident_bytes() - host_bytes)
        self._sampler = self._new_sampler()
        is_cuda = self._device.type == "cuda"
        tiny = self._new_kv_cache(1)
        if is_cuda:
            self._warm_up(tiny)
        num_kv_blocks = config.num_kv_blocks if config.num_kv_blocks is not None else self._num_fitting_blocks(tiny)
        return LoadReport(
            rank=self._tp.rank,
            device_name=torch.cuda.get_device_name(self._device) if is_cuda else "CPU",
            attention_backend=self._backend.name,
            num_kv_blocks=num_kv_blocks,
            weight_bytes=sum(p.numel() * p.element_size() for p in self._model.parameters()),
            peak_host_bytes=peak_host_bytes,
            load_s=time.monotonic() - start,
        )

    @torch.inference_mode()
    def allocate(self, num_kv_blocks: int, on_progress: Callable[[float], None]) -> None:
        """Make the pool, of the size that all ranks have agreed on, and capture steps on it.

        Raises KVCacheMemoryError if it does not fit.
        """
        try:
            self._kv_cache = self._new_kv_cache(num_kv_blocks)
        except RuntimeError as error:  # as torch.OutOfMemoryError is on a GPU, and all that a CPU's allocator raises
            wanted = num_kv_blocks * self._bytes_per_block() / 2**30
            raise KVCacheMemoryError(
                f"rank {self._tp.rank}: a KV cache of {num_kv_blocks} blocks needs {wanted:.2f} GiB: lower "
                f"num_kv_blocks or memory_fraction ({error})"
            ) from error
        if self._uses_graphs:
            try:
                self._graphs = self._new_graphs(self._kv_cache)
                self._graphs.capture(on_progress)
            except torch.OutOfMemoryError as error:
                raise KVCacheMemoryError(
                    f"rank {self._tp.rank}: CUDA graphs for up to {self._config.max_num_seqs} sequences do not fit "
                    f"beside a KV cache of {num_kv_blocks} blocks: lower memory_fraction, num_kv_blocks, "
                    f"max_num_seqs or max_num_batched_tokens ({error})"
                ) from error

    @torch.inference_mode()
    def execute(self, step: Step) -> StepOutcome | None:
        """Queue one step on the device. Rank 0 returns where its tokens will be; the others return None."""
        assert self._kv_cache is not None
        self._sampler.take_slots(step.new_slots)
        samples = step.samples.astype(bool)
        slots, positions = step.slots[samples], step.seq_lens[samples]
        num_shared_blocks = 0 if self._graphs is None else self._shared_blocks.count(step)
        is_captured = self._graphs is not None and self._graphs.decode.fits(step)
        if self._graphs is not None and is_captured:
            logits, token_ids = self._graphs.decode.run(step, num_shared_blocks)
        else:
            logits, token_ids = self._run_ragged(step, self._kv_cache, slots, positions, num_shared_blocks)
        rows = self._sampler.rows_to_redraw(slots, positions)
        logprobs = self._sampler.redraw(logits, token_ids, rows, slots, positions) if rows.size else None
        if rows.size or not is_captured:
            self._slots.remember(slots, token_ids)
        return StepOutcome(step.step_id, token_ids, logprobs) if self._tp.rank == 0 else None

    def _run_ragged(
        self, step: Step, kv_cache: KVCache, slots: IntArray, positions: IntArray, num_shared_blocks: int
    ) -> tuple[Tensor, Tensor]:
        """This rank's logits (N, V/R) of the rows that sample, and their ids (N,) as if all were plain."""
        batch = self._slots.prepare(step)
        if self._graphs is not None and self._graphs.prefill.fits(step):
            hidden = self._graphs.prefill.run(batch, num_shared_blocks)
        else:
            hidden = self._model(batch.input_ids, batch.positions, kv_cache, batch.metadata)
        if len(slots) == 0:
            return hidden[:0], torch.empty(0, dtype=torch.int64, device=self._device)
        logits = self._model.compute_logits(hidden[batch.last_token_indices])
        return logits, self._draw(logits, slots, positions)

    def _draw(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Tensor:
        temperature, keys = self._sampler.plain_inputs(slots, positions)
        return self._sampler.draw(logits, to_device(temperature, self._device), to_device(keys, self._device))

    def _new_sampler(self) -> ParallelSampler:
        vocab_size = self._model_config.vocab_size
        sampler = Sampler(
            max_num_seqs=self._config.max_num_seqs,
            num_valid_tokens=min(self._config.num_valid_tokens or vocab_size, vocab_size),
            device=self._device,
        )
        return ParallelSampler(sampler, self._model, self._shard.vocab, self._tp)

    @property
    def _uses_graphs(self) -> bool:
        return self._device.type == "cuda" and self._backend.fits_graph and not self._config.enforce_eager

    def _bytes_per_block(self) -> int:
        num_kv_heads = self._shard.kv_heads.size
        return self._config.block_size * kv_bytes_per_token(self._model_config, num_kv_heads, self._dtype.itemsize)

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

    def _new_graphs(self, kv_cache: KVCache) -> StepGraphs:
        from workers.step_graphs import StepGraphs  # brings Triton, which a CPU can do without

        max_num_tokens = self._config.max_num_batched_tokens
        return StepGraphs(self._model, self._sampler, self._slots, kv_cache, max_num_tokens)

    def _num_fitting_blocks(self, tiny: KVCache) -> int:
        """`tiny`: a pool of one block, to run steps on."""
        if self._device.type != "cuda":
            fitting = self._config.cpu_kv_cache_bytes // self._bytes_per_block()
            most = self._config.max_num_seqs * -(-self._config.max_model_len // self._config.block_size)
            return max(1, min(fitting, most))
        step_bytes = measure_step_bytes(self._device, lambda: self._run_largest_step(tiny))
        graph_bytes = 0
        if self._uses_graphs:
            resident = torch.cuda.memory_allocated(self._device)
            graphs = self._new_graphs(tiny)
            graph_bytes = torch.cuda.memory_allocated(self._device) - resident + graphs.measure_bytes(self._device)
            del graphs
        return num_fitting_blocks(
            self._device, self._tp.rank, self._config.memory_fraction, step_bytes, graph_bytes, self._bytes_per_block()
        )

    def _run_largest_step(self, kv_cache: KVCache) -> None:
        """The most tokens and the most logits that a step can have, on a pool of one block."""
        config = self._config
        lengths = largest_step(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
        hidden = self._run_empty_step(lengths, kv_cache)
        logits = self._model.compute_logits(hidden[: config.max_num_seqs])
        rows = np.arange(len(logits), dtype=np.int32)
        sampler = self._new_sampler()  # its own, since it keeps what it needs for the settings that it has seen
        sampler.take_slots([every_filter(slot) for slot in rows.tolist()])
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        sampler.redraw(logits, token_ids, rows.astype(np.intp), rows, rows + 1)

    def _warm_up(self, kv_cache: KVCache) -> None:
        """Steps of every kind, so that no kernel needs to be compiled when requests come."""
        config = self._config
        slot, position = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
        prompts = [
            largest_step(min(num_tokens, config.max_num_batched_tokens), config.max_num_seqs, config.max_model_len)
            for num_tokens in _NUM_TOKENS
        ]
        for lengths in ([1], [1, 1], [2, 1, 1], [max(1, config.max_model_len - 1)], *prompts):
            if sum(lengths) <= config.max_num_batched_tokens:
                hidden = self._run_empty_step(lengths, kv_cache)
                self._draw(self._model.compute_logits(hidden[: config.max_num_seqs])[:1], slot, position)

    def _run_empty_step(self, q_lens: list[int], kv_cache: KVCache) -> Tensor:
        """Prompts of these lengths, whose tokens mean nothing and whose keys are not kept: (T, hidden)."""
        num_tokens = sum(q_lens)
        metadata = AttentionMetadata(
            slot_mapping=self._ints([-1] * num_tokens),
            cu_seqlens_q=self._ints([0, *itertools.accumulate(q_lens)]),
            seq_lens=self._ints(q_lens),
            block_tables=self._ints([[0] * -(-max(q_lens) // self._config.block_size)] * len(q_lens)),
            max_seqlen_q=max(q_lens),
            max_seqlen_k=max(q_lens),
        )
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        return self._model(tokens, tokens, kv_cache, metadata)

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
