"""The actor of one rank: makes a `workers.worker.Worker` in its own process and hands every call on.

The worker is imported there and nowhere else, so that neither the caller nor the driver pays for importing torch.
Made by `raytp.rank_group`.
"""

from __future__ import annotations

import faulthandler
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from raytp.autopsy import count_oom_kills
from raytp.errors import ModelNotFoundError
from raytp.model_source import find_on_this_node
from workers.channel import ChannelAddress
from workers.config import DeviceProfile, LoadReport, NodeInfo, WorkerConfig, WorkerStatus

if TYPE_CHECKING:
    from workers.worker import Worker

CONCURRENCY_GROUPS = {"status": 1, "profile": 1}
"""`status` and `reach` answer while another method is busy, and so does `profile`, beside them too."""


class RankActor:
    """See `workers.worker.Worker` for each method."""

    def __init__(self, config: WorkerConfig, rank: int, epoch: int) -> None:
        if not faulthandler.is_enabled():
            faulthandler.enable()  # says in the log which signal has ended the process, and where it was
        self._config = config
        self._rank = rank
        self._epoch = epoch
        self._worker: Worker | None = None

    def node_info(self) -> NodeInfo:
        """Where this rank runs. A model of the hub that the node does not have is downloaded first."""
        self._config = replace(self._config, model_path=self._find_model())
        self._made_worker()  # all ranks import torch at once, not the others after rank 0
        node_id = ray.get_runtime_context().get_node_id()
        gpu_ids = ray.get_gpu_ids()
        return NodeInfo(
            hostname=socket.gethostname(),
            node_ip=ray.util.get_node_ip_address(),
            node_id=node_id,
            pid=os.getpid(),
            gpu_id=str(gpu_ids[0]) if gpu_ids else "",
            log_path=_stderr_path(),
            num_oom_kills=count_oom_kills(),
        )

    @ray.method(concurrency_group="status")
    def status(self) -> WorkerStatus:
        """How far the start-up has come."""
        return WorkerStatus("starting", 0.0) if self._worker is None else self._worker.status()

    @ray.method(concurrency_group="status")
    def reach(self, point: str) -> None:
        """Have the fault that was asked for at a point that the ranks do not see."""
        self._made_worker().reach(point)

    @ray.method(concurrency_group="profile")
    def profile(self, duration_s: float) -> DeviceProfile | None:
        """What the GPU is doing."""
        return self._made_worker().profile(duration_s)

    def open_rendezvous(self, host: str) -> int:
        """Rank 0 alone: the port at which the others find it."""
        return self._made_worker().open_rendezvous(host)

    def join(self, host: str, port: int, node_ip: str, gpu_ids: list[str], gpu_index: int) -> None:
        """Form the process group. `gpu_ids` are those of all ranks on this node, this one's at `gpu_index`.

        To reach each other's memory, ranks must see each other's GPUs, where Ray shows each only its own.
        """
        if gpu_ids[gpu_index]:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        self._made_worker().join(host, port, node_ip, gpu_index)

    def load(self) -> LoadReport:
        """Load the shard and measure."""
        return self._made_worker().load()

    def allocate(self, num_kv_blocks: int) -> None:
        """Make the KV-cache pool."""
        self._made_worker().allocate(num_kv_blocks)

    def run(self, address: ChannelAddress, key: bytes) -> None:
        """Run steps until the driver ends it."""
        self._made_worker().run(address, key)

    def execute(self, data: bytes) -> bytes | None:
        """Run one step."""
        return self._made_worker().execute(data)

    def _find_model(self) -> str:
        try:
            return str(find_on_this_node(Path(self._config.model_path)))
        except ModelNotFoundError as error:
            raise ModelNotFoundError(f"rank {self._rank} on node {socket.gethostname()}: {error}") from error

    def _made_worker(self) -> Worker:
        if self._worker is None:
            from workers.worker import Worker

            self._worker = Worker(self._config, self._rank, self._epoch)
        return self._worker


def _stderr_path() -> str:
    """The file that standard error goes to; empty if it is no file."""
    path = os.readlink("/proc/self/fd/2")
    return path if os.path.isfile(path) else ""
