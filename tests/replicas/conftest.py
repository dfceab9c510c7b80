"""Fixtures for replicas."""

from __future__ import annotations

import pytest

from raytp.replicas import gauge, pool, replica
from raytp.scaling import meter


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens every few seconds happens every few milliseconds."""
    for module, name in [(pool, "_TICK_S"), (pool, "_POLL_S"), (pool, "_PATIENCE_S"), (replica, "_IDLE_S")]:
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(replica, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(gauge, "_INTERVAL_S", 0.05)
    monkeypatch.setattr(meter, "_TAU_S", 0.5)
