"""A Ray cluster of fake nodes on this machine, whose number Ray's own autoscaler decides.

Each fake node is a real raylet; the head offers nothing that ranks could take. Ends what it has started, and nothing
else: Ray's own `AutoscalingCluster` stops every Ray process of the machine, and fails with the wheel of Ray 2.60. If it
is killed itself, `fake_guard` does.
Called by `raytp.experiment.running`; `raytp.experiment.real` connects to it, and kills nodes of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from raytp.errors import ConfigError, EngineError
from raytp.experiment import fake_guard
from raytp.experiment.fake_guard import kill_session, processes
from raytp.experiment.spec import ClusterSpec
from raytp.ray_runtime import interrupt_deferred
from raytp.termination import terminate

_START_TIMEOUT_S = 120.0
_NODE_TYPE = "fake"
_OBJECT_STORE_BYTES = 10**8
_ENV = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "0",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    # A lost node is noticed after two seconds, not fifteen, and replaced after five more, not thirty.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "1000",
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "5",
    # With it, ray.shutdown() of a driver that has seen a node die waits 15 seconds.
    "RAY_enable_metrics_collection": "0",
}
_PROVIDER = {
    "type": "external",
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
}
_EMPTY = (
    "cluster_synced_files",
    "file_mounts_sync_continuously",
    "head_setup_commands",
    "head_start_ray_commands",
    "initialization_commands",
    "rsync_exclude",
    "rsync_filter",
    "setup_commands",
    "worker_setup_commands",
    "worker_start_ray_commands",
)
"""Keys that the autoscaler wants to see, and that mean nothing here."""


@dataclass(frozen=True, slots=True)
class FakeCluster:
    """One that is up."""

    address: str
    """For `ray.init`, of this process."""
    logs: Path
    """What its processes have written; `monitor.log` is the autoscaler's."""


@contextmanager
def fake_cluster(spec: ClusterSpec) -> Iterator[FakeCluster]:
    """The cluster, for as long as the block lasts; a node has `gpus_per_node` CPU cores by name, however few there are.

    Who would use it needs a token that only its processes and this one have, unless RAY_AUTH_MODE is "disabled". In the
    block SIGTERM ends this process as an exception does. If it ends with an EngineError, the logs stay, and their
    place is a note of the error. Raises ConfigError if this process has a Ray already, EngineError if the cluster
    cannot be started.
    """
    if ray.is_initialized():
        raise ConfigError("this process has a Ray already, so it cannot use another one: run ray.shutdown() before")
    folder = Path(tempfile.mkdtemp(prefix="raytp-fake-", dir=os.environ.get("RAY_TMPDIR")))
    try:
        with _sigterm_raised(), _authentication(), _guard(folder) as guard:
            yield from _run(spec, folder, guard)
    except EngineError as error:
        raise type(error)(f"{error}\nThe logs of the fake cluster are in {_keep_logs(folder)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kill_raylet(raylet_socket: str) -> bool:
    """SIGKILL the raylet of a node of this machine, as `ray.nodes()` names its socket; whether there is one.

    Its workers notice, and end within seconds.
    """
    for pid in processes():
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if f"--raylet_socket_name={raylet_socket}".encode() in command and command[0].endswith(b"raylet"):
                os.kill(pid, signal.SIGKILL)
                return True
    return False


def _run(spec: ClusterSpec, folder: Path, guard: IO[bytes]) -> Iterator[FakeCluster]:
    port, client_port = _free_ports(2)
    address = f"{ray.util.get_node_ip_address()}:{port}"
    head = None
    try:
        with interrupt_deferred():
            head = _start_head(address, client_port, _config(spec, address), folder)
            guard.write(b"%d\n" % head.pid)
            guard.flush()
        _wait_for_head(address, head, folder / "head.log")
        yield FakeCluster(address, folder / "session_latest" / "logs")
    finally:
        if head is not None:
            with interrupt_deferred():
                kill_session(head.pid)
                head.poll()


def _config(spec: ClusterSpec, address: str) -> dict[str, Any]:
    """What `ray up` would have read from a file."""
    resources = {"CPU": spec.gpus_per_node, "object_store_memory": _OBJECT_STORE_BYTES}
    node: dict[str, Any] = {"resources": resources, "node_config": {}}
    limits = {"min_workers": spec.min_nodes, "max_workers": spec.max_nodes}
    return {
        "cluster_name": "raytp-fake",
        "max_workers": spec.max_nodes,
        "upscaling_speed": float(max(1, spec.max_nodes)),
        "idle_timeout_minutes": spec.idle_timeout_s / 60,
        "provider": _PROVIDER | {"gcs_address": address},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            _NODE_TYPE: node | limits,
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        **{key: [] for key in _EMPTY},
    }


@contextmanager
def _guard(folder: Path) -> Iterator[IO[bytes]]:
    """Where to write the session that is to end with this process, if this one is killed in the block."""
    command = [sys.executable, "-I", fake_guard.__file__, str(folder)]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True) as guard:
        assert guard.stdin is not None
        try:
            yield guard.stdin
        finally:
            guard.kill()


def _start_head(address: str, client_port: int, config: Mapping[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, by which all that comes of it is found, and which no Ctrl-C reaches."""
    file = folder / "autoscaling.json"
    file.write_text(json.dumps(config))
    here = os.path.dirname(sys.executable)
    # The autoscaler finds `ray` by PATH.
    env = os.environ | _ENV | {"PATH": here + os.pathsep + os.environ.get("PATH", os.defpath)}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={address.rpartition(':')[2]}", f"--autoscaling-config={file}", f"--temp-dir={folder}"]
    if importlib.util.find_spec("grpc") is not None:  # the head has a server then, at 10001 unless it is told
        command.append(f"--ray-client-server-port={client_port}")
    command += ["--include-dashboard=false", "--num-cpus=0", "--num-gpus=0"]
    command += [f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats"]
    with (folder / "head.log").open("wb") as log:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _wait_for_head(address: str, head: subprocess.Popen[bytes], log: Path) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        with suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        if head.poll() is not None:
            what = f"ended with exit status {head.returncode}"
        elif time.monotonic() > deadline:
            what = f"did not come up within {_START_TIMEOUT_S:g} s"
        else:
            time.sleep(0.1)
            continue
        raise EngineError(f"the head of the fake cluster {what}: {_end_of(log)}")


def _end_of(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


def _keep_logs(folder: Path) -> Path:
    """Where they have been put; the folder itself is about to go."""
    kept = Path(tempfile.mkdtemp(prefix="raytp-fake-logs-"))
    shutil.copy(folder / "head.log", kept)
    with suppress(OSError):
        shutil.copytree(folder / "session_latest" / "logs", kept, dirs_exist_ok=True)
    return kept


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def _authentication() -> Iterator[None]:
    """A token for Ray's processes and for this one, since the ports can be reached from other machines."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        yield
        return
    try:
        with _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
            _read_authentication()
            yield
    finally:
        _read_authentication()


def _read_authentication() -> None:
    """This process read mode and token once, when Ray was imported or used; the mode must be read first."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _sigterm_raised() -> Iterator[None]:
    """SIGTERM becomes SystemExit, so that what has been started is ended, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
