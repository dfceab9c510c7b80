"""All runs of an experiment, one after another. Called by `raytp.cli.experiment`.

Next hop of a run: `simulated`, or `real`, for a cluster of fake nodes inside `fake_cluster`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone

from raytp.errors import ConfigError
from raytp.experiment.simulated import check_simulation, run_simulated
from raytp.experiment.spec import ClusterKind, ExperimentSpec, LoseNode, Run
from raytp.experiment.workloads import make_requests
from raytp.model_source import resolve_model
from raytp.simulator.requests import SimulatedRequest
from raytp.simulator.results import Results
from workers.model_config import load_model_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one policy with one seed. Either `results` or `error` is there."""

    policy: str
    seed: int
    began: datetime
    wall_s: float
    """That it took to run."""
    results: Results | None
    error: str | None = None
    """Why there are no results."""


def check_experiment(spec: ExperimentSpec) -> None:
    """Raises RaytpError for what none of the runs could do."""
    kind = spec.cluster.kind
    if kind is ClusterKind.SIMULATED:
        check_simulation(spec)
    else:
        load_model_config(resolve_model(spec.model).path)
    if kind is ClusterKind.FAKE and spec.options.get("device", "cpu") == "cuda":
        raise ConfigError("fake nodes have CPU cores alone: leave out device, or run on a cluster with GPUs")
    if kind is ClusterKind.RAY and any(isinstance(failure, LoseNode) for failure in spec.failures):
        raise ConfigError(
            "failures: lose_node kills nodes, which raytp does on simulated and fake nodes alone: leave it out"
        )


def run_all(spec: ExperimentSpec, on_progress: Callable[[str, float], None]) -> Iterator[Outcome]:
    """Each policy with each seed, policy by policy. `on_progress` is told what is done, and the share of all that is.

    A run that raises is an outcome with its error, and the next one follows.
    """
    runs = list(itertools.product(spec.policies, spec.seeds))
    trace = None if spec.workload.trace is None else make_requests(spec.workload, 0)  # the file may change
    for number, (policy, seed) in enumerate(runs):
        label = f"{policy}, seed {seed} ({number + 1} of {len(runs)})"

        def show(share: float, text: str, label: str = label, number: int = number) -> None:
            on_progress(f"{label}: {text}", (number + share) / len(runs))

        show(0.0, "starting")
        yield _run(spec, policy, seed, trace, show)


def _run(
    spec: ExperimentSpec,
    policy: str,
    seed: int,
    trace: tuple[SimulatedRequest, ...] | None,
    show: Callable[[float, str], None],
) -> Outcome:
    began, start_s = datetime.now(timezone.utc), time.perf_counter()
    results, message = None, None
    try:
        requests = make_requests(spec.workload, seed) if trace is None else trace
        results = _results(Run(spec=spec, policy=policy, seed=seed, requests=requests), show)
    except Exception as error:  # a policy may be anybody's code, and the other runs are not to be lost
        logger.debug("the run failed", exc_info=True)
        message = f"{type(error).__name__}: {error}"
    wall_s = time.perf_counter() - start_s
    return Outcome(policy=policy, seed=seed, began=began, wall_s=wall_s, results=results, error=message)


def _results(run: Run, show: Callable[[float, str], None]) -> Results:
    kind = run.spec.cluster.kind
    if kind is ClusterKind.SIMULATED:
        return run_simulated(run, show)
    # Only here, so that a simulation needs no Ray.
    from raytp.experiment.real import run_on_ray

    if kind is ClusterKind.RAY:
        return run_on_ray(run, None, show)
    from raytp.experiment.fake_cluster import fake_cluster

    show(0.0, "starting the fake nodes' cluster")
    with fake_cluster(run.spec.cluster) as cluster:
        return run_on_ray(run, cluster.address, show)
