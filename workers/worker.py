"""One rank: joins its group, loads its shard, and runs steps until it is told to stop or the driver is gone.

A plain class, which `raytp.rank_actor` makes an actor. Next hop of a request: `workers.model_runner`. Whatever goes
wrong in a step is answered with one ERROR frame that carries the traceback; the rank is of no use after that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import traceback
from multiprocessing.connection import Connection

import torch

from scheduler.errors import ConfigError
from workers.channel import ChannelAddress, connect, receive
from workers.config import DeviceProfile, LoadReport, WorkerConfig, WorkerStatus
from workers.errors import FrameError, ModelNotFoundError
from workers.faults import FaultInjector
from workers.frames import (
    ERROR,
    HEARTBEAT,
    RESULT,
    SHUTDOWN,
    STEP,
    ErrorReport,
    Frame,
    FrameDecoder,
    encode,
    error_body,
    read_step,
    result_body,
)
from workers.model_runner import ModelRunner, StepOutcome
from workers.parallel import Store, TensorParallel, create_store

logger = logging.getLogger(__name__)

_HEARTBEAT_INTERVAL_S = 1.0


class Worker:
    """The methods are called in this order: `open_rendezvous` (rank 0), `join`, `load`, `allocate`,
    `run` or `execute`. `status`, `reach` and, after `join`, `profile` may be called at any time from other threads."""

    def __init__(self, config: WorkerConfig, rank: int, epoch: int) -> None:
        self._config = config
        self._rank = rank
        self._epoch = epoch
        self._status = WorkerStatus("starting", 0.0)
        self._store: Store | None = None
        self._faults = FaultInjector(config.faults, rank, epoch)
        self._decoder = FrameDecoder(epoch)
        self._send_lock = threading.Lock()
        """Results and an error may come from two threads, and a frame may take several writes."""

    def status(self) -> WorkerStatus:
        """How far the start-up has come."""
        return self._status

    def reach(self, point: str) -> None:
        """Have the fault that was asked for at a point of the driver's."""
        self._faults.reach(point)

    def open_rendezvous(self, host: str) -> int:
        """Rank 0 alone: bind a free port on `host` and keep it open for the others; returns the port."""
        self._store, port = create_store(host, self._config.world_size, self._config.timeout_s)
        return port

    def join(self, host: str, port: int, node_ip: str, gpu_index: int) -> None:
        """Form the process group with the other ranks, on the visible GPU `gpu_index`.

        Raises RendezvousError within the deadline, and ConfigError if there is no such GPU.
        """
        self._status = WorkerStatus("joining", 0.0)
        self._faults.reach("rendezvous")
        config = self._config
        self._device = torch.device(config.device)
        if config.device == "cuda":
            self._check_gpu(gpu_index)
            torch.cuda.set_device(gpu_index)
            self._device = torch.device("cuda", gpu_index)
        else:
            torch.set_num_threads(config.num_threads)
        if config.world_size == 1:
            self._tp = TensorParallel.single()
            return
        self._tp = TensorParallel.connect(
            rank=self._rank,
            world_size=config.world_size,
            host=host,
            port=port,
            backend="nccl" if config.device == "cuda" else "gloo",
            timeout_s=config.timeout_s,
            store=self._store,
            device=self._device,
            node_ip=node_ip,
        )

    def _check_gpu(self, gpu_index: int) -> None:
        """Ray counts GPUs without asking whether this torch can use them."""
        if torch.cuda.device_count() <= gpu_index:
            raise ConfigError(
                f"rank {self._rank} was given a GPU of node {socket.gethostname()}, but torch {torch.__version__} can "
                f"use {torch.cuda.device_count() or 'none'} there: install the NVIDIA driver and a CUDA build of torch "
                f"on that node, or run on CPUs with device='cpu' (--device cpu)"
            )

    def load(self) -> LoadReport:
        """Load the shard; returns what was measured, the number of KV-cache blocks that would fit among it."""
        self._status = WorkerStatus("loading weights", 0.0)
        path = self._config.model_path
        if not os.path.isdir(path):
            raise ModelNotFoundError(
                f"rank {self._rank} finds no folder {path} on its node {socket.gethostname()}: put the model where "
                f"every node can read it, on a shared file system say"
            )
        self._faults.reach("loading")
        self._runner = ModelRunner(self._config, self._tp, self._device)
        return self._runner.load(self._report_loading)

    def _report_loading(self, fraction: float) -> None:
        self._status = WorkerStatus("loading weights", fraction)
        if fraction == 1:
            self._faults.reach("warm-up")

    def allocate(self, num_kv_blocks: int) -> None:
        """Make the KV-cache pool."""
        stage = "allocating the KV cache"
        self._runner.allocate(num_kv_blocks, lambda fraction: setattr(self, "_status", WorkerStatus(stage, fraction)))
        self._status = WorkerStatus("ready", 1.0)

    def run(self, address: ChannelAddress, key: bytes) -> None:
        """Run the steps that arrive on a connection to the driver, until SHUTDOWN or the connection's end."""
        connection = connect(address, key, self._epoch, self._rank, self._config.timeout_s)
        outcomes: queue.SimpleQueue[StepOutcome | None] = queue.SimpleQueue()
        answering = threading.Thread(target=self._answer, args=(connection, outcomes), name="raytp-answer", daemon=True)
        answering.start()
        is_over = threading.Event()
        beating = threading.Thread(target=self._beat, args=(connection, is_over), name="raytp-beat", daemon=True)
        beating.start()
        try:
            while (frame := self._receive(connection)) is not None:
                outcome = self._execute(frame)
                if outcome is not None:
                    outcomes.put(outcome)
        except Exception as error:
            self._send_error(connection, error)
        finally:
            is_over.set()
            outcomes.put(None)
            answering.join(timeout=self._config.timeout_s)
            beating.join(timeout=_HEARTBEAT_INTERVAL_S)  # else it might write to what is opened next under this number
            connection.close()

    def execute(self, data: bytes) -> bytes | None:
        """Run one frame and return the answer, for the transport that uses plain actor calls."""
        try:
            outcome = self._execute(self._decoder.decode(self._faults.damage(data)))
            return None if outcome is None else self._encode_outcome(outcome)
        except Exception as error:
            return self._encode_error(error)

    def _execute(self, frame: Frame) -> StepOutcome | None:
        step = read_step(frame)
        self._faults.reach("decode" if len(step.token_ids) == len(step.slots) else "prefill")
        return self._runner.execute(step)

    def profile(self, duration_s: float) -> DeviceProfile | None:
        """What the GPU does in the next `duration_s` for the steps that go on meanwhile; None on a CPU."""
        if self._device.type != "cuda":
            return None
        from workers.device_profile import profile_device  # nothing but this call needs the profiler

        return profile_device(duration_s)

    def _receive(self, connection: Connection) -> Frame | None:
        """The next step's frame; None when there will be no more."""
        try:
            data = receive(connection)
        except (EOFError, OSError):
            logger.info("rank %d: the driver has closed the connection", self._rank)
            return None
        frame = self._decoder.decode(self._faults.damage(data))
        if frame.kind == SHUTDOWN:
            self._faults.reach("shutdown")
        if frame.kind not in (STEP, SHUTDOWN):
            raise FrameError(f"a rank cannot do anything with a frame of kind {frame.kind}")
        return frame if frame.kind == STEP else None

    def _answer(self, connection: Connection, outcomes: queue.SimpleQueue[StepOutcome | None]) -> None:
        """Send results as the device finishes them, while the next step is being queued."""
        try:
            while (outcome := outcomes.get()) is not None:
                self._send(connection, self._encode_outcome(outcome))
        except OSError:
            logger.info("rank %d: the driver does not take results any more", self._rank)
        except Exception as error:
            self._send_error(connection, error)

    def _beat(self, connection: Connection, is_over: threading.Event) -> None:
        """Tell the driver that this process is alive, however long the step takes that another thread is in."""
        data = encode(Frame(self._epoch, 0, HEARTBEAT, None))
        with contextlib.suppress(OSError):
            while not is_over.wait(_HEARTBEAT_INTERVAL_S):
                self._send(connection, data)

    def _encode_outcome(self, outcome: StepOutcome) -> bytes:
        result = outcome.wait()
        return encode(Frame(self._epoch, result.step_id, RESULT, result_body(result)))

    def _encode_error(self, error: Exception) -> bytes:
        report = ErrorReport(
            rank=self._rank,
            node=socket.gethostname(),
            pid=os.getpid(),
            type=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
        )
        logger.error("rank %d failed: %s", self._rank, report.traceback)
        return encode(Frame(self._epoch, 0, ERROR, error_body(report)))

    def _send_error(self, connection: Connection, error: Exception) -> None:
        try:
            self._send(connection, self._encode_error(error))
        except OSError:
            logger.info("rank %d: the driver is gone before it could hear of the failure", self._rank)

    def _send(self, connection: Connection, data: bytes) -> None:
        with self._send_lock:
            connection.send_bytes(data)
