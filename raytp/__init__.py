"""raytp: tensor-parallel inference of large language models on Ray.

from raytp import LLM, SamplingParams

with LLM("path/to/model", tensor_parallel_size=2) as llm:
    print(llm.generate("The capital of Japan is", SamplingParams(max_tokens=16))[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raytp.errors import RaytpError, RequestError
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from raytp.batch_job.api import batch
    from raytp.llm import LLM
    from raytp.outputs import CompletionOutput, OutputChunk, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "OutputChunk",
    "RaytpError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "batch",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "raytp.llm",
    "CompletionOutput": "raytp.outputs",
    "OutputChunk": "raytp.outputs",
    "RequestOutput": "raytp.outputs",
    "batch": "raytp.batch_job.api",
}


def __getattr__(name: str) -> Any:
    """Import what needs Ray or numpy on first use, so that `raytp --help` answers at once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
