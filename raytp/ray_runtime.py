"""Finds the Ray to run on, or starts one. Called by `raytp.connection`, before anything else touches Ray."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from raytp.errors import EngineError, PlacementError
from raytp.outputs import ProgressCallback
from raytp.placement import resource_of
from raytp.termination import terminate

_JOIN_TIMEOUT_S = 15.0
_PROBE_TIMEOUT_S = 3.0
_HTTP2_SETTINGS, _HTTP2_FRAME_HEADER = 4, 9
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _HTTP2_SETTINGS, 0, 0, 0, 0, 0])
"""What a client of gRPC says first; a server answers with its settings (RFC 9113, sections 3.4 and 6.5)."""
_one_at_a_time = threading.Lock()
"""Ray is started once in a process, whichever threads want it."""
_DEFERRED = (signal.SIGINT, signal.SIGTERM)
_AUTHENTICATION = "ray._private.authentication.authentication_token_setup"
_OWNER_KEY = b"raytp:owner"
"""In the store of a Ray that a raytp process has started for itself: that process."""


def silence_ray() -> None:
    """For a process that is raytp's own: Ray does not print that workers have died.

    It takes those that raytp has killed for victims of a lack of memory, in ten lines; raytp itself says what is amiss.
    """
    ray._private.worker._worker_logs_enabled = False


def ensure_ray(num_ranks: int, on_progress: ProgressCallback | None = None) -> None:
    """Use the Ray this process has, else the cluster of RAY_ADDRESS (set inside a Ray job), else start a local one.

    The local one has at least as many CPUs as there are ranks, and ends with this process. Raises EngineError if Ray
    cannot be joined or started.
    """
    if os.environ.get("RAY_ADDRESS"):
        join_ray(on_progress)
        return
    try:
        with _one_at_a_time, interrupt_deferred():
            if not ray.is_initialized():
                _in_lasting_thread(lambda: _start_ray(num_ranks))
    except Exception as error:  # Ray raises many kinds, few of them its own
        raise EngineError(
            f"Ray cannot be started on this machine: {error} (it needs room in a temporary folder with a short path, "
            f"which RAY_TMPDIR can name, and memory in /dev/shm)"
        ) from error


def join_ray(on_progress: ProgressCallback | None = None) -> None:
    """Use the Ray this process has, else the cluster of RAY_ADDRESS, else the one that runs on this machine.

    `on_progress` is told if it is waited for. Raises EngineError if it cannot be joined, or there is none.
    """
    with _one_at_a_time:
        if not ray.is_initialized():
            _join_ray(on_progress)


def _join_ray(on_progress: ProgressCallback | None) -> None:
    address = os.environ.get("RAY_ADDRESS")
    if address == "auto":
        address = None
    try:
        if address:
            _wait_for_listener(address, on_progress)
        with interrupt_deferred():
            _init(address=address or _find_on_this_machine())
    except Exception as error:
        if address:
            raise EngineError(
                f"the Ray cluster at RAY_ADDRESS={address} cannot be joined ({error}): start it, set "
                f"RAY_AUTH_MODE=token if it asks for one, as ray start does by default, or unset RAY_ADDRESS to use "
                f"this machine"
            ) from error
        raise EngineError(
            f"no Ray cluster on this machine can be joined ({error}): start one that stays with ray start --head, or "
            f"set RAY_ADDRESS to the address of another one"
        ) from error
    owner = None if address else _internal_kv_get(_OWNER_KEY)
    if owner is not None:
        ray.shutdown()
        raise EngineError(
            f"the Ray that was found on this machine is {owner.decode()}'s own and ends with it: start one that stays "
            f"with ray start --head, or set RAY_ADDRESS to the address of another one"
        )


def check_room(num_ranks: int, device: str) -> None:
    """A Ray that this process has started gets no more nodes. Raises PlacementError if it can never hold the ranks."""
    if _internal_kv_get(_OWNER_KEY) != _this_process():
        return
    resource = resource_of(device)
    num_here = ray.cluster_resources().get(resource, 0)
    if num_here < num_ranks:
        remedy = "lower tensor_parallel_size" if num_here else "use device='cpu' (--device cpu)"
        raise PlacementError(
            f"this machine has {num_here:g} {resource}s for tensor_parallel_size={num_ranks}, which takes one for each "
            f"rank: {remedy}, or set RAY_ADDRESS to a cluster that has them"
        )


def logs_folder() -> str:
    """Where Ray keeps the logs of this machine's processes."""
    node: Any = ray._private.worker._global_node
    return "/tmp/ray/session_latest/logs" if node is None else str(node.get_logs_dir_path())


def _start_ray(num_ranks: int) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    _init(address="local", num_cpus=max(os.cpu_count() or 1, num_ranks), include_dashboard=False)
    _internal_kv_put(_OWNER_KEY, _this_process())
    atexit.register(_kill_workers_without_ray)  # runs before Ray's own, which does not look for them


def _in_lasting_thread(start: Callable[[], None]) -> None:
    """Ray's processes end with the thread that has started them: if that is not the main one, it must not end."""
    if threading.current_thread() is threading.main_thread():
        start()
        return
    started: Future[None] = Future()

    def run() -> None:
        try:
            start()
        except BaseException as error:  # it is raised where it is waited for
            started.set_exception(error)
        else:
            started.set_result(None)
            threading.Event().wait()

    threading.Thread(target=run, name="raytp-ray", daemon=True).start()
    started.result()


def _init(**options: Any) -> None:
    _quieten_authentication()
    ray.init(log_to_driver=False, logging_level=logging.WARNING, **options)


def _find_on_this_machine() -> str:
    """What Ray calls "auto": of those that run here, the one that ray start has noted last, else any.

    Ray itself takes them as they are: one that has ended, it would try for minutes. Raises ConnectionError.
    """
    _expect_tokens()
    services: Any = ray._private.services
    noted = services.find_bootstrap_address(None)
    if hasattr(services.find_gcs_addresses, "cache_clear"):  # Ray 2.48 finds them anew each time
        services.find_gcs_addresses.cache_clear()
    running = sorted(services.find_gcs_addresses(), key=lambda address: (address != noted, address))
    errors = {}
    for address in (*running, *([noted] if noted and noted not in running else [])):
        errors[address] = _why_deaf(address)
        if errors[address] is None:
            return str(address)
    reasons = ", and ".join(f"the one at {address} does not answer: {error}" for address, error in errors.items())
    raise ConnectionError(reasons or "none is running")


def _expect_tokens() -> None:
    """As Ray does for "auto" alone, if its version has tokens."""
    _quieten_authentication()
    with suppress(ImportError, AttributeError):
        setup: Any = importlib.import_module(_AUTHENTICATION)
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _quieten_authentication() -> None:
    """Its only word is that tokens are asked for, as they should be."""
    logging.getLogger(_AUTHENTICATION).setLevel(logging.ERROR)


def _this_process() -> bytes:
    return f"process {os.getpid()}".encode()


def _kill_workers_without_ray() -> None:
    """Workers that were just starting when their Ray died notice it when they have started: on a busy machine, late."""
    if not has_ray_died():
        return
    node: Any = ray._private.worker._global_node
    session = os.fsencode(node.get_session_dir_path())
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"default_worker.py" in command and b"--raylet-name=" + session + b"/" in command:
                os.kill(int(folder.name), signal.SIGKILL)


def _wait_for_listener(address: str, on_progress: ProgressCallback | None) -> None:
    """Raise OSError if no Ray answers at `address`, where it is a host and a port: Ray itself would try for minutes.

    A cluster that is just starting has a moment to come up.
    """
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while (error := _why_deaf(address)) is not None:
        if time.monotonic() > deadline:
            raise error
        if on_progress is not None:
            on_progress(f"waiting for the cluster: {address} does not answer yet", 0.0)
        time.sleep(0.5)


def _why_deaf(address: str) -> OSError | None:
    """Why no Ray can be reached at a host and a port; None if one seems to answer, or if it is an address of a kind."""
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal():
        return None
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S) as probe:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return None
            probe.sendall(_HTTP2_GREETING)
            answer = probe.recv(_HTTP2_FRAME_HEADER, socket.MSG_WAITALL)
    except OSError as error:
        return error
    if len(answer) == _HTTP2_FRAME_HEADER and answer[3] == _HTTP2_SETTINGS:
        return None
    return ConnectionError("what listens there is no Ray; the port of its GCS is 6379 if nobody chose another")


def choose_device() -> str:
    """Where ranks run if nobody says: "cuda" if a node that is up now has a GPU, "cpu" if there are only CPUs.

    A head node that offers neither, alone, waits for its autoscaler: that is taken for "cuda".
    """
    resources = ray.cluster_resources()
    return "cpu" if resources.get("CPU", 0) > 0 and not resources.get("GPU", 0) > 0 else "cuda"


def has_ray_died() -> bool:
    """Whether the Ray that this process has started has lost a process: who asks it for anything waits in vain.

    SIGTERM to a process group ends this process and Ray's at once.
    """
    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.dead_processes())


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block.

    Starting Ray forks. Python loses an interrupt that arrives in its fork hooks, and keeps the lock of `logging`, which
    one of them holds, for ever: whoever logs or imports next hangs. Ray also takes SIGTERM for itself, and aborts the
    process: afterwards it is its owner's again, and ends the process by SystemExit if that has no other wish.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread alone
        return
    arrived: list[int] = []
    previous = {number: signal.signal(number, lambda got, _: arrived.append(got)) for number in _DEFERRED}
    if previous[signal.SIGTERM] in (signal.SIG_DFL, None):
        previous[signal.SIGTERM] = terminate
    try:
        yield
    except SystemExit as error:
        if error.code != signal.SIGTERM:  # how Ray, while it starts, ends at one
            raise
        arrived.append(signal.SIGTERM)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])  # for whoever handled it before; it may be nobody
