"""What a pool does with rows and with replicas, whatever becomes of those, seen with stubs."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from itertools import count

import pytest

from raytp.errors import ConfigError, EngineError, PlacementError, WeightsError
from raytp.replicas import gauge, pool, replica
from raytp.replicas.crew import Crew
from raytp.replicas.homes import Homes, beginnings
from raytp.replicas.limits import Limits, read_limits
from raytp.replicas.pool import ReplicaPool
from raytp.scaling import FixedPolicy, Scaler
from scheduler.sampling_params import SamplingParams
from tests.batch.stub_engine import answer_to
from tests.replicas.stub_replica import StubReplica

PARAMS = SamplingParams()


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """What happens every few seconds happens every few milliseconds."""
    for module, name in [(pool, "_TICK_S"), (pool, "_POLL_S"), (pool, "_PATIENCE_S"), (replica, "_IDLE_S")]:
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(replica, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(gauge, "_INTERVAL_S", 0.05)


def fixed(most, least=1):
    return Scaler(FixedPolicy(), least, most)


class Starter:
    """Starts the given engines one after another; an exception among them is a start that fails."""

    def __init__(self, engines):
        self.engines = engines
        self.lock = threading.Lock()
        self.started = []

    def __call__(self, number, on_progress):
        with self.lock:
            engine = next(self.engines)
            if isinstance(engine, Exception):
                raise engine
            self.started.append(engine)
        return engine


def jobs_of(prompts):
    return ((i, prompt, PARAMS) for i, prompt in enumerate(prompts))


def answer_all(starter, scaler, prompts, **settings):
    """Every prompt's text, and that each was answered once."""
    with ReplicaPool(starter, scaler, show_progress=False, **settings) as replicas:
        results = [each for each in replicas.complete(jobs_of(prompts)) if each is not None]
    keys = [key for key, _ in results]
    assert sorted(keys) == list(range(len(prompts)))
    assert all(engine.is_shut_down for engine in starter.started)
    return {key: output.text for key, output in results}


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
    assert slow.most_open <= 2 + replica._MIN_SPARE
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


def test_closing_the_answers_early_and_the_pool_leaves_nothing():
    starter = Starter(StubReplica(delay_s=0.01) for _ in count())
    with ReplicaPool(starter, fixed(3), show_progress=False) as replicas:
        results = replicas.complete(jobs_of(map(str, range(100000))))
        while next(results) is None:
            pass
        results.close()
    assert all(engine.is_shut_down for engine in starter.started)


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


class Arrivals:
    """Rows that come at moments, in seconds from now; `pool.complete` reads `jobs`."""

    def __init__(self, moments):
        self.start_s = time.monotonic()
        self.moments = moments
        self.num_read = 0

    def num_arrived(self):
        return sum(moment <= time.monotonic() - self.start_s for moment in self.moments)

    def num_unread(self):
        return self.num_arrived() - self.num_read

    def jobs(self):
        for i, moment in enumerate(self.moments):
            while time.monotonic() - self.start_s < moment:
                yield None
            self.num_read += 1
            yield i, f"prompt {i}", PARAMS


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


def test_a_crew_in_words():
    crew = Crew(num_ready=2, num_starting=1, num_waiting=3, num_leaving=0, num_nodes=1)
    assert crew.as_text() == "2 replicas on 1 node, 1 starting, 3 waiting for room"
    assert crew.num_pending == 4
    assert Crew(num_ready=0, num_starting=0, num_waiting=0, num_leaving=0, num_nodes=0).as_text() == "0 replicas"


@pytest.mark.parametrize(
    ("text", "limits"), [("2", (2, 2)), ("1:4", (1, 4)), (3, (3, 3)), ((1, 2), (1, 2)), ([2, 5], (2, 5))]
)
def test_limits_as_users_write_them(text, limits):
    assert read_limits(text) == Limits(*limits)


@pytest.mark.parametrize("text", ["", "0", "2:1", "0:3", "1:2:3", "-1", "many", 0, True, (1,), (1, 2.0), None])
def test_limits_that_are_none(text):
    with pytest.raises(ConfigError, match="replicas"):
        read_limits(text)
