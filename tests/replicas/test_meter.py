"""Estimates that a policy is given, against what they are by their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raytp.scaling import ArrivalMeter, RateMeter, StartMeter

INTERVALS = [5.0, 0.2, 1.0, 1.0, 3.0, 12.0, 0.05, 2.0]
RATES = [3.0, 9.0, 0.0, 4.0, 4.0, 1.0, 50.0, 2.0]


def weighted_mean(intervals, rates, before):
    """Of the rate over all time: a moment counts by exp(-age / tau), with tau such that 5 seconds count as 0.3."""
    tau_s = 5.0 / math.log(1 / 0.7)
    ages = np.cumsum(intervals[::-1])[::-1]
    found = before * math.exp(-ages[0] / tau_s)
    for age, interval, rate in zip(ages, intervals, rates, strict=True):
        moments = age - (np.arange(10_000) + 0.5) * interval / 10_000
        found += rate * np.mean(np.exp(-moments / tau_s)) * interval / tau_s
    return found


def test_arrivals_decay_by_time_and_not_by_how_often_they_are_counted():
    meter = ArrivalMeter()
    for interval, rate in zip(INTERVALS, RATES, strict=True):
        meter.record(rate * interval, interval)
    assert meter.rows_per_s == pytest.approx(weighted_mean(INTERVALS, RATES, before=0.0), rel=1e-6)


def test_the_rate_of_a_replica_decays_by_time_while_it_has_enough_to_do_and_else_never_falls():
    meter = RateMeter()
    meter.record(tokens_per_s=7.0, was_saturated=False, interval_s=1.0)
    meter.record(tokens_per_s=5.0, was_saturated=False, interval_s=1.0)
    assert meter.tokens_per_s_per_replica == 7.0
    rates = [rate + 1.0 for rate in RATES]
    for interval, rate in zip(INTERVALS, rates, strict=True):
        meter.record(tokens_per_s=rate, was_saturated=True, interval_s=interval)
    assert meter.tokens_per_s_per_replica == pytest.approx(weighted_mean(INTERVALS, rates, before=7.0), rel=1e-6)


def test_five_seconds_weigh_as_much_at_once_as_one_by_one():
    once, often = ArrivalMeter(), ArrivalMeter()
    once.record(50, 5.0)
    for _ in range(5):
        often.record(10, 1.0)
    assert once.rows_per_s == pytest.approx(3.0)
    assert often.rows_per_s == pytest.approx(3.0)


def test_arrivals_are_forgotten_a_minute_after_the_last():
    meter = ArrivalMeter()
    for num_rows in [100, 0, 100]:
        meter.record(num_rows, 30.0)
    meter.record(0, 59.0)
    assert 0 < meter.rows_per_s < 0.1
    meter.record(0, 1.0)
    assert meter.rows_per_s == 0.0


def test_one_replica_that_waited_for_an_hour_does_not_make_starts_take_an_hour():
    meter = StartMeter()
    assert meter.startup_s == 60.0
    meter.record(starting_s=20.0, waiting_s=3600.0)
    assert meter.startup_s == 20.0 + 300.0
    for _ in range(2):
        meter.record(starting_s=30.0, waiting_s=4.0)
    assert meter.startup_s == 34.0
    for _ in range(3):
        meter.record(starting_s=50.0, waiting_s=90.0)
    assert meter.startup_s == 140.0, "of the latest five, most needed a node"
