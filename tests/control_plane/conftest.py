"""Fixtures of the tests of the channel and of the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.control_plane.fake_model import make_config
from tests.control_plane.rig import Rig


@pytest.fixture(params=["unix", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(make_config())
    yield rig
    rig.engine.close()


@pytest.fixture
def gate(rig: Rig) -> Iterator[threading.Event]:
    """Results arrive only once it is set."""
    event = threading.Event()
    rig.transport.before_receive = lambda: None if event.wait(20) else pytest.fail("nobody opened the gate")
    yield event
    event.set()
