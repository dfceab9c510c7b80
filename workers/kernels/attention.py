"""The seam between the attention layer and its backends, and the choice among them at start-up.

Backends are imported when chosen: a CPU engine never pays for importing Triton.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from workers.layers.attention import AttentionMetadata

_FLASH_ATTN_2_PAGE = 256
_HOPPER = 9


class AttentionBackend(Protocol):
    """Causal attention of a ragged step over a paged cache that already holds the step's own keys and values."""

    name: str
    fits_graph: bool
    """Whether a step can be captured in a CUDA graph: no look at the device's values from the host, and none at
    lengths, which may be None."""

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        """q (T, H, D), k_cache and v_cache (N, P, K, D) -> (T, H, D). On a GPU without host synchronisation."""
        ...


def select_backend(
    name: str, device: torch.device, block_size: int, dtype: torch.dtype | None = None
) -> AttentionBackend:
    """The backend called `name`, or with "auto" the fastest that runs here.

    `dtype` is the model's, if known: flash-attn has no float32. Raises ConfigError if a backend that was asked for by
    name cannot run.
    """
    if name == "auto":
        fastest_first = ("flash_attn_3", "flash_attn", "triton")
        name = next((each for each in fastest_first if _obstacle(each, device, block_size, dtype) is None), "torch")
    obstacle = _obstacle(name, device, block_size, dtype)
    if obstacle is not None:
        raise ConfigError(f"attention backend {name!r} cannot be used: {obstacle}; use 'auto' or 'torch'")
    if name == "triton":
        from workers.kernels.triton_backend import TritonAttention

        return TritonAttention()
    if name == "torch":
        from workers.kernels.reference import TorchAttention

        return TorchAttention()
    from workers.kernels.flash import FlashAttention2, FlashAttention3

    return FlashAttention3() if name == "flash_attn_3" else FlashAttention2()


def _obstacle(name: str, device: torch.device, block_size: int, dtype: torch.dtype | None) -> str | None:
    """Why backend `name` cannot run here, None if it can."""
    if name == "torch":
        return None
    if name not in ("flash_attn_3", "flash_attn", "triton"):
        return "it is none of 'auto', 'flash_attn_3', 'flash_attn', 'triton', 'torch'"
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type!r}"
    if name == "triton":
        return None
    if dtype not in (None, torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {dtype}"
    module = "flash_attn_interface" if name == "flash_attn_3" else "flash_attn"
    if importlib.util.find_spec(module) is None:
        return f"the package that provides {module!r} is not installed"
    if name == "flash_attn_3" and torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return "it runs on Hopper GPUs only"
    if name == "flash_attn" and block_size % _FLASH_ATTN_2_PAGE:
        return f"it needs a block_size that is a multiple of {_FLASH_ATTN_2_PAGE}, not {block_size}"
    return None
