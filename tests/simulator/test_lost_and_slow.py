"""Lost nodes, slow starts and slow steps: no row is lost or done twice, and times are what arithmetic says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytp.errors import ConfigError
from raytp.scaling import DeadlinePolicy, FixedPolicy, Policy, QueuePolicy
from raytp.simulator.cluster import ClusterConfig, simulate
from raytp.simulator.delays import Delay, Delays
from raytp.simulator.nodes import NodeConfig
from raytp.simulator.requests import SimulatedRequest
from raytp.simulator.results import Results
from tests.simulator.small import small_replica

PROVISIONING_S, STARTUP_S = 4.0, 3.0


def cluster(policy: Policy, num_replicas: int, *, gpus_per_node: int = 1, min_replicas: int = 0) -> ClusterConfig:
    return ClusterConfig(
        replica=small_replica(startup_s=STARTUP_S, max_num_seqs=4),
        nodes=NodeConfig(
            gpus_per_node=gpus_per_node,
            min_nodes=-(-min_replicas // gpus_per_node),
            max_nodes=-(-num_replicas // gpus_per_node),
            provisioning_s=PROVISIONING_S,
            idle_timeout_s=2.0,
        ),
        policy=policy,
        min_replicas=min_replicas,
        max_replicas=num_replicas,
        decide_every_s=1.0,
    )


def fixed(num_replicas: int) -> ClusterConfig:
    """So many, each on a node of its own that is there from the beginning."""
    return cluster(FixedPolicy(), num_replicas, min_replicas=num_replicas)


def rows(count: int, output_tokens: int = 200) -> list[SimulatedRequest]:
    return [SimulatedRequest(arrival_s=0.0, prompt_tokens=50, output_tokens=output_tokens)] * count


@st.composite
def arrivals(draw: st.DrawFn) -> list[SimulatedRequest]:
    made, now = [], 0.0
    for _ in range(draw(st.integers(1, 40))):
        now += draw(st.sampled_from([0.0, 0.0, 0.01, 0.7]))
        prefix = draw(st.sampled_from([0, 0, 40]))
        request = SimulatedRequest(
            arrival_s=now,
            prompt_tokens=prefix + draw(st.integers(1, 60)),
            output_tokens=draw(st.integers(1, 300)),
            prefix_id="common" if prefix else None,
            prefix_tokens=prefix,
        )
        made.append(request)
    too_long = SimulatedRequest(arrival_s=now, prompt_tokens=3000, output_tokens=1)
    return [*made, too_long] if draw(st.booleans()) else made


policies = st.sampled_from([FixedPolicy(), FixedPolicy(2), QueuePolicy(5.0), DeadlinePolicy(30.0)])
losses = st.lists(st.tuples(st.floats(0, 25), st.integers(0, 6)), max_size=5)
delays = st.lists(st.builds(Delay, seconds=st.floats(0, 0.5), replica=st.none() | st.integers(0, 4)), max_size=3)


@settings(max_examples=40, deadline=None)
@given(policies, arrivals(), losses, delays, st.integers(1, 2))
def test_every_request_ends_once_whatever_is_lost_or_slow(
    policy: Policy,
    requests: list[SimulatedRequest],
    lost_nodes: list[tuple[float, int]],
    slow: list[Delay],
    gpus_per_node: int,
) -> None:
    config = replace(
        cluster(policy, 4, gpus_per_node=gpus_per_node),
        lost_nodes=tuple(lost_nodes),
        delays=Delays(start=slow, step=[replace(delay, seconds=delay.seconds / 50) for delay in slow]),
    )
    results = simulate(config, requests)
    # The simulation counts each end, and stops when as many have been as there are requests: none is missing, so none
    # has ended twice.
    for request, times in zip(requests, results.requests, strict=True):
        assert times.finish_s is not None
        assert (times.error is not None) == (request.prompt_tokens == 3000)
        if times.error is None:
            assert times.first_token_s is not None
            assert request.arrival_s < times.first_token_s <= times.finish_s <= results.seconds
    assert 0 <= results.busy_gpu_seconds <= results.gpu_seconds + 1e-6
    assert simulate(config, requests) == results


@settings(max_examples=20, deadline=None)
@given(arrivals(), losses)
def test_work_is_conserved(requests: list[SimulatedRequest], lost_nodes: list[tuple[float, int]]) -> None:
    """Tokens are those of the requests if no node is lost; what is lost with a node is computed again, not less."""
    wanted = sum(one.output_tokens for one in requests if one.prompt_tokens < 3000)
    undisturbed, disturbed = num_tokens(fixed(3), requests), num_tokens(with_losses(fixed(3), lost_nodes), requests)
    assert undisturbed == wanted
    assert disturbed >= wanted


def with_losses(config: ClusterConfig, lost_nodes: list[tuple[float, int]]) -> ClusterConfig:
    return replace(config, lost_nodes=tuple(lost_nodes))


def num_tokens(config: ClusterConfig, requests: list[SimulatedRequest]) -> int:
    """All output tokens that were sampled, by the ticks."""
    ticks = simulate(config, requests).ticks
    return round(sum(tick.tokens_per_s * (tick.now_s - last.now_s) for last, tick in pairwise(ticks)))


def test_the_rows_of_a_lost_node_begin_again_elsewhere() -> None:
    alone = simulate(fixed(1), rows(1)).requests[0]
    assert alone.finish_s is not None
    took_s = alone.finish_s - STARTUP_S
    lost_s = STARTUP_S + took_s / 2
    again = simulate(with_losses(fixed(1), [(lost_s, 0)]), rows(1)).requests[0]
    assert again.finish_s == pytest.approx(lost_s + PROVISIONING_S + STARTUP_S + took_s)
    assert again.first_token_s == alone.first_token_s  # it had been told


def test_replicas_that_are_ready_at_the_same_moment_share_the_rows() -> None:
    """Of four each has room for all of the eight rows, and takes two."""
    four = replace(fixed(4), replica=small_replica(max_num_seqs=16))
    two_rows = simulate(replace(fixed(1), replica=small_replica(max_num_seqs=16)), rows(2))
    assert simulate(four, rows(8)).seconds == pytest.approx(two_rows.seconds)


def test_a_node_that_is_gone_or_never_comes_cannot_be_lost() -> None:
    assert simulate(with_losses(fixed(1), [(0.5, 3)]), rows(1)) == simulate(fixed(1), rows(1))
    twice = with_losses(fixed(1), [(1.0, 0), (2.0, 0)])
    assert simulate(twice, rows(1)) == simulate(with_losses(fixed(1), [(1.0, 0)]), rows(1))


def test_a_node_that_comes_after_it_was_to_be_lost_is_lost_when_it_comes() -> None:
    """Of a cluster without nodes the first comes after 4 s, is lost, and the second comes after 4 s more."""
    config = cluster(FixedPolicy(), 1)
    undisturbed, disturbed = simulate(config, rows(1)), simulate(with_losses(config, [(1.0, 0)]), rows(1))
    assert disturbed.seconds == pytest.approx(undisturbed.seconds + PROVISIONING_S)


def test_a_slow_start_delays_one_replica_by_its_seconds() -> None:
    slow = replace(fixed(2), delays=Delays(start=[Delay(seconds=5.0, replica=1)]))
    ready = {tick.now_s: tick.ready for tick in simulate(slow, rows(40, 2000)).ticks}
    assert [ready[second] for second in (2, 4, 7, 9)] == [0, 1, 1, 2]
    every = replace(fixed(2), delays=Delays(start=[Delay(seconds=5.0)]))
    assert simulate(every, rows(8)).seconds == pytest.approx(simulate(fixed(2), rows(8)).seconds + 5.0)


def test_slow_steps_add_their_seconds_to_each_step_of_one_replica() -> None:
    plain, slow = fixed(2), replace(fixed(2), delays=Delays(step=[Delay(seconds=0.25, replica=1)]))
    before, after = simulate(plain, rows(2)), simulate(slow, rows(2))
    assert before.num_steps == after.num_steps == 2 * 200
    first, second = (finish_of(after, index) - finish_of(before, index) for index in range(2))
    assert first == pytest.approx(0, abs=1e-9)
    assert second == pytest.approx(200 * 0.25)
    assert after.busy_gpu_seconds == pytest.approx(before.busy_gpu_seconds + 200 * 0.25)


def finish_of(results: Results, index: int) -> float:
    finish_s = results.requests[index].finish_s
    assert finish_s is not None
    return finish_s


@pytest.mark.parametrize("wrong", [{"seconds": -1.0}, {"seconds": float("nan")}, {"seconds": 1.0, "replica": -1}])
def test_a_delay_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        Delay(**wrong)  # type: ignore[arg-type]
