"""The driver actor's beginning and end, by its handle. Called by `raytp.driver_client` and `raytp.shared_engines`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytp.config import EngineConfig
from raytp.driver import Driver, SharedModel
from raytp.errors import ConfigError
from raytp.placement import group_name, remove_group
from raytp.ray_runtime import has_ray_died
from workers.config import WorkerConfig

NAMESPACE = "raytp"
"""Ray's namespace for the names of shared engines."""
_MAX_CONCURRENT_CALLS = 128
_SHUTDOWN_TIMEOUT_S = 10.0
_REMOVAL_TIMEOUT_S = 5.0


def create_driver(
    config: EngineConfig, worker_config: WorkerConfig, vocab_size: int, shared: SharedModel | None
) -> Any:
    """On the caller's own node: a driver is of no use without its caller, and safe from the loss of other nodes.

    A shared one is detached: its ranks and its placement group end with it, not with the job that started it.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": _MAX_CONCURRENT_CALLS, "max_restarts": 0}
    if shared is not None:
        options |= {"name": shared.name, "namespace": NAMESPACE, "lifetime": "detached"}
    actor_class: Any = ray.remote(Driver)
    try:
        return actor_class.options(scheduling_strategy=here, **options).remote(
            config, worker_config, vocab_size, shared
        )
    except ValueError as error:
        if shared is None or "already taken" not in str(error):
            raise
        raise ConfigError(
            f"there is an engine {shared.name} already: choose another name, or end it with raytp stop {shared.name}"
        ) from None


def end_driver(actor: Any) -> None:
    """End an engine whatever its state: its ranks, its placement group, its driver. Does nothing if it has ended."""
    try:
        with contextlib.suppress(Exception):
            ended = actor.shutdown.remote()
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
            while not ray.wait([ended], timeout=0.2)[0] and time.monotonic() < deadline and not has_ray_died():
                pass
    finally:  # an impatient second Ctrl-C, say
        _remove_while_ray_lives(actor)


def _remove_while_ray_lives(actor: Any) -> None:
    """Ray may be about to die of the same signal, and then calls that are under way return after a minute."""
    removing = threading.Thread(target=_remove_driver, args=(actor,), name="raytp-remove-driver", daemon=True)
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_S
    if not has_ray_died():
        try:
            removing.start()
        except RuntimeError:  # as the interpreter ends, it may start no more threads
            _remove_driver(actor)
            return
        while removing.is_alive() and time.monotonic() < deadline and not has_ray_died():
            removing.join(0.1)


def _remove_driver(actor: Any) -> None:
    with contextlib.suppress(Exception):
        ray.kill(actor, no_restart=True)
    with contextlib.suppress(Exception):  # there still is one only if the driver died: Ray keeps it for the job
        remove_group(group_name(actor._actor_id.hex()))


def end_driver_unwaited(actor: Any, pid: int) -> None:
    if os.getpid() != pid:
        return  # see `shutdown`
    with contextlib.suppress(Exception):  # the driver has ended, or this process is about to
        actor.shutdown.remote()
