"""Delays that happen each time, which make every step of an engine slow. Other faults are in `test_recovery`."""

from __future__ import annotations

import time

import pytest

from scheduler.errors import ConfigError
from workers.faults import Fault, FaultInjector

DELAY_S = 0.02
LATE = Fault(kind="delay", rank=1, point="decode", seconds=DELAY_S, always=True)


def seconds_of(injector, point, times=5):
    start = time.monotonic()
    for _ in range(times):
        injector.reach(point)
    return time.monotonic() - start


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_delay_that_is_always_happens_each_time_in_each_epoch_and_is_told_once(capfd, epoch):
    assert seconds_of(FaultInjector((LATE,), rank=1, epoch=epoch), "decode") >= 5 * DELAY_S
    assert capfd.readouterr().err.count("delay of rank 1 always at decode") == 1


def test_it_happens_nowhere_else():
    assert seconds_of(FaultInjector((LATE,), rank=1, epoch=0), "prefill") < 5 * DELAY_S
    assert seconds_of(FaultInjector((LATE,), rank=0, epoch=0), "decode") < 5 * DELAY_S
    once = Fault(kind="delay", rank=1, point="decode", seconds=DELAY_S)
    assert DELAY_S <= seconds_of(FaultInjector((once,), rank=1, epoch=0), "decode") < 5 * DELAY_S


@pytest.mark.parametrize("more", [{"kind": "kill"}, {"kind": "delay", "nth": 2}, {"kind": "delay", "epoch": 1}])
def test_only_a_delay_can_be_always_and_then_it_is_at_no_particular_time(more):
    with pytest.raises(ConfigError, match="always is for a delay"):
        Fault(rank=0, point="decode", always=True, **more)


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_a_delay_of_no_time_that_there_is_is_refused_before_a_rank_meets_it(seconds):
    with pytest.raises(ConfigError, match=f"seconds={seconds} must be"):
        Fault(kind="delay", rank=0, point="decode", seconds=seconds)
