"""The errors of models, of the rank group and of its control channel, here because both planes raise them."""

from __future__ import annotations

from scheduler.errors import RaytpError


class ModelNotFoundError(RaytpError):
    """The named model is not there: no such folder or file, nothing of it in a folder, or no way to download it."""


class UnsupportedModelError(RaytpError, ValueError):
    """The model is there, but raytp cannot run its architecture, rope type, tokenizer or file format."""


class WeightsError(RaytpError):
    """The checkpoint's tensors do not fit its config: some are missing, unexpected, or of another shape."""


class ChannelError(RaytpError):
    """A rank and the driver cannot reach each other over the control channel, or one of them lacks the key."""


class FrameError(ChannelError):
    """A frame of the control channel is damaged, out of turn, or of another version or epoch."""


class RendezvousError(RaytpError):
    """The ranks did not form their process group."""


class RendezvousTimeoutError(RendezvousError):
    """Ranks have waited for one another until the deadline: they do not reach each other, or one is stuck."""


class KVCacheMemoryError(RaytpError):
    """The memory that is left beside the weights does not hold the KV cache."""
