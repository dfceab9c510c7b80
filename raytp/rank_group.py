"""All rank actors of one epoch: placed, started in order, connected, and killed together.

Owns the placement group and the actor handles. Called by `raytp.rank_supply`; hands the step loop a `Transport` and
keeps out of it. Next hop of a request: `raytp.transport`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytp.autopsy import ACCIDENTS, describe_end, examine, find_processes, kill_processes
from raytp.config import EngineConfig
from raytp.errors import (
    EngineClosedError,
    EngineError,
    PlacementError,
    RankDiedError,
    RankFailedError,
    RaytpError,
    RendezvousError,
    StartTimeoutError,
)
from raytp.outputs import Failure, ProgressCallback
from raytp.placement import describe_missing, describe_shortage, group_name, remove_abandoned_groups, resource_of
from raytp.rank_actor import CONCURRENCY_GROUPS, RankActor
from raytp.ray_transport import RayTransport
from raytp.transport import DIED, GRACE_S, SocketTransport, Transport
from workers.channel import Listener
from workers.config import DeviceProfile, LoadReport, NodeInfo, WorkerConfig, WorkerStatus

_SAY_WHAT_IS_MISSING_AFTER_S = 5.0
_JOIN_GRACE_S = 10.0
"""The ranks keep this deadline themselves, and say whom they did not reach: let them have their say."""


class RankGroup:
    """One epoch's ranks. `start` builds everything or nothing; `close` leaves no actor and no placement group."""

    def __init__(
        self,
        config: EngineConfig,
        worker_config: WorkerConfig,
        epoch: int,
        placement_group: PlacementGroup | None = None,
    ) -> None:
        """`placement_group`: of the ranks before these."""
        self._config = config
        self._worker_config = worker_config
        self._epoch = epoch
        self._key = secrets.token_bytes(32)
        self.placement_group = placement_group
        self._ranks: list[Any] = []
        self._run_refs: list[Any] = []
        self._is_closed = False
        self._placing = threading.Lock()
        """Or a group that is just made would outlive a driver that is closed and killed meanwhile."""
        self.nodes: list[NodeInfo] = []

    def start(self, on_status: ProgressCallback) -> tuple[Transport, list[LoadReport]]:
        """Place, spawn, join, load, agree on the pool's size, and connect.

        Raises EngineError, or a RaytpError that a rank raised. The ranks are dead then; of a group that can be tried
        again, since they have died by themselves, the placement group is kept.
        """
        try:
            on_status("waiting for resources", 0.0)
            self._place(on_status)
            on_status("starting ranks", 0.0)
            self._spawn()
            on_status("joining", 0.0)
            self._join()
            on_status("loading weights", 0.0)
            reports = self._load(on_status)
            on_status("allocating the KV cache", 1.0)
            num_kv_blocks = min(report.num_kv_blocks for report in reports)
            self._wait([rank.allocate.remote(num_kv_blocks) for rank in self._ranks], "allocating the KV cache")
            return self._connect(), reports
        except (RankDiedError, RendezvousError):
            self.kill_ranks()
            raise
        except (ray.exceptions.RayError, OSError) as error:
            self.close()
            raise EngineError(f"the ranks could not be started, see whether Ray is well: {error}") from error
        except BaseException:
            self.close()
            raise

    def examine(self, failure: RaytpError) -> Failure:
        """A failure of these ranks, with all that can be found out about those that have died."""
        try:  # with transport="ray" there is no call that ends with the rank, but any fails once it is dead
            found = examine(self.nodes, self._run_refs or [rank.status.remote() for rank in self._ranks])
        except ray.exceptions.RayError as error:
            return Failure(report=f"{failure}\nno more can be found out: {error}", is_accident=False)
        report = str(failure)
        for rank, cause in found.items():
            name = self._name(rank)
            unexplained = f"{name} {DIED}"
            if unexplained in report:
                report = report.replace(unexplained, f"{name} died: {cause}")
            else:
                report += f"\n{name} has died: {cause}"
        return Failure(report=report, is_accident=any(cause.startswith(ACCIDENTS) for cause in found.values()))

    def give_away_placement(self) -> PlacementGroup | None:
        """For the next ranks: from now on it is theirs to remove."""
        given, self.placement_group = self.placement_group, None
        return given

    def kill_ranks(self) -> None:
        """Also those that are stopped, which do not hear of it when Ray wants them to end."""
        ranks, self._ranks = self._ranks, []
        if not ranks:
            return  # once is enough, and later their pids may be those of others
        for rank in ranks:
            with contextlib.suppress(Exception):
                ray.kill(rank, no_restart=True)
        kill_processes([(node.node_id, node.pid) for node in self.nodes] or find_processes(ranks))

    def close(self) -> None:
        """Kill every rank and give the resources back; may be called at any time, from another thread, and twice."""
        self._is_closed = True
        try:
            self.kill_ranks()
        finally:
            with self._placing:
                group = self.give_away_placement()
            if group is not None:
                with contextlib.suppress(Exception):
                    remove_placement_group(group)

    def profile(self, duration_s: float) -> list[DeviceProfile | None]:
        """What each rank's GPU does in the next `duration_s`, while steps go on; None for a rank on a CPU."""
        return self._wait([rank.profile.remote(duration_s) for rank in self._ranks], "profiling", grace_s=duration_s)

    def reach(self, point: str) -> None:
        """Let the ranks have their faults at a point that they do not see themselves. Returns when they had."""
        with contextlib.suppress(ray.exceptions.RayError):
            refs = [rank.reach.remote(point) for rank in self._ranks]
            ray.wait(refs, num_returns=len(refs), timeout=GRACE_S, fetch_local=False)

    def wait_for_exit(self, timeout_s: float) -> None:
        """After the transport's close: give the ranks a moment to end by themselves."""
        if self._run_refs:
            with contextlib.suppress(Exception):
                ray.wait(self._run_refs, num_returns=len(self._run_refs), timeout=timeout_s)

    @property
    def names(self) -> list[str]:
        """What to call each rank in a message."""
        return [f"rank {rank} (pid {node.pid} on {node.hostname})" for rank, node in enumerate(self.nodes)]

    def _check_open(self) -> None:
        """What was made before this check, `close` may have missed; after the raise, `start` closes once more."""
        if self._is_closed:
            raise EngineClosedError("the engine was shut down before it had started")

    def _place(self, on_status: ProgressCallback) -> None:
        self._check_open()
        bundles = [{resource_of(self._worker_config.device): 1.0}] * self._worker_config.world_size
        if self.placement_group is None:
            remove_abandoned_groups()
            name = group_name(str(ray.get_runtime_context().get_actor_id()))
            with self._placing:
                self._check_open()
                self.placement_group = placement_group(bundles, strategy=self._config.placement_strategy, name=name)
        strategy, timeout_s = self._config.placement_strategy, self._config.placement_timeout_s
        if self.placement_group.wait(timeout_seconds=min(timeout_s, _SAY_WHAT_IS_MISSING_AFTER_S)):
            return
        on_status(f"waiting for resources: {describe_missing(bundles, strategy, self.placement_group)}", 0.0)
        if not self.placement_group.wait(timeout_seconds=max(0.0, timeout_s - _SAY_WHAT_IS_MISSING_AFTER_S)):
            raise PlacementError(describe_shortage(bundles, strategy, timeout_s, self.placement_group))

    def _spawn(self) -> None:
        assert self.placement_group is not None
        actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankActor)  # type: ignore[call-overload]
        on_gpu = self._worker_config.device == "cuda"
        for rank in range(self._worker_config.world_size):
            strategy = PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=rank)
            options = actor_class.options(
                num_cpus=0 if on_gpu else 1,
                num_gpus=1 if on_gpu else 0,
                scheduling_strategy=strategy,
                max_restarts=0,
                max_task_retries=0,
            )
            self._ranks.append(options.remote(self._worker_config, rank, self._epoch))
        self._check_open()
        refs = [rank.node_info.remote() for rank in self._ranks]
        self.nodes = self._wait(refs, "starting the rank actors", on_wait=self._check_placed)

    def _check_placed(self) -> None:
        """Ray notices the loss of a node late; what was to start there would wait until it has another one."""
        if placement_group_table(self.placement_group).get("state") not in ("CREATED", "REMOVED"):
            raise RankDiedError("a node was lost while the rank actors started on it: Ray looks for another one")

    def _join(self) -> None:
        host = self.nodes[0].node_ip
        port = 0
        if self._worker_config.world_size > 1:
            (port,) = self._wait([self._ranks[0].open_rendezvous.remote(host)], "opening the rendezvous")
        joins = []
        for index, (rank, node) in enumerate(zip(self._ranks, self.nodes, strict=True)):
            neighbours = [other for other, each in enumerate(self.nodes) if each.node_id == node.node_id]
            gpu_ids = [self.nodes[other].gpu_id for other in neighbours]
            joins.append(rank.join.remote(host, port, node.node_ip, gpu_ids, neighbours.index(index)))
        self._wait(joins, "joining the process group", grace_s=_JOIN_GRACE_S)

    def _load(self, on_status: ProgressCallback) -> list[LoadReport]:
        def report_slowest() -> None:
            with contextlib.suppress(Exception):
                refs = [rank.status.remote() for rank in self._ranks]
                statuses: list[WorkerStatus] = ray.get(refs, timeout=1.0)
                on_status("loading weights", min(status.fraction for status in statuses))

        refs = [rank.load.remote() for rank in self._ranks]
        return self._wait(refs, "loading weights", on_wait=report_slowest)

    def _connect(self) -> Transport:
        settings = (self.names, self._epoch, self._config.step_timeout_s, self._config.heartbeat_timeout_s)
        if self._config.transport == "ray":
            return RayTransport(self._ranks, *settings)
        context = ray.get_runtime_context()
        is_local = [node.node_id == context.get_node_id() for node in self.nodes]
        host = None if all(is_local) else ray.util.get_node_ip_address()
        with closing(Listener(self._key, self._epoch, host)) as door:
            addresses = [door.local_address if local else door.remote_address for local in is_local]
            for rank, address in zip(list(self._ranks), addresses, strict=False):  # none are left if `close` came
                self._run_refs.append(rank.run.remote(address, self._key))
            self._check_open()
            connections = door.accept_ranks(len(addresses), self._config.startup_timeout_s, self._check_running)
        return SocketTransport(connections, *settings)

    def _check_running(self) -> None:
        """Raises what has ended a rank's run loop before it could connect."""
        if ray.wait(self._run_refs, timeout=0, fetch_local=False)[0]:
            self._raise_failure(self._run_refs, "connecting to the driver")

    def _wait(
        self, refs: list[Any], what: str, on_wait: Callable[[], None] | None = None, grace_s: float = 0.0
    ) -> list[Any]:
        """The values of one call on each of the first len(refs) ranks. The first failure ends the wait."""
        deadline = time.monotonic() + self._config.startup_timeout_s + grace_s
        pending = refs
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=0.2, fetch_local=False)
            if any(_failure(ref) for ref in done):
                self._raise_failure(refs, what)
            if pending and time.monotonic() > deadline:
                late = ", ".join(self._name(refs.index(ref)) for ref in pending)
                raise StartTimeoutError(
                    f"{what} took longer than startup_timeout_s={self._config.startup_timeout_s:g}; waiting for {late}"
                    f": see whether it is stuck, or raise the time-out if it is only slow"
                )
            if on_wait is not None:
                on_wait()
        return [ray.get(ref) for ref in refs]

    def _raise_failure(self, refs: list[Any], what: str) -> None:
        """One of these calls, one a rank, has failed. A death explains what others raise, and may be noticed later."""
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S, fetch_local=False)
        failures = {refs.index(ref): failure for ref in done if (failure := _failure(ref)) is not None}
        for rank, error in failures.items():
            if _is_hopeless(error):
                raise RankFailedError(f"{self._name(rank)} failed while {what}: {error}") from error
            if not isinstance(error, ray.exceptions.RayTaskError):  # then it is about the actor
                end = describe_end(self.nodes[rank] if self.nodes else None, str(error))
                raise RankDiedError(f"{self._name(rank)} died while {what}: {end}") from error
        for rank, error in failures.items():
            if isinstance(error.cause, RaytpError):
                raise error.cause from error
            reason = f"{type(error.cause).__name__}: {error.cause}"
            raise RankFailedError(f"{self._name(rank)} failed while {what} with {reason}\n{error}") from error

    def _name(self, rank: int) -> str:
        return self.names[rank] if self.nodes else f"rank {rank}"


def _failure(ref: Any) -> Any:
    """The exception that a finished call ended with, None if it ended well."""
    try:
        ray.get(ref)
    except ray.exceptions.RayError as error:
        return error
    return None


def _is_hopeless(error: Any) -> bool:
    """Whether the actor could not even be made, for want of a package say: then it never can."""
    return isinstance(error, ray.exceptions.RuntimeEnvSetupError) or getattr(error, "actor_init_failed", False)
