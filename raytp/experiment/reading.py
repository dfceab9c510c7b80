"""From an experiment's file to `ExperimentSpec`. `docs/autoscaling.md` lists its keys.

Whatever can be refused is refused here, before anything runs, by a ConfigError that names the key, the value, the limit
and the remedy. Called by `raytp.cli.experiment`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from raytp.config import make_engine_config
from raytp.errors import ConfigError
from raytp.experiment.section import MAX_COUNT, Section, is_integer
from raytp.experiment.spec import (
    ClusterKind,
    ClusterSpec,
    ExperimentSpec,
    Failure,
    LoseNode,
    SlowStart,
    SlowSteps,
    WorkloadSpec,
)
from raytp.experiment.yaml_file import read_yaml
from raytp.scaling import load_policy
from raytp.scaling.limits import read_limits
from raytp.scaling.loading import look_also_in
from raytp.simulator.measured import GPUS
from raytp.simulator.requests import read_trace
from scheduler.errors import shown

T = TypeVar("T")

_MAX_REPLICAS = 10_000
_DRAWN = ("num_requests", "prompt_tokens", "output_tokens", "rate", "burst_rate", "burst_s", "burst_every_s")
_BURSTS = ("burst_s", "burst_every_s")


def read_experiment(path: Path, instead: Mapping[str, Any] | None = None) -> tuple[ExperimentSpec, str]:
    """The experiment that a file describes, and the file's text.

    `instead`: values in place of the file's, by key, such as {"seeds": [1], "cluster.kind": "fake"}. The file's traces
    and models are looked for beside it, and so are modules of policies. Raises ConfigError.
    """
    content, text = read_yaml(path)
    for key, value in (instead or {}).items():
        content = _replaced(content, key.split("."), value)
    folder = path.resolve().parent
    look_also_in(str(folder))
    try:
        return _read(Section("", content), folder, path.stem), text
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _replaced(content: Any, keys: Sequence[str], value: Any) -> Any:
    """A copy with another value; what is no mapping is left for `Section` to complain about."""
    if not keys:
        return value
    inside = {} if content is None else content
    return {**inside, keys[0]: _replaced(inside.get(keys[0]), keys[1:], value)} if isinstance(inside, dict) else content


def _read(file: Section, folder: Path, stem: str) -> ExperimentSpec:
    size = file.integer("tensor_parallel_size", 1, least=1, most=_MAX_REPLICAS)
    least, most = _limits(file, "replicas", (1, 1))
    spec = ExperimentSpec(
        name=file.text("name", stem),
        model=_model(file, folder),
        tensor_parallel_size=size,
        options=_options(file, size),
        workload=_workload(file.section("workload"), folder),
        cluster=_cluster(file.section("cluster"), size, (least, most)),
        min_replicas=least,
        max_replicas=most,
        policies=_policies(file),
        seeds=_all_of(file, "seeds", (0,), _seed),
        failures=_all_of(file, "failures", (), _failure),
        decide_every_s=file.number("decide_every_s", 5.0, above=1e-3),
        price_per_gpu_hour=file.number("price_per_gpu_hour", None),
    )
    file.done()
    return spec


def _model(file: Section, folder: Path) -> str | None:
    """A path is one of the file's folder; anything else is a shape or a hub id."""
    name = file.text("model", None)
    if name is None:
        return None
    beside = _beside(folder, name)
    return str(beside) if os.path.exists(beside) else name


def _beside(folder: Path, name: str) -> Path:
    return folder / os.path.expanduser(name)  # pathlib's own raises for a user that there is not


def _options(file: Section, tensor_parallel_size: int) -> Mapping[str, Any]:
    found = file.value("options")
    options: Any = {} if found is None else found
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ConfigError(f"options is {shown(options)}, and must be a mapping of LLM's settings")
    if "tensor_parallel_size" in options:
        raise ConfigError("options.tensor_parallel_size stands beside options, not inside: move it out")
    try:
        make_engine_config(tensor_parallel_size, options)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"options: {error}") from None
    return options


def _workload(section: Section, folder: Path) -> WorkloadSpec:
    trace = section.text("trace", None)
    given = [name for name in _DRAWN if name in section]
    if trace is not None and given:
        raise ConfigError(
            f"workload.trace and workload.{given[0]} contradict each other: a trace has its own requests; leave one out"
        )
    if "burst_rate" not in section and (alone := [name for name in _BURSTS if name in section]):
        raise ConfigError(f"workload.{alone[0]} has no meaning without workload.burst_rate: give it, too")
    if "burst_rate" in section and "rate" not in section:
        raise ConfigError("workload.burst_rate needs workload.rate, which holds between bursts; it may be 0 there")
    defaults = WorkloadSpec()
    workload = WorkloadSpec(
        trace=None if trace is None else _beside(folder, trace),
        num_requests=section.integer("num_requests", defaults.num_requests, least=1),
        prompt_tokens=section.integer("prompt_tokens", defaults.prompt_tokens, least=1, most=MAX_COUNT // 2),
        output_tokens=section.integer("output_tokens", defaults.output_tokens, least=1, most=MAX_COUNT // 2),
        rate=section.number("rate", None, above=None if "burst_rate" in section else 0),
        burst_rate=section.number("burst_rate", None, above=0),
        burst_s=section.number("burst_s", defaults.burst_s, above=0),
        burst_every_s=section.number("burst_every_s", defaults.burst_every_s, above=0),
    )
    section.done()
    if workload.burst_s > workload.burst_every_s:
        raise ConfigError(
            f"workload.burst_s={workload.burst_s:g} exceeds workload.burst_every_s={workload.burst_every_s:g}, the "
            f"time from one burst to the next: shorten the one or lengthen the other"
        )
    if workload.trace is not None:
        read_trace(workload.trace)
    return workload


def _cluster(section: Section, tensor_parallel_size: int, replicas: tuple[int, int]) -> ClusterSpec:
    defaults = ClusterSpec()
    kinds = [kind.value for kind in ClusterKind]
    kind = section.text("kind", defaults.kind.value)
    if kind not in kinds:
        raise ConfigError(f"cluster.kind is {kind!r}, and must be one of {', '.join(kinds)}")
    gpu = section.text("gpu", defaults.gpu)
    if gpu not in GPUS:
        raise ConfigError(f"cluster.gpu is {gpu!r}, which was not measured; known: {', '.join(GPUS)}")
    gpus_per_node = section.integer("gpus_per_node", defaults.gpus_per_node, least=1, most=_MAX_REPLICAS)
    per_node = gpus_per_node // tensor_parallel_size
    if per_node == 0 and kind != ClusterKind.RAY.value:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} exceeds cluster.gpus_per_node={gpus_per_node}, and a replica "
            f"is on one node: lower the one or raise the other"
        )
    least, most = (-(-count // max(1, per_node)) for count in replicas)
    min_nodes, max_nodes = _limits(section, "nodes", (least, most))
    cluster = ClusterSpec(
        kind=ClusterKind(kind),
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        provisioning_s=section.number("provisioning_s", defaults.provisioning_s),
        startup_s=section.number("startup_s", defaults.startup_s),
        idle_timeout_s=section.number("idle_timeout_s", defaults.idle_timeout_s),
    )
    section.done()
    return cluster


def _limits(section: Section, name: str, default: tuple[int, int]) -> tuple[int, int]:
    found = section.value(name)
    return default if found is None else read_limits(found, section.label(name), _MAX_REPLICAS)


def _policies(file: Section) -> tuple[str, ...]:
    return file.required("policies", _all_of(file, "policies", None, _policy))


def _policy(label: str, text: Any) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"{label} is {shown(text)}, and must be a policy, such as fixed, queue:30 or MODULE:FUNCTION")
    try:
        load_policy(text)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    return text


def _seed(label: str, value: Any) -> int:
    if not is_integer(value, 0, 2**63 - 1):
        raise ConfigError(f"{label} is {shown(value)}, and must be an integer of at least 0")
    return int(value)


def _all_of(file: Section, name: str, default: Any, read: Callable[[str, Any], T]) -> Any:
    """Each item of a list, none of them twice."""
    items: Sequence[Any] | None = file.items(name)
    if items is None:
        return default
    found = tuple(read(f"{name}[{index}]", item) for index, item in enumerate(items))
    for index, item in enumerate(found):
        if item in found[:index]:
            raise ConfigError(f"{name}[{index}] is {shown(items[index])}, which stands there already: leave it out")
    return found


def _lose_node(section: Section) -> LoseNode:
    return LoseNode(at_s=section.required("at_s", section.number("at_s", None)), node=section.integer("node", 0))


def _slow_start(section: Section) -> SlowStart:
    return SlowStart(seconds=_seconds(section), replica=section.integer("replica", None))


def _slow_steps(section: Section) -> SlowSteps:
    return SlowSteps(seconds=_seconds(section), replica=section.integer("replica", None))


def _seconds(section: Section) -> float:
    return section.required("seconds", section.number("seconds", None, above=0))


_FAILURES: Mapping[str, Callable[[Section], Failure]] = {
    "lose_node": _lose_node,
    "slow_start": _slow_start,
    "slow_steps": _slow_steps,
}


def _failure(label: str, item: Any) -> Failure:
    if not isinstance(item, dict) or len(item) != 1 or (name := next(iter(item))) not in _FAILURES:
        raise ConfigError(f"{label} is {shown(item)}, and must have one key of {', '.join(_FAILURES)}")
    section = Section(f"{label}.{name}", item[name])
    failure = _FAILURES[name](section)
    section.done()
    return failure
