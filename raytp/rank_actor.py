"""The actor of one rank: makes a `workers.worker.Worker` in its own process and hands every call on.

The worker is imported there and nowhere else, so that neither the caller nor the driver pays for importing torch.
Made by `raytp.rank_group`.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import ray

from workers.channel import ChannelAddress
from workers.config import LoadReport, NodeInfo, WorkerConfig, WorkerStatus

if TYPE_CHECKING:
    from workers.worker import Worker

CONCURRENCY_GROUPS = {"status": 1}
"""`status` answers while another method is busy."""


class RankActor:
    """See `workers.worker.Worker` for each method."""

    def __init__(self, config: WorkerConfig, rank: int, epoch: int) -> None:
        self._config = config
        self._rank = rank
        self._epoch = epoch
        self._worker: Worker | None = None

    def node_info(self) -> NodeInfo:
        """Where this rank runs."""
        node_id = ray.get_runtime_context().get_node_id()
        return NodeInfo(socket.gethostname(), ray.util.get_node_ip_address(), node_id, os.getpid())

    @ray.method(concurrency_group="status")
    def status(self) -> WorkerStatus:
        """How far the start-up has come."""
        return WorkerStatus("starting", 0.0) if self._worker is None else self._worker.status()

    def open_rendezvous(self, host: str) -> int:
        """Rank 0 alone: the port at which the others find it."""
        return self._made_worker().open_rendezvous(host)

    def join(self, host: str, port: int, node_ip: str) -> None:
        """Form the process group."""
        self._made_worker().join(host, port, node_ip)

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

    def _made_worker(self) -> Worker:
        if self._worker is None:
            from workers.worker import Worker

            self._worker = Worker(self._config, self._rank, self._epoch)
        return self._worker
