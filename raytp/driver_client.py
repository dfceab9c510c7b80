"""A caller's end of its driver actor: starts it, talks to it, and ends it.

Turns Ray's wrapped exceptions back into raytp's own. Called by `raytp.llm`. Next hop of a request: `raytp.driver`.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import ray
from ray.util import get_placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytp.config import EngineConfig
from raytp.driver import Driver, DriverStatus
from raytp.errors import EngineClosedError, EngineError, RaytpError
from raytp.outputs import CompletionUpdate, EngineInfo, Request
from raytp.placement import group_name
from scheduler.updates import SchedulerStats
from workers.config import DeviceProfile, WorkerConfig

_MAX_CONCURRENT_CALLS = 128
_CALL_TIMEOUT_S = 60.0
_SHUTDOWN_TIMEOUT_S = 10.0


class DriverClient:
    """One engine, as its caller sees it."""

    def __init__(self, config: EngineConfig, worker_config: WorkerConfig, vocab_size: int) -> None:
        """Places the driver on the caller's own node: no use without it, and safe from the loss of others."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = ray.remote(Driver).options(
            num_cpus=0, max_concurrency=_MAX_CONCURRENT_CALLS, scheduling_strategy=here, max_restarts=0
        )
        self._startup_timeout_s = config.startup_timeout_s
        self._actor: Any = options.remote(config, worker_config, vocab_size)
        # Dropped without a shutdown, the driver still gives its ranks' resources back; Ray would keep them for the job.
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end_unwaited, self._actor, self._pid)
        self._finalizer.atexit = False

    def start(self, on_status: Callable[[str, float], None]) -> EngineInfo:
        """Wait until the engine is ready; ends it again if that fails or is interrupted."""
        try:
            ready = self._actor.start.remote()
            deadline = time.monotonic() + self._startup_timeout_s
            while not ray.wait([ready], timeout=0.2)[0]:
                status = self._status()
                if status is not None:  # it answers, so it keeps the deadlines of the start-up itself
                    deadline = time.monotonic() + self._startup_timeout_s
                    on_status(status.stage, status.fraction)
                elif time.monotonic() > deadline:
                    raise EngineError(
                        f"the driver actor did not answer within startup_timeout_s={self._startup_timeout_s:g}"
                    )
            info: EngineInfo = self._get(ready)
            return info
        except BaseException:
            self.shutdown()
            raise

    def _status(self) -> DriverStatus | None:
        """How far the start-up has come; None if the driver does not say."""
        try:
            status: DriverStatus = ray.get(self._actor.status.remote(), timeout=1.0)
        except ray.exceptions.RayError:  # of a driver that has died, `start` says more
            return None
        return status

    def submit(self, client_id: str, requests: list[Request]) -> None:
        """Queue requests; news of them comes through `poll`."""
        self._get(self._call("submit", client_id, requests))

    def poll(self, client_id: str, timeout_s: float) -> list[CompletionUpdate]:
        """News of this caller's requests; empty if there was none within `timeout_s`."""
        updates: list[CompletionUpdate] = self._get(self._call("poll", client_id, timeout_s), timeout_s)
        return updates

    def abort(self, client_id: str, request_id: int, index: int, finish_reason: str) -> None:
        """End one completion; does not wait for it."""
        self._call("abort", client_id, request_id, index, finish_reason)

    def forget(self, client_id: str) -> None:
        """End all that this caller has running; does not wait for it."""
        if self._actor is not None:
            self._call("forget", client_id)

    def stats(self) -> SchedulerStats:
        """Counts and load of the engine's scheduler."""
        stats: SchedulerStats = self._get(self._call("stats"))
        return stats

    def step_loop_cpu_s(self) -> float:
        """CPU time of the driver's step loop so far, in seconds."""
        cpu_s: float = self._get(self._call("step_loop_cpu_s"))
        return cpu_s

    def profile(self, duration_s: float) -> list[DeviceProfile | None]:
        """What each rank's GPU does in the next `duration_s`; None for a rank on a CPU."""
        profiles: list[DeviceProfile | None] = self._get(self._call("profile", duration_s), duration_s)
        return profiles

    def shutdown(self) -> None:
        """End the engine: its ranks, its placement group, its driver. May be called twice."""
        if os.getpid() != self._pid:
            return  # a forked process does not own the engine, and Ray's calls would hang in it
        actor, self._actor = self._actor, None
        self._finalizer.detach()
        if actor is None or not ray.is_initialized():
            return
        try:
            with contextlib.suppress(Exception):
                ray.get(actor.shutdown.remote(), timeout=_SHUTDOWN_TIMEOUT_S)
        finally:  # an impatient second Ctrl-C, say
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
            with contextlib.suppress(Exception):  # there still is one only if the driver died: Ray keeps it for the job
                remove_placement_group(get_placement_group(group_name(actor._actor_id.hex())))

    def _call(self, method: str, *args: Any) -> Any:
        if self._actor is None:
            raise EngineClosedError("the engine has been shut down: make a new LLM")
        if os.getpid() != self._pid:
            raise EngineError(
                f"the engine belongs to process {self._pid}, and this one was forked from it: use it there, or start "
                f"processes with the method 'spawn' and make an LLM in each"
            )
        return getattr(self._actor, method).remote(*args)

    def _get(self, ref: Any, extra_s: float = 0.0) -> Any:
        try:
            return ray.get(ref, timeout=_CALL_TIMEOUT_S + extra_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RaytpError):
                raise error.cause from None
            raise EngineError(f"the driver failed with {type(error.cause).__name__}: {error.cause}\n{error}") from error
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"the driver actor died: {error}") from error
        except ray.exceptions.GetTimeoutError:
            raise EngineError(f"the driver actor did not answer within {_CALL_TIMEOUT_S + extra_s:g} s") from None
        except ray.exceptions.RayError as error:
            raise EngineError(f"the driver actor cannot be reached: {error}") from error


def _end_unwaited(actor: Any, pid: int) -> None:
    if os.getpid() != pid:
        return  # see `shutdown`
    with contextlib.suppress(Exception):  # the driver has ended, or this process is about to
        actor.shutdown.remote()
