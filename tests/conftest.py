"""Fixtures for every kind of test."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

# A shell starts jobs in the background with Ctrl-C ignored, and so would be every process that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for the whole session: starting it takes seconds. Its 16 CPUs are only a count."""
    # Token authentication, Ray's default, would leave a token in the home directory that later clusters trip over.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    yield
    ray.shutdown()
