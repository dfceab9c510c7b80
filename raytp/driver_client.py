"""A caller's end of a driver actor: starts it or finds a shared one, talks to it, ends it or lets go of it.

Turns Ray's wrapped exceptions back into raytp's own. Made by `raytp.connection`, called by `raytp.llm` and
`raytp.request_stream`. Next hop of a request: `raytp.driver`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import ray

from raytp.config import EngineConfig
from raytp.driver import DriverStatus, SharedModel
from raytp.driver_actor import create_driver, end_driver, end_driver_unwaited
from raytp.errors import EngineClosedError, EngineError, RaytpError
from raytp.model_files import ModelFiles
from raytp.outputs import CompletionUpdate, EngineDescription, EngineInfo, Recovery, Request
from raytp.ray_runtime import interrupt_deferred
from scheduler.updates import SchedulerStats
from workers.config import DeviceProfile, WorkerConfig

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 60.0
_DISCONNECT_TIMEOUT_S = 5.0
_LAST_WORD_TIMEOUT_S = 1.0
_SIGN_OF_LIFE_EVERY_S = 5.0
"""Well below the silence after which a driver forgets a caller."""


class DriverClient:
    """One engine, as one of its callers sees it: its owner, with whom it ends, or a caller of a shared one."""

    def __init__(self, actor: Any = None, name: str | None = None) -> None:
        """Use `start` for an engine of one's own; this is for the `actor` of a shared one, and its `name`."""
        self._actor = actor
        self._name = name
        self._pid = os.getpid()
        self._made_at = time.monotonic()
        self._last_told = -1
        """Failures of ranks that the user has been told of."""
        self._is_waiting = False
        """For ranks to be replaced, as the user has been told."""
        self._client_ids: set[str] = set()
        """Those that have something running."""
        self._is_closed = threading.Event()
        self._start_ref: Any = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        """Of an owner."""
        if actor is not None:
            arguments = weakref.ref(self), self._is_closed
            threading.Thread(target=_give_signs_of_life, args=arguments, name="raytp-alive", daemon=True).start()

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        worker_config: WorkerConfig,
        vocab_size: int,
        on_status: Callable[[str, float], None],
        shared: SharedModel | None = None,
    ) -> tuple[DriverClient, EngineInfo]:
        """Start an engine, and wait until it is ready; ends it again if that fails or is interrupted.

        A shared engine has no owner once it is ready. Raises ConfigError if its name is taken, EngineError, or a
        RaytpError that a rank raised.
        """
        client = cls()
        try:
            with interrupt_deferred():
                client._own(create_driver(config, worker_config, vocab_size, shared))
            info = client._wait_until_ready(config.startup_timeout_s, on_status)
            if shared is not None:
                client._disown()
            return client, info
        except BaseException:
            client.shutdown()
            with contextlib.suppress(Exception):  # Ray reports what nobody has looked at, and it may come late
                ray.get(client._start_ref, timeout=_LAST_WORD_TIMEOUT_S)
            raise

    def _own(self, actor: Any) -> None:
        self._actor = actor
        # Dropped without a shutdown, the driver still gives its ranks' resources back; Ray would keep them for the job.
        self._finalizer = weakref.finalize(self, end_driver_unwaited, actor, self._pid)
        self._finalizer.atexit = False

    def _disown(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = None

    def _wait_until_ready(self, timeout_s: float, on_status: Callable[[str, float], None]) -> EngineInfo:
        ready = self._start_ref = self._actor.start.remote()
        deadline = time.monotonic() + timeout_s
        while not ray.wait([ready], timeout=0.2)[0]:
            status = self._status()
            if status is not None:  # it answers, so it keeps the deadlines of the start-up itself
                deadline = time.monotonic() + timeout_s
                on_status(status.stage, status.fraction)
            elif time.monotonic() > deadline:
                raise EngineError(
                    f"the driver actor did not answer within startup_timeout_s={timeout_s:g}: see Ray's logs"
                )
        info: EngineInfo = self._get(ready)
        return info

    def _status(self) -> DriverStatus | None:
        """How far the start-up has come; None if the driver does not say."""
        try:
            status: DriverStatus = ray.get(self._actor.status.remote(), timeout=1.0)
        except ray.exceptions.RayError:  # of a driver that has died, `start` says more
            return None
        return status

    def is_recovering(self) -> bool:
        """Whether an engine that was ready has no ranks now, and waits for others; False if it does not say."""
        status = self._status()
        return status is not None and status.stage != "ready"

    def describe(self) -> EngineDescription:
        """What a shared engine is, and its state."""
        description: EngineDescription = self._get(self._call("describe"))
        return description

    def model_files(self) -> ModelFiles:
        """A shared engine's model, without its weights."""
        files: ModelFiles = self._get(self._call("model_files"))
        return files

    def submit(self, client_id: str, requests: list[Request]) -> None:
        """Queue requests; news of them comes through `poll`."""
        self._client_ids.add(client_id)
        self._get(self._call("submit", client_id, requests))

    def poll(self, client_id: str, timeout_s: float) -> list[CompletionUpdate]:
        """News of this caller's requests; empty if there was none within `timeout_s`."""
        updates: list[CompletionUpdate] = self._get(self._call("poll", client_id, timeout_s), timeout_s)
        if not updates and timeout_s > 0:
            self._tell_of_failures()
        elif self._is_waiting and any(update.finish_reason != "abort" for update in updates):
            self._is_waiting = False
            logger.warning("The ranks have been replaced, and answers come again.")
        return updates

    def _tell_of_failures(self) -> None:
        """Say once why nothing comes."""
        age_s = time.monotonic() - self._made_at
        reports: list[tuple[int, str]] = self._get(self._call("failures", age_s, self._last_told))
        for number, report in reports:
            logger.warning("%s\nThe ranks are being replaced. What was asked goes on when they are ready.", report)
            self._is_waiting, self._last_told = True, number

    def abort(self, client_id: str, request_id: int, index: int | None, finish_reason: str) -> None:
        """End one completion, or (None) all of a request; does not wait for it."""
        self._call("abort", client_id, request_id, index, finish_reason)

    def forget(self, client_id: str) -> None:
        """End all that this caller has running; does not wait for it."""
        self._client_ids.discard(client_id)
        if self._actor is not None:
            self._call("forget", [client_id])

    def stats(self, timeout_s: float) -> SchedulerStats:
        """Counts and load of the engine's scheduler."""
        stats: SchedulerStats = self._get(self._call("stats", timeout_s), timeout_s)
        return stats

    def step_loop_cpu_s(self, timeout_s: float) -> float:
        """CPU time of the driver's step loop so far, in seconds."""
        cpu_s: float = self._get(self._call("step_loop_cpu_s", timeout_s), timeout_s)
        return cpu_s

    def recoveries(self) -> list[Recovery]:
        """Each time that ranks have died and others took their place."""
        recoveries: list[Recovery] = self._get(self._call("recoveries"))
        return recoveries

    def profile(self, duration_s: float) -> list[DeviceProfile | None]:
        """What each rank's GPU does in the next `duration_s`; None for a rank on a CPU."""
        profiles: list[DeviceProfile | None] = self._get(self._call("profile", duration_s), duration_s)
        return profiles

    def shutdown(self) -> None:
        """End the engine, if it is one's own; of a shared one, what this caller has running. May be called twice."""
        if os.getpid() != self._pid:
            return  # a forked process does not own the engine, and Ray's calls would hang in it
        actor, self._actor = self._actor, None
        is_owner = self._finalizer is not None
        self._disown()
        self._is_closed.set()
        if actor is None or not ray.is_initialized():
            return
        if is_owner:
            end_driver(actor)
            return
        with contextlib.suppress(Exception):  # it may have ended
            ray.wait([actor.forget.remote(list(self._client_ids))], timeout=_DISCONNECT_TIMEOUT_S)

    def give_sign_of_life(self) -> None:
        """Tell a shared engine that whoever has something running here has not been killed."""
        if self._client_ids:
            self._call("keep_waiting", list(self._client_ids))

    def _call(self, method: str, *args: Any) -> Any:
        actor = self._actor  # another thread may shut it down
        if actor is None:
            if self._name is None:
                raise EngineClosedError("the engine has been shut down: make a new LLM")
            raise EngineClosedError(f"the connection to engine {self._name} has been shut down: connect again")
        if os.getpid() != self._pid:
            raise EngineError(
                f"the engine belongs to process {self._pid}, and this one was forked from it: use it there, or start "
                f"processes with the method 'spawn' and make an LLM in each"
            )
        if not ray.is_initialized():  # Ray would join another cluster for it
            raise EngineClosedError("Ray has been shut down in this process, and the engine with it: make a new LLM")
        return getattr(actor, method).remote(*args)

    def _get(self, ref: Any, extra_s: float = 0.0) -> Any:
        try:
            return ray.get(ref, timeout=_CALL_TIMEOUT_S + extra_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RaytpError):
                raise error.cause from None
            raise EngineError(f"the driver failed with {type(error.cause).__name__}: {error.cause}\n{error}") from error
        except ray.exceptions.RayActorError as error:
            what = "the driver actor died" if self._name is None else f"engine {self._name} was stopped or died"
            raise EngineError(f"{what}: {error}") from error
        except ray.exceptions.GetTimeoutError:
            raise EngineError(f"the driver actor did not answer within {_CALL_TIMEOUT_S + extra_s:g} s") from None
        except ray.exceptions.RayError as error:
            raise EngineError(f"the driver actor cannot be reached: {error}") from error


def _give_signs_of_life(client: weakref.ref[DriverClient], is_closed: threading.Event) -> None:
    """Until the client is closed or dropped. Ray is only asked if it still runs: it would start anew."""
    while not is_closed.wait(_SIGN_OF_LIFE_EVERY_S):
        alive = client()
        if alive is None or not ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # whoever waits for an answer hears of it
            alive.give_sign_of_life()
        del alive
