"""What a policy is told of real rows and replicas."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest

from raytp.replicas import gauge
from raytp.replicas.pool import ReplicaPool
from raytp.replicas.replica import State
from raytp.scaling import Scaler, meter
from tests.replicas.stub_jobs import Arrivals, Starter, jobs_of
from tests.replicas.stub_replica import StubReplica

pytestmark = pytest.mark.usefixtures("quickly")


def test_a_policy_learns_what_replicas_can_do():
    seen = []
    starter = Starter(StubReplica(delay_s=0.01) for _ in count())
    policy = Scaler(lambda each: seen.append(each) or 2, 1, 2)
    with ReplicaPool(starter, policy, num_unread=lambda: 7, show_progress=False) as replicas:
        assert len([each for each in replicas.complete(jobs_of(map(str, range(600)))) if each]) == 600
    known = [each for each in seen if each.rows_per_s_per_replica is not None and each.num_ready == 2]
    assert known
    assert all(each.tokens_per_row == 3 for each in known)
    assert all(each.rows_per_replica == 4 and each.num_pending == 0 for each in known)
    assert any(each.rows_running == 8 and each.rows_waiting > 7 for each in known)
    assert all(each.rows_running <= 8 for each in seen), "rows that wait in a replica count as running"
    assert 20 < known[-1].rows_per_s_per_replica < 1000  # 400 at most; the machine may be busy


def test_replicas_that_join_do_not_count_as_speed_of_those_that_were_there(monkeypatch):
    monkeypatch.setattr(gauge, "_INTERVAL_S", 0.3)
    seen, late = [], threading.Event()

    def start(number, on_progress):
        if number:
            late.wait(10)
        return StubReplica(delay_s=0.02)

    with ReplicaPool(start, Scaler(lambda each: seen.append(each) or 5, 5, 5), show_progress=False) as replicas:
        for each in replicas.complete(jobs_of(map(str, range(1500)))):
            if each and each[0] > 200:
                late.set()
    rates = [each.tokens_per_s_per_replica for each in seen if each.tokens_per_s_per_replica is not None]
    assert any(each.num_ready == 5 for each in seen)
    assert max(rates) < 1.2 * 3 * 4 / 0.02


def test_a_policy_is_told_of_what_arrives_and_of_what_waits():
    seen = []
    arrivals = Arrivals([0.01 * i for i in range(200)])
    policy = Scaler(lambda each: seen.append(each) or 1, 1, 1)
    starter = Starter(iter([StubReplica(rows_at_once=1, delay_s=0.02)]))
    counts = {"num_unread": arrivals.num_unread, "num_arrived": arrivals.num_arrived}
    with ReplicaPool(starter, policy, decide_every_s=0.2, show_progress=False, **counts) as replicas:
        keys = [each[0] for each in replicas.complete(arrivals.jobs()) if each]
    assert sorted(keys) == list(range(200))
    during = [each for each in seen if each.now_s < 1.9]
    assert 4 <= len(during) <= 11
    assert seen[0].arrival_rows_per_s == 0
    assert 50 < during[-1].arrival_rows_per_s < 130
    assert max(each.rows_waiting for each in seen) > 50
    assert seen[-1].rows_waiting < 20


def test_waiting_for_room_counts_up_to_a_limit_in_how_long_a_start_takes(monkeypatch):
    monkeypatch.setattr(meter, "_MAX_WAIT_S", 0.1)
    seen = []

    def start(number, on_progress):
        on_progress("starting Ray", 0.0)
        on_progress("waiting for resources: 1 GPU", 0.0)
        time.sleep(0.8)
        on_progress("loading weights", 0.0)
        time.sleep(0.1)
        return StubReplica()

    with ReplicaPool(start, Scaler(lambda each: seen.append(each) or 1, 1, 1), show_progress=False) as replicas:
        assert len([each for each in replicas.complete(jobs_of(map(str, range(100)))) if each]) == 100
    assert {each.startup_s for each in seen if not each.num_ready} == {60.0}
    assert max(each.num_nodes_pending for each in seen) == 1
    assert 0.2 <= seen[-1].startup_s < 0.8
    assert (seen[-1].num_nodes_pending, seen[-1].num_pending) == (0, 0)


def test_a_replica_that_leaves_before_it_is_ready_is_no_quick_start():
    wanted, seen, second = [1], [], threading.Event()

    def start(number, on_progress):
        time.sleep(0.2)
        if number:
            second.wait(10)
        return StubReplica(delay_s=0.005)

    policy = Scaler(lambda each: seen.append(each) or wanted[0], 1, 2)
    with ReplicaPool(start, policy, show_progress=False) as replicas:
        for result in replicas.complete(jobs_of(map(str, range(400)))):
            if result is None:
                continue
            if result[0] == 20:
                wanted[0] = 2
            if len(replicas.replicas) == 2:
                wanted[0] = 1
            if any(each.state is State.LEAVING for each in replicas.replicas):
                second.set()
    assert second.is_set()
    assert {each.startup_s >= 0.2 for each in seen} == {True}
