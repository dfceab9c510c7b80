"""What a run of an experiment on Ray has cost."""

from __future__ import annotations

import pytest

from raytp.experiment.account import Account
from raytp.replicas.pool import ReplicaPool
from raytp.replicas.replica import State
from raytp.scaling import Scaler
from tests.replicas.stub_jobs import Starter, jobs_of
from tests.replicas.stub_replica import StubReplica

pytestmark = pytest.mark.usefixtures("quickly")


def num_busy(pool):
    """Replicas that an account of the next second has as busy."""
    account = Account(pool, gpus_per_node=1, gpus_per_replica=1, tick_every_s=1.0)
    account.look(0.0, 1)
    account.look(1.0, 1)
    return account.busy_gpu_seconds


def test_a_replica_is_busy_while_it_has_rows_and_ranks_even_if_it_takes_no_more():
    engines, wanted, told = [StubReplica(delay_s=0.02), StubReplica(delay_s=0.02)], [2], []

    def changes():
        while len(pool.replicas) < 2 or not all(each.num_done for each in pool.replicas):
            yield
        told.append(("both take rows", num_busy(pool)))
        engines[0].recovering.set()
        while not any(each.recovering_since_s for each in pool.replicas):
            yield
        told.append(("one has no ranks", num_busy(pool)))
        engines[0].recovering.clear()
        while not all(each.takes_rows for each in pool.replicas):
            yield
        wanted[0] = 1
        while not any(each.state is State.LEAVING for each in pool.replicas):
            yield
        told.append(("one is leaving", num_busy(pool)))

    policy = Scaler(lambda seen: wanted[0], 1, 2)
    with ReplicaPool(Starter(iter(engines)), policy, show_progress=False) as pool:
        for _ in zip(pool.complete(jobs_of(map(str, range(2000)))), changes(), strict=False):
            pass
    assert told == [("both take rows", 2), ("one has no ranks", 1), ("one is leaving", 2)]
