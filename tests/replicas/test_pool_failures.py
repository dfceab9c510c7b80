"""When a pool goes on without replicas that failed, and when it gives up and says why."""

from __future__ import annotations

from itertools import count

import pytest

from raytp.errors import EngineError, WeightsError
from raytp.replicas.pool import ReplicaPool
from raytp.replicas.replica import State
from raytp.scaling import Scaler
from tests.replicas.stub_jobs import Starter, answer_all, fixed, jobs_of
from tests.replicas.stub_replica import StubReplica

pytestmark = pytest.mark.usefixtures("quickly")


def test_what_no_replica_can_start_is_raised_and_what_one_cannot_is_not():
    with pytest.raises(WeightsError, match="damaged"):
        answer_all(Starter(iter([WeightsError("damaged"), WeightsError("damaged")])), fixed(2), ["a"])
    starts = [StubReplica(), WeightsError("one"), WeightsError("two"), WeightsError("three")]
    assert len(answer_all(Starter(iter(starts)), fixed(2), [str(i) for i in range(5000)])) == 5000


def test_replicas_that_die_one_after_another_end_the_job_with_what_the_first_died_of():
    starter = Starter(StubReplica(dies_after=0) for _ in count())
    with pytest.raises(EngineError, match="the stub died"):
        answer_all(starter, fixed(2), ["a", "b"])
    assert len(starter.started) <= 4
    assert all(engine.is_shut_down for engine in starter.started)


def pool_without_more_starts(engines, wanted):
    """Two engines, and three more starts, which fail."""
    starts = [*engines, *(WeightsError(name) for name in ("one", "two", "three"))]
    return ReplicaPool(Starter(iter(starts)), Scaler(lambda seen: wanted[0], 0, 5), show_progress=False)


def test_a_leaving_replica_that_ends_as_the_last_one_ends_a_job_that_has_rows_left():
    engines, wanted, keys = [StubReplica(delay_s=0.02), StubReplica(delay_s=0.02)], [2], []

    def answer(replicas):
        for result in replicas.complete(jobs_of(map(str, range(2000)))):
            keys.extend([result[0]] if result else [])
            leaving = [each for each in replicas.replicas if each.state is State.LEAVING]
            if all(engine.done for engine in engines):
                wanted[0] = 5 if replicas._may_start else 1
            for each in replicas.replicas if leaving else []:
                each.engine.dies_after = None if each in leaving else 0

    with pool_without_more_starts(engines, wanted) as replicas, pytest.raises(WeightsError, match="one"):
        answer(replicas)
    assert sorted(keys) == sorted(engines[0].done + engines[1].done), "an answer was lost"
    assert 0 < len(keys) < 2000


def test_a_job_that_has_no_rows_left_needs_no_replica():
    engines, wanted = [StubReplica(), StubReplica()], [2]

    def rows():
        for row in jobs_of(map(str, count())):
            if not replicas._may_start:
                break
            yield row
        wanted[0] = 0
        while replicas.replicas:
            yield None
        yield None  # there may be more, as far as the pool knows

    with pool_without_more_starts(engines, wanted) as replicas:
        keys = []
        for result in replicas.complete(rows()):
            keys += [result[0]] if result else []
            if all(engine.done for engine in engines) and wanted[0]:
                wanted[0] = 5
    assert not replicas._may_start
    assert sorted(keys) == list(range(len(keys)))
