"""The list of supported architectures by the name that config.json gives them. Needs no torch."""

from __future__ import annotations

from workers.models.architecture import Architecture
from workers.models.llama import LLAMA, MISTRAL
from workers.models.qwen2 import QWEN2
from workers.models.qwen3 import QWEN3

ARCHITECTURES: dict[str, Architecture] = {each.name: each for each in (QWEN3, LLAMA, MISTRAL, QWEN2)}
