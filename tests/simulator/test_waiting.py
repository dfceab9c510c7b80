"""Rows that wait: which of them a replica with room takes, and what a simulation tells of them at its end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytp.simulator.capacity import fixed_cluster
from raytp.simulator.cluster import Simulation, simulate
from raytp.simulator.fleet import Member, ReplicaState
from raytp.simulator.requests import SimulatedRequest
from raytp.simulator.router import Router
from raytp.simulator.waiting import WaitingRows
from tests.simulator.small import small_replica

prefixes = st.sampled_from([None, "a", "b", "c"])


@given(st.lists(prefixes, max_size=30), st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))
def test_a_replica_takes_the_oldest_row_that_is_its_own_or_nobody_s(
    prefix_ids: list[str | None], takers: list[tuple[int, bool]]
) -> None:
    """Against a search; a replica that is given up holds nothing, and each row is taken once."""
    members = [Member(number) for number in range(3)]
    router = Router(100)
    rows = WaitingRows(prefix_ids, router)
    left = list(range(len(prefix_ids)))
    for index in left:
        rows.add(index)
    holders: dict[str, set[int]] = {"a": set(), "b": set(), "c": set()}
    for number, is_ready in takers[: len(left)]:
        members[number].state = ReplicaState.READY if is_ready else ReplicaState.DRAINING
        ready = {member.member_id for member in members if member.state is ReplicaState.READY}

        def suits(index: int, number: int = number, ready: set[int] = ready) -> bool:
            prefix_id = prefix_ids[index]
            return prefix_id is None or number in holders[prefix_id] or not holders[prefix_id] & ready

        wanted = next(filter(suits, left), left[0])
        assert rows.take(members[number]) == wanted
        left.remove(wanted)
        prefix_id = prefix_ids[wanted]
        if prefix_id is not None:
            holders[prefix_id].add(number)
    assert [rows.pop() for _ in range(len(rows))] == left


def test_rows_of_a_lost_replica_come_first_in_their_order() -> None:
    rows = WaitingRows([None] * 5, Router(100))
    for index in (3, 4):
        rows.add(index)
    rows.give_back([0, 2])
    assert [rows.pop() for _ in range(len(rows))] == [0, 2, 3, 4]


def test_prefixes_stay_where_they_are_while_rows_wait() -> None:
    """24 prefixes, of which a replica's cache holds a half, and two replicas: each keeps to its own half."""
    rng = random.Random(0)
    requests = [
        SimulatedRequest(arrival_s=0.0, prompt_tokens=1000, output_tokens=4, prefix_id=f"p{number}", prefix_tokens=960)
        for number in rng.choices(range(24), k=400)
    ]
    config = small_replica(max_num_seqs=4)
    config = replace(config, scheduler=replace(config.scheduler, num_kv_blocks=900))
    shares = []
    for num_replicas in (1, 2):
        simulation = Simulation(fixed_cluster(config, num_replicas), requests)
        simulation.run(lambda share: None)
        engines = [member.engine for member in simulation._fleet.members.values()]
        num_cached = sum(engine.scheduler.stats().num_cached_tokens for engine in engines if engine is not None)
        shares.append(num_cached / (400 * 960))
    alone, together = shares
    assert together > alone + 0.25
    assert together > 0.85


def test_a_run_that_is_over_before_the_second_decision_still_has_its_counts() -> None:
    requests = [SimulatedRequest(arrival_s=0.0, prompt_tokens=50, output_tokens=100)] * 20
    results = simulate(fixed_cluster(small_replica(), 2), requests)
    assert results.seconds < 5
    first, last = results.ticks
    assert (first.ready, last.ready, last.now_s) == (0, 2, results.seconds)
    assert last.tokens_per_s == pytest.approx(results.output_tokens_per_s)
    assert results.summary()["peak_replicas"] == 2


def test_tokens_that_were_never_made_do_not_count() -> None:
    """max_model_len=2048 ends the first after 48; the second's prompt is too long for it."""
    requests = [
        SimulatedRequest(arrival_s=0.0, prompt_tokens=prompt, output_tokens=5000) for prompt in (2000, 3000, 1000)
    ]
    results = simulate(fixed_cluster(small_replica(), 1), requests)
    assert [one.output_tokens for one in results.requests] == [48, 0, 1048]
    assert [one.error is None for one in results.requests] == [True, False, True]
    assert results.output_tokens_per_s == pytest.approx((48 + 1048) / results.seconds)
