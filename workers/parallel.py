"""The ranks' collectives and how the ranks find each other: the one home of torch.distributed.

A `TensorParallel` of one rank does nothing and needs no process group. Called by the layers that sum or gather over
ranks, by the sampler, and by the worker at start-up. Knows nothing of models, of Ray or of how ranks are placed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from scheduler.errors import ConfigError
from workers.errors import RendezvousError, RendezvousTimeoutError

__all__ = ["Store", "TensorParallel", "create_store"]

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Once the ranks have met, a late one is the driver's business: it knows what each rank is doing, a collective not."""
_SIOCGIFADDR = 0x8915


class TensorParallel:
    """This process's place among the ranks that share one model, and the sums and gathers over them."""

    def __init__(self, rank: int, world_size: int, device: torch.device, store: Store | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        self._store = store
        """Rank 0's must live as long as the group."""
        self._shared: list[Any] = []
        """Handles of shared memory, which lives as long as they do."""

    @classmethod
    def single(cls) -> TensorParallel:
        """A model on one rank."""
        return cls(0, 1, torch.device("cpu"), None)

    @classmethod
    def connect(
        cls,
        *,
        rank: int,
        world_size: int,
        host: str,
        port: int,
        backend: str,
        timeout_s: float,
        store: Store | None = None,
        device: torch.device,
        node_ip: str | None = None,
    ) -> TensorParallel:
        """Meet the other ranks at rank 0's store on (`host`, `port`), and form the process group.

        `backend` is gloo or nccl; rank 0 passes the `store` it made with `create_store`. Traffic uses the network
        interface that has `node_ip` (default: the one that leads to `host`), unless GLOO_SOCKET_IFNAME or
        NCCL_SOCKET_IFNAME says otherwise. Raises ConfigError if there is no such interface, RendezvousError, and after
        `timeout_s` seconds RendezvousTimeoutError.
        """
        if backend == "gloo":
            _check_named_interface()
        deadline = time.monotonic() + timeout_s
        here = f"rank {rank} on {node_ip or socket.gethostname()}"
        try:
            if store is None:
                _wait_for_listener(host, port, deadline)
                store = TCPStore(
                    host, port, world_size, is_master=False, timeout=_left(deadline), wait_for_workers=False
                )
            _wait_for_ranks(store, rank, world_size, deadline)
            _choose_interface(node_ip or _local_ip_towards(host, port))
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=_left(deadline),
                device_id=device if backend == "nccl" else None,
            )
            group = cls(rank, world_size, device, store)
            group.min_int(0)  # NCCL connects with the first collective: let it fail here if it must
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            kind = RendezvousTimeoutError if time.monotonic() >= deadline else RendezvousError
            raise kind(
                f"{here} did not meet rank 0 at {host}:{port} and the other {world_size - 1} ranks within "
                f"{timeout_s:g} s{_describe_interface(backend)}: {reason}"
            ) from error
        _set_pg_timeout(_COLLECTIVE_TIMEOUT)
        return group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def gather_last_dim(self, x: Tensor) -> Tensor | None:
        """(..., N) on each rank -> (..., R * N) on rank 0, in the order of the ranks; None on the others."""
        if self.world_size == 1:
            return x
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(x, shards, dst=0)
        return torch.cat(shards, dim=-1) if shards is not None else None

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite `x` with rank 0's, in place."""
        if self.world_size > 1:
            dist.broadcast(x, src=0)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest over the ranks of each element of `x`, in place."""
        if self.world_size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def min_int(self, value: int) -> int:
        """The smallest `value` of any rank."""
        if self.world_size == 1:
            return value
        smallest = torch.tensor(value, dtype=torch.int64, device=self._device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest.item())

    def share_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor] | None:
        """Zeros of that shape on each rank's GPU, which every rank can read and write: one tensor a rank.

        None on all ranks if they are not GPUs of one node that reach each other's memory. All ranks must call it.
        """
        if not self.min_int(int(self._reaches_peers())):
            return None
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # not used here, and not safe on every shared host
        from torch.distributed import _symmetric_memory as symmetric_memory

        own = symmetric_memory.empty(shape, dtype=dtype, device=self._device)
        own.zero_()
        handle = symmetric_memory.rendezvous(own, dist.group.WORLD)  # type: ignore[arg-type]
        self._shared.append(handle)
        torch.cuda.synchronize(self._device)
        self.min_int(0)  # nobody writes before all are zero
        return [own if rank == self.rank else handle.get_buffer(rank, shape, dtype) for rank in range(self.world_size)]

    def _reaches_peers(self) -> bool:
        """Whether all ranks' GPUs are on this node, visible to this process in the order of the ranks, and linked."""
        if self.world_size == 1 or self._device.type != "cuda" or self._store is None:
            return False
        node = f"{socket.gethostname()}/{torch.cuda.device_count()}"
        self._store.set(f"node/{self.rank}", node)
        nodes = {self._store.get(f"node/{rank}") for rank in range(self.world_size)}
        if len(nodes) > 1 or torch.cuda.device_count() < self.world_size or self._device.index != self.rank:
            return False
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return all(torch.cuda.can_device_access_peer(self.rank, other) for other in others)

    def close(self) -> None:
        """Leave the process group."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


def create_store(host: str, world_size: int, timeout_s: float) -> tuple[Store, int]:
    """Rank 0's meeting point, listening on `host` alone at a port that the system chooses: (store, port)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=max(128, world_size))
    except OSError as error:
        raise RendezvousError(f"rank 0 cannot listen on {host}: {error}") from error
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _left(deadline: float) -> timedelta:
    """Time until `deadline`; a moment if it has passed, since torch takes no time-out of zero."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.1))


def _wait_for_listener(host: str, port: int, deadline: float) -> None:
    """Try until (`host`, `port`) accepts: TCPStore's own attempts overrun their time-out by as much again."""
    while True:
        try:
            socket.create_connection((host, port), timeout=_left(deadline).total_seconds()).close()
            return
        except OSError:
            if time.monotonic() + 0.1 > deadline:
                raise
            time.sleep(0.1)


def _wait_for_ranks(store: Store, rank: int, world_size: int, deadline: float) -> None:
    """Wait until every rank has reached the store. Raises RuntimeError that names those that have not."""
    store.set(f"arrived/{rank}", "")
    for other in range(world_size):
        try:
            store.wait([f"arrived/{other}"], _left(deadline))
        except RuntimeError as error:
            missing = [each for each in range(world_size) if not store.check([f"arrived/{each}"])]
            raise RuntimeError(f"ranks {missing} did not arrive") from error


def _local_ip_towards(host: str, port: int) -> str:
    """The address this machine uses to reach `host`. Sends nothing: connecting UDP only looks up the route."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _choose_interface(ip: str) -> None:
    """Name the interface that has `ip` to gloo and NCCL: left alone, they may pick one the other ranks cannot reach."""
    for name in _interface_names():
        if _ipv4_of(name) == ip:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return
    logger.info("no network interface has %s as its IPv4 address: leaving the choice to gloo and NCCL", ip)


def _check_named_interface() -> None:
    """Raises ConfigError if gloo is told to use one that this machine does not have."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in filter(None, named.split(",")) if name not in _interface_names()]
    if missing:
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME={named} names {missing[0]}, and {socket.gethostname()} has "
            f"{', '.join(_interface_names())}: correct it, or unset it to use that of the node's address in Ray"
        )


def _describe_interface(backend: str) -> str:
    """Which one the collectives were to use, if that is settled."""
    name = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME")
    return f" over the interface {name.removeprefix('=')}" if name else ""


def _interface_names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _ipv4_of(interface: str) -> str | None:
    """The first IPv4 address of `interface` (Linux), None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
