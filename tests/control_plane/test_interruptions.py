"""Callers that are interrupted, by an exception or by a signal's handler that aborts, in the midst of a call."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray

from raytp import LLM
from raytp.collector import RequestCollector
from raytp.driver_client import DriverClient
from raytp.errors import EngineClosedError, EngineError
from raytp.outputs import Request
from raytp.request_stream import Job, RequestStream, RunningCalls
from scheduler.sampling_params import ResolvedSampling
from tests.control_plane.fake_model import make_config
from tests.control_plane.rig import Rig


def test_what_arrives_after_its_caller_s_goodbye_is_not_done() -> None:
    """Ctrl-C comes while a caller asks; the driver has many threads, and its goodbye may be the faster."""
    rig = Rig(make_config())
    requests = [rig.request(index, [5, 6, 7], max_tokens=400) for index in range(5)]
    rig.engine.forget("interrupted")
    deadline = time.monotonic() + 5
    while not rig.engine._mailboxes.is_gone("interrupted"):
        assert time.monotonic() < deadline
    rig.engine.submit("interrupted", requests)
    rig.engine.submit("other", [rig.request(0, [5, 6, 7], max_tokens=3)])
    assert rig.collect("other", 1)[-1].finish_reason == "length"
    assert rig.engine.stats().num_running == 0
    assert "interrupted" not in list(rig.engine._mailboxes)
    rig.engine.close()


class InterruptedDriver:
    """While it is called, a signal's handler runs in the same thread."""

    def __init__(self) -> None:
        self.handler: Callable[[], None] = lambda: None
        self.sent: list[int] = []
        self.aborted: list[int] = []

    def submit(self, client_id: str, requests: list[Request]) -> None:
        self.handler()
        self.sent += [request.request_id for request in requests]

    def abort(self, client_id: str, request_id: int, index: int | None, finish_reason: str) -> None:
        assert request_id in self.sent
        self.aborted.append(request_id)
        self.handler()

    def poll(self, client_id: str, timeout_s: float) -> list[Any]:
        self.handler()
        return []

    def forget(self, client_id: str) -> None:
        pass


def test_an_abort_from_a_signal_s_handler_neither_waits_nor_repeats_itself() -> None:
    driver: Any = InterruptedDriver()
    stream = RequestStream(driver, "", window=8)
    calls = RunningCalls()
    calls.add(stream)
    driver.handler = lambda: [call.abort(3) or call.abort_all() for call in calls.all()]  # type: ignore[func-returns-value]

    def make_collector() -> RequestCollector:
        ids = np.array([5], dtype=np.int32)
        return RequestCollector(None, ids, ResolvedSampling(max_tokens=3), None, is_stream=False)

    outputs = stream.outputs(Job(index, None, make_collector) for index in range(8))
    next(outputs)
    assert sorted(driver.aborted) == driver.sent


def test_an_engine_whose_ray_is_gone_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would join any other cluster of the machine for the next call."""
    client = DriverClient()
    client._actor = object()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(EngineClosedError, match="Ray has been shut down"):
        client.stats(10.0)


def test_an_llm_that_is_sent_away_says_what_to_do_instead() -> None:
    with pytest.raises(EngineError, match=r"make one there, or .* LLM\.connect"):
        pickle.dumps(LLM.__new__(LLM))
