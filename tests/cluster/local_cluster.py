"""A Ray cluster on this machine for the tests: a head without CPUs, as it should be, the dashboard, and an autoscaler.

Nodes of the types that a test names are started by Ray's own autoscaler when something waits for them, and stopped when
they are idle: real raylets, whose CPUs and GPUs are only counts. Ends no process but its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

BIN = Path(sys.executable).parent
PROVIDER = "separate_nodes.SeparateNodesProvider"
MARK = "RAYTP_TEST_CLUSTER"
"""In the environment of every process of a cluster."""
UNUSED_LISTS = (
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "initialization_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


class LocalCluster:
    """`start`, and `shutdown` whatever happens."""

    def __init__(self, node_types: Mapping[str, Mapping[str, int]], *, max_nodes_each: int = 2) -> None:
        """`node_types`: the resources of a node of each type, {"gpu": {"CPU": 4, "GPU": 2}} say."""
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need a short path
        self._port, dashboard_port = free_port(), free_port()
        self.address = f"{ray.util.get_node_ip_address()}:{self._port}"
        self.dashboard = f"http://127.0.0.1:{dashboard_port}"
        self._config = self._autoscaler_config(node_types, max_nodes_each)
        self._head: subprocess.Popen[bytes] | None = None
        clean = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        self.env: dict[str, str] = clean | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_ADDRESS": self.address,
            "RAY_API_SERVER_ADDRESS": self.dashboard,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "NO_COLOR": "1",
            MARK: str(self.folder),
        }
        """For commands that use the cluster, as on one of its nodes."""

    def start(self, timeout_s: float = 60.0) -> None:
        """Returns when jobs may be submitted. Raises TimeoutError."""
        path = self.folder / "autoscaling.json"
        path.write_text(json.dumps(self._config))
        command = [BIN / "ray", "start", "--head", "--block", f"--port={self._port}", "--num-cpus=0", "--num-gpus=0"]
        command += [f"--autoscaling-config={path}", f"--temp-dir={self.folder}", "--object-store-memory=100000000"]
        command += ["--include-dashboard=true", f"--dashboard-port={self.dashboard.rpartition(':')[2]}"]
        command += ["--dashboard-agent-listen-port=0", "--disable-usage-stats"]
        env = {key: text for key, text in self.env.items() if key not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")} | {
            "RAY_FAKE_CLUSTER": "1",
            "PYTHONPATH": str(Path(__file__).parent),
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_enable_autoscaler_v2": "0",
        }
        with open(self.folder / "head.log", "wb") as log:
            self._head = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + timeout_s
        while not self._takes_jobs():
            if time.monotonic() > deadline or self._head.poll() is not None:
                raise TimeoutError(f"no dashboard: {(self.folder / 'head.log').read_text()}")
            time.sleep(0.2)

    def shutdown(self) -> None:
        """End every process of the cluster."""
        if self._head is None:
            return
        # the autoscaler first, or it starts anew what follows
        for pid, _ in sorted(self.processes().items(), key=lambda each: "monitor.py" not in each[1]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._head.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> dict[int, str]:
        """Those of this cluster, its jobs' and actors' among them: command lines, or titles, by process id."""
        found = {}
        mark = f"{MARK}={self.folder}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found[int(folder.name)] = command
        return found

    def _takes_jobs(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.dashboard}/api/jobs/", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _autoscaler_config(self, node_types: Mapping[str, Mapping[str, int]], max_nodes_each: int) -> dict[str, Any]:
        types: dict[str, Any] = {
            name: {"resources": dict(resources), "node_config": {}, "min_workers": 0, "max_workers": max_nodes_each}
            for name, resources in node_types.items()
        }
        types["ray.head.default"] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        return {
            "cluster_name": "local",
            "max_workers": max_nodes_each * len(node_types),
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 0.1,
            "provider": {
                "type": "external",
                "module": PROVIDER,
                "nodes_folder": str(self.folder),
                "gcs_address": self.address,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": types,
            "head_node_type": "ray.head.default",
            "auth": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            **{key: [] for key in UNUSED_LISTS},
        }
