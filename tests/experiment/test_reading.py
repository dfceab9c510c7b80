"""An experiment's file: everything that can stand in it, and that what cannot is refused with its name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raytp.errors import ConfigError
from raytp.experiment.reading import read_experiment
from raytp.experiment.spec import (
    ClusterKind,
    ClusterSpec,
    ExperimentSpec,
    LoseNode,
    SlowStart,
    SlowSteps,
    WorkloadSpec,
)
from tests.experiment.small_experiment import CONTENT, write

EXAMPLES = Path(__file__).parents[2] / "examples" / "autoscaling"

EVERYTHING = """
name: all of it
model: models/mine
tensor_parallel_size: 2
options: {max_num_seqs: 64, dtype: bfloat16}
workload:
  num_requests: 10
  prompt_tokens: 100
  output_tokens: 20
  rate: 0
  burst_rate: 5e1
  burst_s: 10
  burst_every_s: 60
cluster:
  kind: fake
  gpu: cpu
  gpus_per_node: 4
  nodes: 1:5
  provisioning_s: 30
  startup_s: 20.5
  idle_timeout_s: 15
replicas: 1:8
policies:
  - fixed:2
  - queue:30
  - own_policy_of_reading:always_two
seeds: [3, 1]
failures:
  - lose_node: {at_s: 120, node: 1}
  - slow_start: {seconds: 60}
  - slow_steps: {seconds: 0.05, replica: 2}
decide_every_s: 2.5
price_per_gpu_hour: 4
"""


def read(folder: Path, text: str) -> ExperimentSpec:
    file = folder / "experiment.yaml"
    file.write_text(text)
    return read_experiment(file)[0]


def test_everything_that_can_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "own_policy_of_reading.py").write_text("def always_two(seen):\n    return 2\n")
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert read(tmp_path, EVERYTHING) == ExperimentSpec(
        name="all of it",
        model=str(tmp_path / "models" / "mine"),
        tensor_parallel_size=2,
        options={"max_num_seqs": 64, "dtype": "bfloat16"},
        workload=WorkloadSpec(
            num_requests=10,
            prompt_tokens=100,
            output_tokens=20,
            rate=0.0,
            burst_rate=50.0,
            burst_s=10.0,
            burst_every_s=60.0,
        ),
        cluster=ClusterSpec(
            kind=ClusterKind.FAKE,
            gpu="cpu",
            gpus_per_node=4,
            min_nodes=1,
            max_nodes=5,
            provisioning_s=30.0,
            startup_s=20.5,
            idle_timeout_s=15.0,
        ),
        min_replicas=1,
        max_replicas=8,
        policies=("fixed:2", "queue:30", "own_policy_of_reading:always_two"),
        seeds=(3, 1),
        failures=(LoseNode(at_s=120.0, node=1), SlowStart(seconds=60.0), SlowSteps(seconds=0.05, replica=2)),
        decide_every_s=2.5,
        price_per_gpu_hour=4.0,
    )


def test_what_is_left_out_has_the_defaults_of_the_spec(tmp_path: Path) -> None:
    spec = read(tmp_path, "policies: fixed\n")
    assert spec == ExperimentSpec(
        name="experiment",
        model=None,
        workload=WorkloadSpec(),
        cluster=ClusterSpec(min_nodes=1, max_nodes=1),
        policies=("fixed",),
    )


@pytest.mark.parametrize(
    ("replicas", "size", "nodes"), [("0:9", 1, (0, 3)), ("4", 1, (1, 1)), ("5:8", 2, (3, 4)), ("0:3", 3, (0, 3))]
)
def test_there_are_as_many_nodes_as_replicas_need(
    tmp_path: Path, replicas: str, size: int, nodes: tuple[int, int]
) -> None:
    text = f"policies: [fixed]\ncluster: {{gpus_per_node: 4}}\nreplicas: {replicas}\ntensor_parallel_size: {size}\n"
    cluster = read(tmp_path, text).cluster
    assert (cluster.min_nodes, cluster.max_nodes) == nodes


def test_a_trace_lies_beside_the_file(tmp_path: Path) -> None:
    line = {"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}
    (tmp_path / "trace.jsonl").write_text(json.dumps(line))
    spec = read(tmp_path, "policies: [fixed]\nworkload: {trace: trace.jsonl}\n")
    assert spec.workload.trace == tmp_path / "trace.jsonl"


@pytest.mark.parametrize("name", ["bursts.yaml", "fake_nodes.yaml"])
def test_the_examples_are_experiments(name: str) -> None:
    spec, text = read_experiment(EXAMPLES / name)
    assert text == (EXAMPLES / name).read_text()
    assert len(spec.policies) > 1
    assert spec.model == "qwen3-8b" or Path(str(spec.model), "config.json").is_file()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is None, and must be a mapping"),
        ("[1, 2]", "must be a mapping"),
        ("a: b: c", "is no YAML"),
        ("policies: [fixed]\npolicies: [fixed]", "the key 'policies' stands twice"),
        ("seeds: [1]", "policies is missing"),
        ("policies: []", "policies is an empty list"),
        ("policies: [fixed]\nmodels: x", "no key 'models'; its keys are .*model"),
        ("policies: [fixed]\nworkload: {rats: 1}", "workload has no key 'rats'"),
        ("policies: [fixed]\nworkload: 3", "workload is 3"),
        ("policies: [fixed]\nworkload: {trace: nowhere.jsonl}", "nowhere.jsonl cannot be read"),
        ("policies: [fixed]\nworkload: {trace: x, rate: 3}", "workload.trace and workload.rate contradict"),
        ("policies: [fixed]\nworkload: {rate: 0}", "workload.rate is 0, and must be a number, above 0"),
        ("policies: [fixed]\nworkload: {rate: .inf}", "workload.rate is inf"),
        ("policies: [fixed]\nworkload: {burst_rate: 2}", "workload.burst_rate needs workload.rate"),
        ("policies: [fixed]\nworkload: {rate: 1, burst_s: 2}", "no meaning without workload.burst_rate"),
        ("policies: [fixed]\nworkload: {rate: 1, burst_rate: 2, burst_s: 301}", "burst_s=301 exceeds"),
        ("policies: [fixed]\nworkload: {num_requests: 0}", "num_requests is 0, and must be an integer, 1 to"),
        ("policies: [fixed]\nworkload: {num_requests: 010}", "num_requests is '010', and must be an integer"),
        ("policies: [fixed]\nworkload: {num_requests: 089}", "num_requests is '089', and must be an integer"),
        ("policies: [fixed]\nworkload: {rate: 010}", "rate is '010', and must be a number"),
        ("policies: [fixed]\nworkload: {num_requests: true}", "num_requests is True"),
        ("policies: [fixed]\ncluster: {kind: cloud}", "must be one of simulated, fake, ray"),
        ("policies: [fixed]\ncluster: {gpu: abacus}", "known: h200, cpu"),
        ("policies: [fixed]\ncluster: {nodes: many}", "MIN:MAX"),
        ("policies: [fixed]\ntensor_parallel_size: 9", "exceeds cluster.gpus_per_node=8"),
        ("policies: [fixed]\noptions: {max_sequences: 3}", "options: max_sequences is no setting"),
        ("policies: [fixed]\noptions: {max_num_seqs: 0}", "options: max_num_seqs=0"),
        ("policies: [fixed]\noptions: {tensor_parallel_size: 2}", "stands beside options"),
        ("policies: [fixed]\nreplicas: 3:2", "replicas is '3:2': MIN must be at least 0, MAX at least MIN"),
        ("policies: [fixed]\nreplicas: 0", "replicas is 0: MIN"),
        ("policies: [soon]", r"policies\[0\]: policy 'soon' is not known"),
        ("policies: [queue]", r"policies\[0\]: policy 'queue'"),
        ("policies: [3]", r"policies\[0\] is 3, and must be a policy"),
        ("policies: [no_such_module:f]", "there is no module no_such_module in the current folder"),
        ("policies: [broken_policy_of_reading:f]", "raised ZeroDivisionError"),
        ("policies: [fixed, queue:3, fixed]", r"policies\[2\] is 'fixed', which stands there already"),
        ("policies: [fixed]\nseeds: [-1]", r"seeds\[0\] is -1"),
        ("policies: [fixed]\ndecide_every_s: 0", "decide_every_s is 0, and must be a number, above 0"),
        ("policies: [fixed]\nprice_per_gpu_hour: much", "price_per_gpu_hour is 'much'"),
        ("policies: [fixed]\nfailures: [{lose_gpu: {}}]", r"failures\[0\] is .* one key of lose_node, slow_start"),
        ("policies: [fixed]\nfailures: [{lose_node: {}}]", r"failures\[0\].lose_node.at_s is missing"),
        ("policies: [fixed]\nfailures: [{slow_start: {seconds: 1, node: 2}}]", "slow_start has no key 'node'"),
        ("policies: [fixed]\nfailures: [{slow_steps: {seconds: 0}}]", r"slow_steps.seconds is 0, .* above 0"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "broken_policy_of_reading.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "experiment.yaml") in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.yaml", "bytes.yaml"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            read_experiment(tmp_path / name)


def paths_of(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value in nested mappings and lists, and of themselves."""
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(each for key, value in inside for each in paths_of(value, (*path, key)))]


FULL = copy.deepcopy(dict(CONTENT)) | {
    "failures": [{"lose_node": {"at_s": 1, "node": 0}}, {"slow_start": {"seconds": 1}}]
}
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates()
odd = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(scalars, inner, max_size=2), max_leaves=4
)


@settings(max_examples=150, deadline=None)
@example(path=("workload", "rate"), value=10**400)
@example(path=("policies",), value=[[]])
@given(path=st.sampled_from(paths_of(FULL)), value=odd)
def test_any_value_anywhere_is_taken_or_refused(
    tmp_path_factory: pytest.TempPathFactory, path: tuple[Any, ...], value: Any
) -> None:
    """Never another error; and a refusal names the key that was changed, or the one around it."""
    content: Any = copy.deepcopy(FULL)
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if path:
        parent[path[-1]] = value
    else:
        content = value
    file = tmp_path_factory.getbasetemp() / "odd.yaml"
    file.write_text(yaml.safe_dump(content))
    refusal = ""
    try:
        read_experiment(file)
    except ConfigError as error:
        refusal = str(error)
    assert not refusal or not path or str(path[0]) in refusal or "no YAML" in refusal


def test_values_can_be_put_in_place_of_the_file_s(tmp_path: Path) -> None:
    file = write(tmp_path / "small.yaml", cluster=None)
    spec, _ = read_experiment(file, {"policies": ["fixed:1"], "seeds": [7], "cluster.kind": "ray"})
    assert (spec.policies, spec.seeds, spec.cluster.kind) == (("fixed:1",), (7,), ClusterKind.RAY)
    with pytest.raises(ConfigError, match=r"seeds\[0\]"):
        read_experiment(file, {"seeds": [-7]})
