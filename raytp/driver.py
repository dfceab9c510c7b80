"""The driver actor: one engine's control plane in a process of its own.

Starts the rank group, sizes the scheduler by what the ranks report, and runs the step loop. Made and called by
`raytp.driver_client`. Next hop of a request: `raytp.engine`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from raytp.config import EngineConfig
from raytp.engine import Engine
from raytp.errors import EngineError
from raytp.outputs import CompletionUpdate, EngineInfo, Request
from raytp.rank_group import RankGroup
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from scheduler.updates import SchedulerStats
from workers.config import DeviceProfile, LoadReport, WorkerConfig

_EXIT_TIMEOUT_S = 3.0
"""How long ranks that have been told to end may take before they are killed."""


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """How far the start-up has come."""

    stage: str
    fraction: float


class Driver:
    """A plain class that `raytp.driver_client` makes an actor.

    `start` comes first; all methods may be called from any thread.
    """

    def __init__(self, config: EngineConfig, worker_config: WorkerConfig, vocab_size: int) -> None:
        self._config = config
        self._worker_config = worker_config
        self._vocab_size = vocab_size
        self._status = DriverStatus("starting the driver", 0.0)
        self._group = RankGroup(config, worker_config, epoch=0)
        self._engine: Engine | None = None
        self._shutdown_lock = threading.Lock()

    def start(self) -> EngineInfo:
        """Build the rank group and begin to take requests. Raises EngineError, or a RaytpError that a rank raised."""
        transport, reports = self._group.start(self._report_status)
        num_kv_blocks = min(report.num_kv_blocks for report in reports)
        limits = self._scheduler_config(num_kv_blocks)
        self._engine = Engine(Scheduler(limits), transport)
        threading.Thread(target=self._close_group_after, args=(self._engine,), name="raytp-end", daemon=True).start()
        self._report_status("ready", 1.0)
        return self._info(limits, reports)

    def status(self) -> DriverStatus:
        """How far `start` has come."""
        return self._status

    def submit(self, client_id: str, requests: list[Request]) -> None:
        """See `Engine.submit`."""
        self._running_engine().submit(client_id, requests)

    def poll(self, client_id: str, timeout_s: float) -> list[CompletionUpdate]:
        """See `Engine.poll`."""
        return self._running_engine().poll(client_id, timeout_s)

    def abort(
        self, client_id: str, request_id: int | None = None, index: int | None = None, finish_reason: str = "abort"
    ) -> None:
        """See `Engine.abort`."""
        self._running_engine().abort(client_id, request_id, index, finish_reason)

    def forget(self, client_id: str) -> None:
        """See `Engine.forget`."""
        self._running_engine().forget(client_id)

    def stats(self) -> SchedulerStats:
        """See `Engine.stats`."""
        return self._running_engine().stats()

    def step_loop_cpu_s(self) -> float:
        """See `Engine.step_loop_cpu_s`."""
        return self._running_engine().step_loop_cpu_s()

    def profile(self, duration_s: float) -> list[DeviceProfile | None]:
        """See `RankGroup.profile`."""
        self._running_engine().check_alive()
        return self._group.profile(duration_s)

    def shutdown(self) -> None:
        """End the step loop, the ranks and the placement group. May be called twice."""
        with self._shutdown_lock:
            if self._engine is not None:
                self._engine.close()
                self._group.wait_for_exit(_EXIT_TIMEOUT_S)
            self._group.close()

    def _close_group_after(self, engine: Engine) -> None:
        """Once one rank has failed the others are of no use, but they hold their GPUs, and may spin in a collective."""
        engine.wait()
        with self._shutdown_lock:
            self._group.wait_for_exit(_EXIT_TIMEOUT_S)
            self._group.close()

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
            hostnames=tuple(node.hostname for node in self._group.nodes),
            dtype=self._worker_config.dtype,
            attention_backend=reports[0].attention_backend,
            num_kv_blocks=limits.num_kv_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            weight_bytes=max(report.weight_bytes for report in reports),
            load_s=max(report.load_s for report in reports),
        )
