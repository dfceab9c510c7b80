"""Every exception that raytp raises for its users.

RaytpError
├── RequestError          one request cannot be served; also a ValueError
├── BatchError            a batch job's output is in use, or holds something else
├── ConfigError           a setting is out of range; also a ValueError
├── ModelNotFoundError    no model where one was asked for
├── UnsupportedModelError the checkpoint needs what raytp does not implement; also a ValueError
├── WeightsError          the checkpoint's weights are damaged, incomplete or of another model
├── KVCacheMemoryError    too little memory is left for the KV cache
├── RendezvousError       the ranks could not form their process group
│   └── RendezvousTimeoutError ... within the deadline
├── ChannelError          the connection between driver and rank could not be made, or broke
│   └── FrameError        ... or carried something damaged
└── EngineError           the engine as a whole
    ├── EngineNotFoundError no shared engine of that name runs
    ├── PlacementError    the cluster does not have what the ranks need
    ├── StartTimeoutError a step of the start-up passed its deadline
    ├── StepTimeoutError  a rank did not answer a step in time
    ├── RankFailedError   a rank raised or died
    │   └── RankDiedError ... died, while the engine started
    └── EngineClosedError the engine has been shut down
"""

from __future__ import annotations

from scheduler.errors import ConfigError, RaytpError, RequestError
from workers.errors import (
    ChannelError,
    FrameError,
    KVCacheMemoryError,
    ModelNotFoundError,
    RendezvousError,
    RendezvousTimeoutError,
    UnsupportedModelError,
    WeightsError,
)

__all__ = [
    "BatchError",
    "ChannelError",
    "ConfigError",
    "EngineClosedError",
    "EngineError",
    "EngineNotFoundError",
    "FrameError",
    "KVCacheMemoryError",
    "ModelNotFoundError",
    "PlacementError",
    "RankDiedError",
    "RankFailedError",
    "RaytpError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RequestError",
    "StartTimeoutError",
    "StepTimeoutError",
    "UnsupportedModelError",
    "WeightsError",
]


class BatchError(RaytpError):
    """A batch job cannot use its output: it is in use, holds something else, or an earlier run with other settings."""


class EngineError(RaytpError):
    """The engine as a whole cannot go on."""


class EngineNotFoundError(EngineError):
    """No shared engine of that name runs in the cluster; the message lists those that do."""


class PlacementError(EngineError):
    """The cluster did not give the ranks what they need in time; the message says what was asked and what there is."""


class StartTimeoutError(EngineError):
    """A step of the start-up passed its deadline."""


class StepTimeoutError(EngineError):
    """A rank did not take or answer a step within the deadline."""


class RankFailedError(EngineError):
    """A rank raised or died; the message carries what each rank had to say."""


class RankDiedError(RankFailedError):
    """Ranks died while the engine started, as often as max_restarts allows."""


class EngineClosedError(EngineError):
    """The engine has been shut down."""
