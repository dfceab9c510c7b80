"""What a pool does with rows and with replicas that come, go and dawdle, seen with stubs."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from itertools import count

import pytest

from raytp.errors import PlacementError
from raytp.replicas import pool
from raytp.replicas.pool import ReplicaPool
from raytp.scaling import Scaler
from raytp.scaling.window import rows_window
from tests.batch.stub_engine import answer_to
from tests.replicas.stub_jobs import Arrivals, Starter, answer_all, fixed, jobs_of
from tests.replicas.stub_replica import StubReplica

pytestmark = pytest.mark.usefixtures("quickly")


@pytest.mark.parametrize("seed", range(10))
def test_every_row_is_answered_once_whatever_replicas_are_lost(seed):
    rng = random.Random(seed)
    prompts = [f"prompt {i}" * rng.randint(1, 20) for i in range(500)]

    def engines():
        for number in count():
            if number and rng.random() < 0.2:
                yield PlacementError("no room")
            else:
                yield StubReplica(rows_at_once=rng.randint(1, 9), dies_after=rng.choice([None, rng.randint(1, 90)]))

    wanted = iter(lambda: rng.randint(1, 4), None)
    starter = Starter(engines())
    texts = answer_all(starter, Scaler(lambda seen: next(wanted), 1, 4), prompts)
    assert texts == {i: answer_to(prompt) for i, prompt in enumerate(prompts)}


def test_a_replica_without_ranks_gives_its_rows_to_the_others_and_gets_others_when_it_has_ranks_again():
    stuck, other = StubReplica(), StubReplica()
    starter = Starter(iter([stuck, other]))
    with ReplicaPool(starter, fixed(2), show_progress=False) as replicas:
        results = replicas.complete(jobs_of(map(str, range(1000))))
        keys, lost_at = [], None
        for result in results:
            keys += [result[0]] if result else []
            if len(keys) > 100 and lost_at is None and stuck.done:
                stuck.recovering.set()
                lost_at = len(stuck.done)
            if len(keys) > 600 and stuck.recovering.is_set():
                assert len(stuck.done) <= lost_at + stuck.info.max_num_seqs
                stuck.recovering.clear()
    assert sorted(keys) == list(range(1000))
    assert len(stuck.done) > lost_at + 20


def test_a_slow_replica_has_few_rows_and_those_that_only_wait_there_go_to_a_quick_one():
    slow, quick = StubReplica(rows_at_once=2, delay_s=0.5), StubReplica(rows_at_once=2)
    start_s = time.monotonic()
    texts = answer_all(Starter(iter([slow, quick])), fixed(2), [str(i) for i in range(300)])
    assert len(texts) == 300
    assert slow.most_open <= rows_window(2)
    assert len(slow.done) <= 12
    assert time.monotonic() - start_s < 10


def test_the_job_begins_with_the_first_replica_that_is_ready_and_others_join():
    late = threading.Event()
    engines = [StubReplica(), StubReplica()]
    order = iter(engines)

    def start(number, on_progress):
        engine = next(order)
        if engine is engines[0]:
            late.wait(10)
        return engine

    with ReplicaPool(start, fixed(2), show_progress=False) as replicas:
        done = []
        for result in replicas.complete(jobs_of(map(str, range(2000)))):
            done += [result[0]] if result else []
            if len(done) > 50:
                late.set()
    assert sorted(done) == list(range(2000))
    assert len(engines[1].done) > 50
    assert engines[0].done


def test_a_shrinking_pool_finishes_what_the_leaving_replica_has_and_ends_it():
    wanted = [3]
    starter = Starter(StubReplica() for _ in count())
    with ReplicaPool(starter, Scaler(lambda seen: wanted[0], 1, 3), show_progress=False) as replicas:
        done = []
        for result in replicas.complete(jobs_of(map(str, range(3000)))):
            done += [result[0]] if result else []
            if len(done) == 600:
                wanted[0] = 1
            if len(done) == 2500:
                assert len(replicas.replicas) == 1
                assert sum(engine.is_shut_down for engine in starter.started) == 2
    assert sorted(done) == list(range(3000))
    assert len(starter.started) == 3
    assert sum(len(engine.done) for engine in starter.started) == 3000


def test_a_row_that_comes_while_nothing_happens_is_not_held_up(monkeypatch):
    monkeypatch.setattr(pool, "_POLL_S", 3.0)
    arrivals = Arrivals([0.0, 1.0, 1.5])
    with ReplicaPool(Starter(iter([StubReplica()])), fixed(1), show_progress=False) as replicas:
        late_s = [
            time.monotonic() - arrivals.start_s - arrivals.moments[each[0]]
            for each in replicas.complete(arrivals.jobs())
            if each
        ]
    assert len(late_s) == 3
    assert max(late_s[1:]) < 1.0


def test_between_bursts_there_is_no_replica_if_none_is_demanded():
    starter = Starter(StubReplica() for _ in count())
    arrivals = Arrivals([0.0] * 20 + [1.5] * 20)
    policy = Scaler(lambda seen: int(seen.rows_waiting + seen.rows_running > 0), 0, 1)
    replicas = ReplicaPool(starter, policy, num_unread=arrivals.num_unread, show_progress=False)
    with contextlib.closing(replicas):
        keys, least = [], None
        for each in replicas.complete(arrivals.jobs()):
            keys += [each[0]] if each else []
            if len(keys) == 20 and len(starter.started) == 1:
                least = len(replicas.replicas)
    assert sorted(keys) == list(range(40))
    assert least == 0
    assert len(starter.started) == 2
    assert all(engine.is_shut_down for engine in starter.started)


def test_closing_the_answers_early_and_the_pool_leaves_nothing():
    starter = Starter(StubReplica(delay_s=0.01) for _ in count())
    with ReplicaPool(starter, fixed(3), show_progress=False) as replicas:
        results = replicas.complete(jobs_of(map(str, range(100000))))
        while next(results) is None:
            pass
        results.close()
    assert all(engine.is_shut_down for engine in starter.started)


def test_few_look_for_a_place_at_once_however_many_are_wanted():
    at_work = threading.Event()

    def start(number, on_progress):
        engine = StubReplica(delay_s=0.01)
        while number and not at_work.wait(0.05):
            on_progress("waiting for resources: none are left", 0.0)
        return engine

    with ReplicaPool(start, fixed(10**6), show_progress=False) as replicas:
        results = replicas.complete(jobs_of(map(str, range(3000))))
        counts = []
        for _ in results:
            counts.append(replicas.crew())
            if len(counts) == 300:
                at_work.set()
            if counts[-1].num_ready > 64:
                break
        results.close()
    assert max(crew.num_waiting for crew in counts) == 32
