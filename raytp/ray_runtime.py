"""Finds the Ray to run on, or starts one. Called by `raytp.llm`, before anything else touches Ray."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from raytp.errors import EngineError

_JOIN_TIMEOUT_S = 15.0


def ensure_ray(num_ranks: int) -> None:
    """Use the Ray this process has, else the cluster of RAY_ADDRESS (set inside a Ray job), else start a local one.

    The local one has at least as many CPUs as there are ranks, and ends with this process. Raises EngineError if Ray
    cannot be joined or started.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            _wait_for_listener(address)
        with _interrupt_deferred():
            _start_or_join(address, num_ranks)
    except Exception as error:  # Ray raises many kinds, few of them its own
        if address:
            raise EngineError(
                f"the Ray cluster at RAY_ADDRESS={address} cannot be joined ({error}): start it, or unset RAY_ADDRESS "
                f"to run on this machine alone"
            ) from error
        raise EngineError(
            f"Ray cannot be started on this machine: {error} (it needs room in a temporary folder with a short path, "
            f"which RAY_TMPDIR can name, and memory in /dev/shm)"
        ) from error


def _start_or_join(address: str | None, num_ranks: int) -> None:
    if address:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_ranks),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def _wait_for_listener(address: str) -> None:
    """Raise OSError if nothing listens at `address`, where it is a host and a port: Ray itself would try for minutes.

    A cluster that is just starting has a moment to come up.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal():
        return
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_JOIN_TIMEOUT_S).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def cluster_has_gpus() -> bool:
    """Whether any node that is up now has a GPU."""
    return bool(ray.cluster_resources().get("GPU", 0) > 0)


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block.

    Starting Ray forks. Python loses an interrupt that arrives in its fork hooks, and keeps the lock of `logging`, which
    one of them holds, for ever: whoever logs or imports next hangs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts go to the main thread alone
        return
    arrived = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: arrived.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived.is_set():
        signal.raise_signal(signal.SIGINT)  # for whoever handled it before; it may be nobody
