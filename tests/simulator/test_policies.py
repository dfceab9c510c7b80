"""What every scaling policy must keep to, alone and in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytp.errors import ConfigError
from raytp.scaling import DeadlinePolicy, FixedPolicy, Observation, Policy, QueuePolicy, Scaler, load_policy
from raytp.simulator.cluster import ClusterConfig, simulate
from raytp.simulator.nodes import NodeConfig
from raytp.simulator.requests import SimulatedRequest, batch, poisson
from raytp.simulator.results import Results
from tests.simulator.small import SEEN, small_replica

seconds = st.floats(0, 1e5)
observations = st.builds(
    Observation,
    now_s=seconds,
    rows_waiting=st.integers(0, 10**6),
    rows_running=st.integers(0, 10**5),
    arrival_rows_per_s=st.floats(0, 1e4),
    tokens_per_row=st.none() | st.floats(1, 1e4),
    tokens_per_s_per_replica=st.none() | st.floats(0.1, 1e5),
    rows_per_replica=st.integers(1, 1024),
    startup_s=st.floats(0, 1000),
    num_ready=st.integers(0, 100),
    num_pending=st.integers(0, 100),
    num_nodes_pending=st.integers(0, 100),
    target=st.integers(0, 100),
    seconds_since_change=seconds,
    min_replicas=st.integers(0, 20),
    max_replicas=st.integers(20, 100),
)
policies = st.one_of(
    st.builds(FixedPolicy, st.none() | st.integers(0, 200)),
    st.builds(QueuePolicy, st.floats(1e-308, 1e308)),
    st.builds(DeadlinePolicy, st.floats(1e-308, 1e308)),
    st.sampled_from([lambda seen: -5, lambda seen: 10**9, lambda seen: seen.rows_waiting]),
)


@given(policies, st.lists(observations, max_size=10))
def test_a_target_is_never_above_max_or_below_min(policy: Policy, seen: list[Observation]) -> None:
    scaler = Scaler(policy, 3, 17)
    for one in seen:
        now = replace(one, target=scaler.target, min_replicas=3, max_replicas=17)
        assert 3 <= scaler.decide(now) <= 17


@given(policies, observations)
def test_a_policy_is_a_pure_function_that_comes_to_rest(policy: Policy, seen: Observation) -> None:
    """Shown the same load again and again, with its own answer as the target, it changes its mind once at most."""
    assert policy(seen) == policy(seen)
    scaler = Scaler(policy, seen.min_replicas, seen.max_replicas)
    scaler.target = min(max(seen.target, seen.min_replicas), seen.max_replicas)
    targets = [scaler.decide(replace(seen, target=scaler.target)) for _ in range(4)]
    assert len(set(targets)) == 1


@given(observations, st.integers(1, 10**5))
def test_more_waiting_rows_never_mean_fewer_replicas(seen: Observation, more: int) -> None:
    for policy in (QueuePolicy(60), DeadlinePolicy(10_000)):
        assert policy(replace(seen, rows_waiting=seen.rows_waiting + more)) >= policy(seen)


def run(policy: Policy, requests: list[SimulatedRequest], limits: tuple[int, int], startup_s: float) -> Results:
    """On nodes of one GPU that are paid for only while a replica is on them."""
    low, high = limits
    config = ClusterConfig(
        replica=small_replica(startup_s=startup_s, max_num_seqs=4),
        nodes=NodeConfig(gpus_per_node=1, max_nodes=high, provisioning_s=5.0, idle_timeout_s=0.0),
        policy=policy,
        min_replicas=low,
        max_replicas=high,
        decide_every_s=2.0,
    )
    return simulate(config, requests)


@pytest.mark.parametrize("load", [0.35, 0.8, 1.5, 2.4, 2.95])
def test_under_constant_load_the_number_of_replicas_comes_to_rest(load: float) -> None:
    """`load`: in replicas that are busy all the time."""
    rate = load * rows_per_s_of_one()
    requests = [
        SimulatedRequest(arrival_s=index / rate, prompt_tokens=64, output_tokens=400)
        for index in range(int(rate * 300))
    ]
    results = run(QueuePolicy(20.0), requests, (1, 12), 10.0)
    wanted = [tick.wanted for tick in results.ticks if 150 < tick.now_s < 300]
    assert len(set(wanted)) == 1
    assert load <= wanted[0] <= load * 1.25 + 2


def rows_per_s_of_one() -> float:
    """What one small replica does with rows enough."""
    requests = [SimulatedRequest(arrival_s=0, prompt_tokens=64, output_tokens=400)] * 100
    return 100 / run(FixedPolicy(1), requests, (1, 1), 0.0).seconds


@pytest.mark.parametrize("load", [0.35, 0.8])
def test_a_deadline_far_off_keeps_a_replica_while_rows_come(load: float) -> None:
    """One replica can do what comes: it is not given up in between, nor is there ever a second."""
    rate = load * rows_per_s_of_one()
    requests = [
        SimulatedRequest(arrival_s=index / rate, prompt_tokens=64, output_tokens=400)
        for index in range(int(rate * 300))
    ]
    results = run(DeadlinePolicy(400.0), requests, (0, 12), 10.0)
    assert {tick.wanted for tick in results.ticks if tick.now_s > 0} == {1}


def test_a_deadline_that_is_past_asks_for_no_more_than_the_rows_fill() -> None:
    """40 rows fill ten replicas; or it is so near that a new one would have a microsecond."""
    late = replace(SEEN, now_s=500.0, rows_waiting=40, num_ready=2, target=2)
    assert DeadlinePolicy(400.0)(late) == 2 + 10
    just_before = replace(late, now_s=400.0 - SEEN.startup_s - 4 - 1e-6)
    assert DeadlinePolicy(400.0)(just_before) == 2 + 10


def test_a_replica_goes_when_no_row_comes_before_its_rate_is_known() -> None:
    unknown = replace(SEEN, tokens_per_row=None, target=1, rows_running=0, arrival_rows_per_s=0.0)
    for policy in (QueuePolicy(30.0), DeadlinePolicy(400.0)):
        assert policy(unknown) == 0
        assert policy(replace(unknown, rows_running=1)) == 1
        assert policy(replace(unknown, arrival_rows_per_s=0.1)) == 1


@pytest.mark.parametrize("policy", [QueuePolicy(60.0), DeadlinePolicy(1000.0)])
@pytest.mark.parametrize("num_rows", [3, 16])
def test_the_first_rows_that_end_do_not_make_a_crowd(policy: Policy, num_rows: int) -> None:
    """One short row is done while long ones run: what all have cost is no estimate of what one costs."""
    short = SimulatedRequest(arrival_s=0.0, prompt_tokens=64, output_tokens=10)
    requests = [short, *[replace(short, output_tokens=1900)] * (num_rows - 1)]
    results = run(policy, requests, (0, 12), 10.0)
    assert max(tick.wanted for tick in results.ticks) == 1


def test_a_policy_that_asks_for_nothing_gets_one_replica_while_rows_wait() -> None:
    results = run(FixedPolicy(0), batch(3, 10, 10, 0), (0, 3), 1.0)
    assert all(one.error is None for one in results.requests)
    assert max(tick.ready for tick in results.ticks) == 1


@settings(max_examples=10, deadline=None)
@given(st.integers(200, 1000), st.integers(2, 10), st.floats(0, 20), st.floats(2, 8), st.integers(0, 10**6))
def test_a_feasible_deadline_is_met_with_fewer_gpu_seconds_than_max(
    num_rows: int, max_replicas: int, startup_s: float, slack: float, seed: int
) -> None:
    """Feasible: `slack` times what MAX replicas take, and the time in which the first shows its rate."""
    requests = batch(num_rows, 100, 100, seed)
    at_most = run(FixedPolicy(), requests, (0, max_replicas), startup_s)
    first_s = 5.0 + startup_s
    deadline_s = slack * at_most.seconds + 2 * first_s + 20.0
    results = run(DeadlinePolicy(deadline_s), requests, (0, max_replicas), startup_s)
    assert results.seconds <= deadline_s
    assert results.gpu_seconds < at_most.gpu_seconds


def test_rows_that_come_and_end_take_the_replicas_with_them() -> None:
    requests = poisson(400, 20.0, 64, 50, seed=1)
    later = [replace(one, arrival_s=one.arrival_s + 300.0) for one in requests]
    results = run(QueuePolicy(10.0), requests + later, (0, 4), 5.0)
    between = [tick for tick in results.ticks if 200 < tick.now_s < 290]
    assert {(tick.wanted, tick.nodes) for tick in between} == {(0, 0)}
    assert all(one.error is None for one in results.requests)


def answer_three(seen: Observation) -> int:
    """A user's own policy."""
    return 3


def test_policies_are_named_by_text() -> None:
    assert load_policy("fixed") == FixedPolicy()
    assert load_policy("fixed:4") == FixedPolicy(4)
    assert load_policy("queue:30") == QueuePolicy(30.0)
    assert load_policy("deadline:3600") == DeadlinePolicy(3600.0)
    assert load_policy("math:floor")(2.5) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "fixed:many",
        "fixed:-1",
        "queue:",
        "queue:-3",
        "queue:nan",
        "deadline:0",
        "math:nothing",
        "no.such:f",
    ],
)
def test_a_text_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"policy|_s="):
        load_policy(text)


@pytest.mark.parametrize(("low", "high"), [(2, 1), (-1, 3), (0, 0)])
def test_limits_that_contradict_each_other_are_refused(low: int, high: int) -> None:
    with pytest.raises(ConfigError, match="MIN"):
        Scaler(FixedPolicy(), low, high)


def test_a_policy_must_answer_with_an_integer() -> None:
    with pytest.raises(ConfigError, match="integer"):
        run(lambda seen: 1.5, batch(3, 10, 10, 0), (0, 3), 0.0)  # type: ignore[arg-type,return-value]
