"""Fixtures for every kind of test."""

from __future__ import annotations

import importlib.resources
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

# A shell starts jobs in the background with Ctrl-C ignored, and so would be every process that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_FIRST = [
    "test_batch_real.py",
    "test_recovery.py",
    "test_clean_ends.py",
    "test_ray_jobs.py",
    "test_greedy_vs_transformers.py",
    "test_cli.py",
    "test_two_hosts.py",
    "test_soak.py",
    "test_engine_lifecycle.py",
    "test_batch_engine.py",
    "test_autoscaler.py",
    "test_smaller_group.py",
    "test_replicas.py",
    "test_shared_engine.py",
    "test_shared_engine_ends.py",
    "test_same_ids_whatever.py",
]
"""Files of a minute and more: one that came last would keep one process busy when the others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for the whole session: starting it takes seconds. Its 16 CPUs are only a count."""
    # Token authentication, Ray's default, would leave a token in the home directory that later clusters trip over.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def real_chats(ray_session: None) -> list[tuple[str, Any]]:
    """200 questions of a public set, and the 8 tokens that `LLM.chat` of the default model answers, on two ranks."""
    from raytp import LLM, SamplingParams

    trivia = importlib.resources.files("chatterbot_corpus") / "data/english/trivia.yml"
    questions = [question for question, *_ in yaml.safe_load(trivia.read_text())["conversations"][:200]]
    chats = [[{"role": "user", "content": question}] for question in questions]
    with LLM(tensor_parallel_size=2, device="cpu") as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=8))
    return list(zip(questions, outputs, strict=True))
