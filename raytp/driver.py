"""The driver actor: one engine's control plane in a process of its own.

Starts the ranks, sizes the scheduler by what they report, and runs the step loop. Made by `raytp.driver_actor`, called
by `raytp.driver_client`. Next hop of a request: `raytp.engine`.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

from raytp.config import EngineConfig
from raytp.engine import Engine
from raytp.errors import EngineClosedError, EngineError
from raytp.model_files import ModelFiles
from raytp.outputs import CompletionUpdate, EngineDescription, EngineInfo, Recovery, Request
from raytp.rank_supply import RankSupply
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from scheduler.updates import SchedulerStats
from workers.config import DeviceProfile, LoadReport, WorkerConfig

_EXIT_TIMEOUT_S = 3.0
"""How long ranks that have been told to end may take before they are killed."""
_SILENCE_TIMEOUT_S = 30.0
"""How long a caller of a shared engine may say nothing; `raytp.driver_client` speaks for it every few seconds."""


@dataclass(frozen=True, slots=True)
class SharedModel:
    """What makes an engine one that other jobs can use."""

    name: str
    """The engine's."""
    files: ModelFiles


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """How far the start-up has come."""

    stage: str
    fraction: float


class Driver:
    """A plain class that `raytp.driver_actor` makes an actor.

    `start` comes first; all methods may be called from any thread.
    """

    def __init__(
        self, config: EngineConfig, worker_config: WorkerConfig, vocab_size: int, shared: SharedModel | None
    ) -> None:
        """`shared`: if it is, it has a name and outlives its caller, who must not be trusted to say goodbye."""
        self._shared = shared
        self._config = config
        self._worker_config = worker_config
        self._vocab_size = vocab_size
        self._status = DriverStatus("starting the driver", 0.0)
        self._ranks = RankSupply(config, worker_config, self._report_status)
        self._engine: Engine | None = None
        self._engine_info: EngineInfo | None = None
        self._failure: Exception | None = None
        """What has ended the start-up."""
        self._is_shut_down = False
        self._shutdown_lock = threading.Lock()

    def start(self) -> EngineInfo:
        """Build the rank group and begin to take requests. Raises EngineError, or a RaytpError that a rank raised."""
        try:
            return self._start()
        except Exception as error:
            if self._is_shut_down:  # which has killed the ranks that it was waiting for
                raise EngineClosedError("the engine was shut down before it had started") from None
            self._failure = error
            raise

    def _start(self) -> EngineInfo:
        transport, reports = self._ranks.start()
        num_kv_blocks = min(report.num_kv_blocks for report in reports)
        limits = self._scheduler_config(num_kv_blocks)
        silence_timeout_s = None if self._shared is None else _SILENCE_TIMEOUT_S
        self._engine = Engine(
            Scheduler(limits),
            transport,
            self._ranks,
            max_restarts=self._config.max_restarts,
            silence_timeout_s=silence_timeout_s,
        )
        threading.Thread(target=self._close_group_after, args=(self._engine,), name="raytp-end", daemon=True).start()
        self._engine_info = self._info(limits, reports)
        self._report_status("ready", 1.0)
        return self._engine_info

    def status(self) -> DriverStatus:
        """How far `start` has come."""
        return self._status

    def describe(self) -> EngineDescription:
        """What the engine is, for those who have only its name; at any time."""
        assert self._shared is not None
        failure, stats = self._failure, None
        if self._engine is not None:
            try:
                self._engine.check_alive()
            except EngineError as error:
                failure = error
            else:
                with contextlib.suppress(EngineError):  # a long step, say
                    stats = self._engine.stats()
        return EngineDescription(
            name=self._shared.name,
            model_name=self._shared.files.model_name,
            model_digest=self._shared.files.digest,
            num_ranks=self._ranks.num_ranks,
            stage=self._status.stage if failure is None else "failed",
            error=None if failure is None else str(failure) or type(failure).__name__,
            info=self._engine_info,
            stats=stats,
        )

    def model_files(self) -> ModelFiles:
        """The model without its weights."""
        assert self._shared is not None
        return self._shared.files

    def submit(self, client_id: str, requests: list[Request]) -> None:
        """See `Engine.submit`."""
        self._running_engine().submit(client_id, requests)

    def poll(self, client_id: str, timeout_s: float) -> list[CompletionUpdate]:
        """See `Engine.poll`."""
        return self._running_engine().poll(client_id, timeout_s)

    def abort(self, client_id: str, request_id: int | None, index: int | None, finish_reason: str) -> None:
        """See `Engine.abort`."""
        self._running_engine().abort(client_id, request_id, index, finish_reason)

    def forget(self, client_ids: list[str]) -> None:
        """See `Engine.forget`."""
        for client_id in client_ids:
            self._running_engine().forget(client_id)

    def keep_waiting(self, client_ids: list[str]) -> None:
        """See `Engine.keep_waiting`."""
        self._running_engine().keep_waiting(client_ids)

    def stats(self, timeout_s: float) -> SchedulerStats:
        """See `Engine.stats`."""
        return self._running_engine().stats(timeout_s)

    def step_loop_cpu_s(self, timeout_s: float) -> float:
        """See `Engine.step_loop_cpu_s`."""
        return self._running_engine().step_loop_cpu_s(timeout_s)

    def failures(self, max_age_s: float, after: int) -> list[tuple[int, str]]:
        """See `RankSupply.failures`."""
        return self._ranks.failures(max_age_s, after)

    def recoveries(self) -> list[Recovery]:
        """Each time that ranks have died and others took their place, the latest thousand."""
        return list(self._ranks.recoveries)

    def profile(self, duration_s: float) -> list[DeviceProfile | None]:
        """See `RankGroup.profile`. Raises EngineError while the ranks are built again."""
        self._running_engine().check_alive()
        if self._status.stage != "ready":
            raise EngineError(f"the ranks have failed and are built again ({self._status.stage}): profile them later")
        return self._ranks.group.profile(duration_s)

    def shutdown(self) -> None:
        """End the step loop, the ranks and the placement group. May be called twice."""
        self._is_shut_down = True
        with self._shutdown_lock:
            if self._engine is not None:
                self._engine.close()
                self._ranks.group.wait_for_exit(_EXIT_TIMEOUT_S)
            self._ranks.close()

    def _close_group_after(self, engine: Engine) -> None:
        """Once one rank has failed the others are of no use, but they hold their GPUs, and may spin in a collective."""
        engine.wait()
        with self._shutdown_lock:
            self._ranks.group.wait_for_exit(_EXIT_TIMEOUT_S)
            self._ranks.close()

    def _report_status(self, stage: str, fraction: float) -> None:
        self._status = DriverStatus(stage, fraction)

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the engine has not been started")
        return self._engine

    def _scheduler_config(self, num_kv_blocks: int) -> SchedulerConfig:
        worker = self._worker_config
        max_model_len = worker.max_model_len
        if self._config.max_model_len is None:
            max_model_len = min(max_model_len, num_kv_blocks * worker.block_size)
        return SchedulerConfig(
            num_kv_blocks=num_kv_blocks,
            block_size=worker.block_size,
            max_num_seqs=worker.max_num_seqs,
            max_num_batched_tokens=worker.max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=self._vocab_size,
            enable_prefix_caching=self._config.enable_prefix_caching,
        )

    def _info(self, limits: SchedulerConfig, reports: list[LoadReport]) -> EngineInfo:
        return EngineInfo(
            device=self._worker_config.device,
            device_names=tuple(report.device_name for report in reports),
            hostnames=tuple(node.hostname for node in self._ranks.group.nodes),
            node_ids=tuple(node.node_id for node in self._ranks.group.nodes),
            dtype=self._worker_config.dtype,
            attention_backend=reports[0].attention_backend,
            num_kv_blocks=limits.num_kv_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            weight_bytes=max(report.weight_bytes for report in reports),
            peak_host_bytes=max(report.peak_host_bytes for report in reports),
            load_s=max(report.load_s for report in reports),
        )
