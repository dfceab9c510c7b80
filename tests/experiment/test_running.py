"""Runs: simulated ones are what the simulator says, and one that fails is an outcome of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raytp.errors import ConfigError, ModelNotFoundError
from raytp.experiment.reading import read_experiment
from raytp.experiment.running import check_experiment, run_all
from raytp.experiment.simulated import run_simulated
from raytp.experiment.spec import ClusterKind, Run
from raytp.experiment.workloads import make_requests
from raytp.scaling import load_policy
from raytp.simulator.capacity import make_replica
from raytp.simulator.cluster import ClusterConfig, simulate
from raytp.simulator.delays import Delay, Delays
from raytp.simulator.measured import find_gpu
from raytp.simulator.nodes import NodeConfig
from raytp.simulator.results import Results
from raytp.simulator.setup import load_model
from tests.experiment.small_experiment import run, write

TINY = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
FAILURES = [
    {"lose_node": {"at_s": 6}},
    {"slow_start": {"seconds": 2, "replica": 1}},
    {"slow_steps": {"seconds": 0.01}},
]


def test_a_simulated_run_is_what_the_simulator_makes_of_the_spec(tmp_path: Path) -> None:
    spec, _ = read_experiment(write(tmp_path / "small.yaml", failures=FAILURES))
    requests = make_requests(spec.workload, 1)
    expected = simulate(
        ClusterConfig(
            replica=make_replica(
                load_model("qwen3-0.6b"), find_gpu("h200").coefficients, 1, requests, 1.0, {"max_num_seqs": 8}
            ),
            nodes=NodeConfig(gpus_per_node=1, min_nodes=1, max_nodes=3, provisioning_s=2.0, idle_timeout_s=1.0),
            policy=load_policy("queue:2"),
            min_replicas=1,
            max_replicas=3,
            decide_every_s=0.5,
            lost_nodes=((6.0, 0),),
            delays=Delays(start=[Delay(seconds=2.0, replica=1)], step=[Delay(seconds=0.01)]),
        ),
        requests,
    )
    told: list[float] = []
    found = run_simulated(
        Run(spec=spec, policy="queue:2", seed=1, requests=requests), lambda share, text: told.append(share)
    )
    assert found == expected
    assert told == sorted(told)
    assert told[0] == 0


def test_on_a_cpu_steps_are_smaller_and_prefixes_can_be_left_alone(tmp_path: Path) -> None:
    """With 512 tokens a step instead of 8,192 a prompt of 2,000 takes four steps instead of one."""
    changes = {
        "workload": {"num_requests": 1, "prompt_tokens": 2000, "output_tokens": 1},
        "policies": ["fixed"],
        "seeds": [2],
    }
    steps, prompt_tokens = {}, 0
    for gpu in ("cpu", "h200"):
        spec, (outcome,) = run(tmp_path, cluster={"gpu": gpu}, **changes)
        assert outcome.results is not None
        steps[gpu] = outcome.results.num_steps
        prompt_tokens = make_requests(spec.workload, 2)[0].prompt_tokens
    assert steps == {"cpu": -(-prompt_tokens // 512), "h200": 1}


def test_each_policy_runs_with_each_seed_and_the_same_requests(tmp_path: Path) -> None:
    spec, outcomes = run(tmp_path)
    assert [(each.policy, each.seed) for each in outcomes] == [
        (policy, seed) for policy in spec.policies for seed in spec.seeds
    ]
    for seed in spec.seeds:
        arrivals = [[one.arrival_s for one in results_of(each).requests] for each in outcomes if each.seed == seed]
        assert all(each == arrivals[0] for each in arrivals)


def results_of(outcome: object) -> Results:
    results = getattr(outcome, "results", None)
    assert isinstance(results, Results)
    return results


def test_a_run_that_raises_does_not_touch_the_others(tmp_path: Path) -> None:
    (tmp_path / "failing_policy.py").write_text(
        "def late(seen):\n    if seen.now_s > 3:\n        raise LookupError('no idea')\n    return 1\n"
        "def half(seen):\n    return 0.5\n"
    )
    policies = ["fixed:1", "failing_policy:late", "failing_policy:half", "fixed:2"]
    _, outcomes = run(tmp_path, policies=policies, seeds=[0])
    assert [each.error for each in outcomes[::3]] == [None, None]
    assert outcomes[1].error is not None
    assert "raised LookupError: no idea (" in outcomes[1].error
    assert outcomes[2].error is not None
    assert "0.5, which is no integer" in outcomes[2].error
    assert [each.results is None for each in outcomes] == [False, True, True, False]
    assert run(tmp_path, policies=["fixed:2"], seeds=[0])[1][0].results == outcomes[3].results


def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    spec, _ = read_experiment(write(tmp_path / "small.yaml"))
    told: list[tuple[str, float]] = []
    for _ in run_all(spec, lambda text, share: told.append((text, share))):
        pass
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1] < 1) == (0, True)
    assert told[-1][0].startswith("deadline:20, seed 1 (6 of 6)")


def test_what_no_run_could_do_is_refused_before_any(tmp_path: Path) -> None:
    spec, _ = read_experiment(write(tmp_path / "small.yaml"))
    check_experiment(spec)
    with pytest.raises(ModelNotFoundError):
        check_experiment(replace(spec, model="no/such/folder"))
    with pytest.raises(ConfigError, match="raise the tensor-parallel size"):
        check_experiment(replace(spec, model="qwen3-8b", cluster=replace(spec.cluster, gpu="cpu")))
    for kind in (ClusterKind.FAKE, ClusterKind.RAY):
        on_ray = replace(spec, cluster=replace(spec.cluster, kind=kind))
        with pytest.raises(ModelNotFoundError):
            check_experiment(replace(on_ray, model="no/such/folder"))
    tiny = replace(spec, model=str(TINY), options={"device": "cuda"})
    with pytest.raises(ConfigError, match="CPU cores alone"):
        check_experiment(replace(tiny, cluster=replace(spec.cluster, kind=ClusterKind.FAKE)))
    lossy, _ = read_experiment(
        write(tmp_path / "lossy.yaml", failures=FAILURES, model=str(TINY)), {"cluster.kind": "ray"}
    )
    with pytest.raises(ConfigError, match="lose_node"):
        check_experiment(lossy)
