"""What a rank is told when it starts, and what it reports back. Made by `raytp.worker_settings`; knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from workers.faults import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one rank group, the same for each of its ranks."""

    model_path: str
    """A Hugging Face checkpoint folder that this rank's node can read."""
    world_size: int
    device: str
    """"cuda" or "cpu"."""
    dtype: str
    """"float32", "bfloat16" or "float16", of weights and KV cache."""
    load_format: str
    """"auto" reads the checkpoint's weights, "dummy" makes random ones from its config alone."""
    attention_backend: str
    enforce_eager: bool
    """Never use CUDA graphs."""
    block_size: int
    num_kv_blocks: int | None
    """Size of the pool, or None to fill the memory that is left."""
    memory_fraction: float
    """Share of the GPU's memory that the engine may use in all."""
    cpu_kv_cache_bytes: int
    """Size of the pool on a CPU, where memory is not ours alone."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_valid_tokens: int | None
    """Token ids from here on are the checkpoint's padding and are never sampled; None is the whole vocabulary."""
    num_threads: int
    """Threads of a rank on a CPU."""
    timeout_s: float
    """Deadline for the rendezvous, and for reaching the driver."""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Where a rank runs."""

    hostname: str
    node_ip: str
    node_id: str
    pid: int
    gpu_id: str
    """The GPU that Ray gave it, as CUDA_VISIBLE_DEVICES names it; empty on a CPU."""
    log_path: str
    """Where its standard error goes, on its own node; empty if that is no file."""
    num_oom_kills: int
    """Processes that its node's kernel had killed for want of memory before."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """How far a rank has come with its start-up; read from another thread."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank measured while it started."""

    rank: int
    device_name: str
    attention_backend: str
    num_kv_blocks: int
    """Blocks that would fit on this rank."""
    weight_bytes: int
    peak_host_bytes: int
    """How much more of the host's memory the rank held at most while it loaded its weights than before."""
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What a rank's GPU did for a while."""

    window_s: float
    """From the start of the first kernel seen to the end of the last."""
    busy_s: float
    """Of the window, how long at least one kernel was running."""
    top_kernels: tuple[tuple[str, float], ...]
    """The kernels that took longest: name, and share of the time of all kernels."""
