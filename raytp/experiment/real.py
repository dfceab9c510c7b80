"""A run on a Ray cluster: real engines, as many as the policy wants, on nodes that its autoscaler adds for them.

The cluster is one of fake nodes on this machine, or any other. Called by `raytp.experiment.running`. Next hop of a row:
`raytp.experiment.rows`, then `raytp.replicas.pool`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import ray

from raytp.config import EngineConfig, make_engine_config
from raytp.errors import ConfigError, EngineError, RaytpError
from raytp.experiment.account import Account
from raytp.experiment.fake_cluster import kill_raylet
from raytp.experiment.rows import Rows
from raytp.experiment.spec import ClusterKind, ExperimentSpec, LoseNode, Run, SlowStart, SlowSteps
from raytp.model_source import resolve_model
from raytp.ray_runtime import choose_device, interrupt_deferred, join_ray
from raytp.replicas.pool import ReplicaPool
from raytp.replicas.starting import prepare_start
from raytp.scaling import Scaler, load_policy
from raytp.simulator.results import Results
from workers.faults import Fault
from workers.model_config import load_model_config

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_COUNT_STEPS_EVERY_S = 2.0
_LEAVE_TIMEOUT_S = 60.0
"""Beyond the idle time-out, for nodes to go when all is done."""
ProgressCallback = Callable[[float, str], None]


def run_on_ray(run: Run, address: str | None, on_progress: ProgressCallback) -> Results:
    """Do it, in as much time as it takes; `on_progress` is told the share of rows that are done, and a word.

    `address`: of the cluster; None is that of RAY_ADDRESS, or the one that runs on this machine. What is measured, and
    what it means here:

    - a row's first token: when its last engine made it; a row is not streamed, so nobody has seen it before its end;
    - `gpu_seconds`: GPUs of nodes that were up and have what ranks take, until the last row's end;
    - `busy_gpu_seconds`: ranks of replicas that had rows to do, whether or not a step was running;
    - `tokens_per_s` of a tick: of rows that were answered, each row's spread evenly from its first token to its last.

    A node that is to be lost before it has come is lost when it comes. `check_experiment` must have passed. Raises
    ConfigError if this process has another Ray or the policy raises, EngineError if the engines end or a row is lost.
    """
    with _connected(address, on_progress):
        return RealRun(run, on_progress).go()


class RealRun:
    """One run, on the Ray that this process has. Use `go`, once."""

    def __init__(self, run: Run, on_progress: ProgressCallback) -> None:
        spec = run.spec
        config = _engine_config(spec)
        start = prepare_start(spec.model, config, spec.min_replicas, lambda number: _faults(spec, number))
        self._spec = spec
        self._on_progress = on_progress
        self._began_s = time.monotonic()
        vocab_size = load_model_config(resolve_model(spec.model).path).vocab_size
        self._rows = Rows(run.requests, run.seed, vocab_size, self._clock)
        self.pool = ReplicaPool(
            start,
            Scaler(load_policy(run.policy), spec.min_replicas, spec.max_replicas),
            num_unread=self._rows.num_unread,
            num_arrived=self._rows.num_arrived,
            decide_every_s=spec.decide_every_s,
            show_progress=False,
        )
        self._account = Account(
            self.pool,
            gpus_per_node=spec.cluster.gpus_per_node,
            gpus_per_replica=spec.tensor_parallel_size,
            tick_every_s=spec.decide_every_s,
        )
        self._nodes = _Nodes("GPU" if config.device == "cuda" else "CPU")
        self._losses = sorted(
            (each for each in spec.failures if isinstance(each, LoseNode)), key=lambda each: each.at_s
        )

    def go(self) -> Results:
        """See `run_on_ray`."""
        self._began_s = time.monotonic()
        with closing(self.pool), _StepCount(self.pool) as steps:
            self._look()
            for result in self.pool.complete(self._rows.jobs()):
                if result is not None:
                    self._rows.finish(*result)
                self._look()
            num_steps = steps.total()
        for loss in self._losses:
            logger.warning("node %d was to be lost, and had not come before all was done", loss.node)
        self._rows.check_all_finished()
        if self._spec.cluster.kind is ClusterKind.FAKE:
            self._wait_until_nodes_are_gone()
        return Results(
            requests=self._rows.times,
            ticks=self._account.ticks(self._rows.tokens_by(self._account.moments)),
            seconds=max((times.finish_s or 0.0 for times in self._rows.times), default=0.0),
            gpu_seconds=self._account.gpu_seconds,
            busy_gpu_seconds=self._account.busy_gpu_seconds,
            num_steps=num_steps,
        )

    def _clock(self) -> float:
        return time.monotonic() - self._began_s

    def _look(self) -> None:
        now_s = self._clock()
        if self._nodes.look():
            num_rows = len(self._rows.times)
            share = self._rows.num_finished / num_rows if num_rows else 1.0
            text = f"{self._rows.num_finished:,} of {num_rows:,} rows, {self.pool.crew().as_text()}"
            self._on_progress(share, text)
        while self._losses and self._losses[0].at_s <= now_s and self._nodes.lose(self._losses[0].node):
            self._losses.pop(0)
        self._account.look(now_s, len(self._nodes.alive))

    def _wait_until_nodes_are_gone(self) -> None:
        """So that the whole curve is there; what is paid for is not counted any more."""
        least, deadline = self._spec.cluster.min_nodes, self._spec.cluster.idle_timeout_s + _LEAVE_TIMEOUT_S
        end_s = time.monotonic() + deadline
        while len(self._nodes.alive) > least and time.monotonic() < end_s:
            num_idle = len(self._nodes.alive) - least
            self._on_progress(1.0, f"waiting for {num_idle} idle node{'' if num_idle == 1 else 's'} to go")
            self._account.note(self._clock(), len(self._nodes.alive))
            time.sleep(_LOOK_EVERY_S)
            self._nodes.look()
        self._account.note(self._clock(), len(self._nodes.alive), is_last=True)
        if len(self._nodes.alive) > least:
            logger.warning("nodes still there %g s after the last row: %d", deadline, len(self._nodes.alive))


class _Nodes:
    """Nodes of the cluster that have what ranks take."""

    def __init__(self, resource: str) -> None:
        self.alive: dict[str, str] = {}
        """Sockets of their raylets, by id."""
        self._resource = resource
        self._came: list[str] = []
        """Ids of all, in the order of their coming."""
        self._lost: set[str] = set()
        """Killed, though Ray may not know yet."""
        self._looked_s = 0.0

    def look(self) -> bool:
        """See what has changed, if the last look is long enough ago; whether it was."""
        now = time.monotonic()
        if now - self._looked_s < _LOOK_EVERY_S:
            return False
        self._looked_s = now
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(self._resource, 0) >= 1]
        self.alive = {node["NodeID"]: node["RayletSocketName"] for node in nodes if node["NodeID"] not in self._lost}
        self._came += sorted(set(self.alive) - set(self._came))  # fake nodes are numbered
        return True

    def lose(self, number: int) -> bool:
        """Kill the `number`th that has come; False if it has not come yet."""
        if number >= len(self._came):
            return False
        node_id = self._came[number]
        socket = self.alive.pop(node_id, None)
        if socket is None or not kill_raylet(socket):
            logger.warning("node %d was to be lost, and was gone already", number)
        self._lost.add(node_id)
        return True


class _StepCount:
    """Asks engines now and then how many steps they have done, since those that end say nothing any more."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._counts: dict[int, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raytp-step-count", daemon=True)

    def __enter__(self) -> _StepCount:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def total(self) -> int:
        """Steps of all engines, as far as they are known."""
        self._ask()
        return sum(self._counts.values())

    def _run(self) -> None:
        while not self._is_over.wait(_COUNT_STEPS_EVERY_S):
            self._ask()

    def _ask(self) -> None:
        for replica in list(self._pool.replicas):
            if replica.engine is not None:
                with suppress(RaytpError):  # it is about to end, or a step takes long
                    self._counts[replica.number] = replica.engine.stats(_COUNT_STEPS_EVERY_S).num_steps


def _engine_config(spec: ExperimentSpec) -> EngineConfig:
    options: dict[str, Any] = dict(spec.options)
    if spec.cluster.kind is ClusterKind.FAKE:
        options["device"] = "cpu"
    elif options.get("device", "auto") == "auto":
        options["device"] = choose_device()
    return make_engine_config(spec.tensor_parallel_size, options)


def _faults(spec: ExperimentSpec, number: int) -> tuple[Fault, ...]:
    """What makes the `number`th replica slow. A group is as slow as its slowest rank."""
    faults: list[Fault] = []
    for failure in spec.failures:
        if isinstance(failure, LoseNode) or failure.replica not in (None, number):
            continue
        is_for_all = failure.replica is None
        if isinstance(failure, SlowStart):  # new ranks are for the simulator a new replica
            faults.append(Fault(kind="delay", rank=0, point="loading", seconds=failure.seconds, always=is_for_all))
        elif isinstance(failure, SlowSteps):
            points = ("prefill", "decode")
            faults += [Fault(kind="delay", rank=0, point=at, seconds=failure.seconds, always=True) for at in points]
    return tuple(faults)


@contextmanager
def _connected(address: str | None, on_progress: ProgressCallback) -> Iterator[None]:
    """Raises ConfigError if this process has a Ray, and is to use another, EngineError if it cannot be joined."""
    had_ray = ray.is_initialized()
    if had_ray and address is not None:
        raise ConfigError("this process has a Ray already, so it cannot use another one: run ray.shutdown() before")
    try:
        if address is None:
            join_ray(lambda stage, _: on_progress(0.0, stage))
        else:
            _join(address)
        yield
    finally:
        if not had_ray:
            ray.shutdown()


def _join(address: str) -> None:
    try:
        with interrupt_deferred():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds, few of them its own
        raise EngineError(f"the Ray cluster at {address} cannot be joined: {error}") from error
