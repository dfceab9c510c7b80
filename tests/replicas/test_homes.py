"""Rows go where the beginning of their prompts has been seen, and rows that all begin alike go everywhere."""

from __future__ import annotations

import random

import pytest

from raytp.replicas.homes import Homes, beginnings
from raytp.replicas.pool import ReplicaPool
from tests.replicas.stub_jobs import Starter, answer_all, fixed, jobs_of
from tests.replicas.stub_replica import StubReplica

pytestmark = pytest.mark.usefixtures("quickly")


def test_rows_that_begin_alike_go_to_one_replica_while_it_has_room():
    prompts = [f"group {group} " * 40 + f" row {row}" for row in range(40) for group in range(6)]
    random.Random(0).shuffle(prompts)

    def together(homes):
        """The share of rows that went where most of their group went."""
        engines = [StubReplica(rows_at_once=16, delay_s=0.01), StubReplica(rows_at_once=16, delay_s=0.01)]
        with ReplicaPool(Starter(iter(engines)), fixed(2), homes=homes, show_progress=False) as replicas:
            while not all(each.takes_rows for each in replicas.replicas):
                replicas._take_events(1)
            assert len([each for each in replicas.complete(jobs_of(prompts)) if each]) == len(prompts)
        assert min(len(engine.asked) for engine in engines) > 60
        groups = [[request.split(" row ")[0] for request in engine.asked] for engine in engines]
        return sum(max(each.count(group) for each in groups) for group in set(groups[0] + groups[1])) / len(prompts)

    assert together(Homes()) > 0.7 > together(Homes(min_share=2.0))


def test_rows_that_all_begin_alike_still_go_to_all_replicas():
    engines = [StubReplica(), StubReplica()]
    answer_all(Starter(iter(engines)), fixed(2), ["the same " * 50 + str(i) for i in range(400)])
    assert min(len(engine.done) for engine in engines) > 100


def test_a_home_is_who_was_given_the_longest_beginning_if_that_is_a_good_part_of_the_prompt():
    homes = Homes()
    homes.settle(beginnings("s" * 64 + "a" * 1000)[0], "one")
    homes.settle(beginnings("s" * 64 + "b" * 1000)[0], "two")
    assert homes.find(*beginnings("s" * 64 + "a" * 900)) == "one"
    assert homes.find(*beginnings("s" * 64 + "b" * 2000)) == "two"
    assert homes.find(*beginnings("s" * 64 + "c" * 1000)) is None
    ids = list(range(16))
    homes.settle(beginnings(ids * 9)[0], "ids")
    assert homes.find(*beginnings(ids * 8 + [5])) == "ids"
    chat = [{"role": "system", "content": "be short " * 30}]
    homes.settle(beginnings([*chat, {"role": "user", "content": "a"}])[0], "chat")
    assert homes.find(*beginnings([*chat, {"role": "user", "content": "b"}])) == "chat"
    for odd in ("", [], ["no", "ids"], [2**80], "\ud800", [{"role": b"x"}]):
        assert homes.find(*beginnings(odd)) is None
