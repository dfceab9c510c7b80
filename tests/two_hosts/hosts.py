"""Hosts made of network namespaces, each with a raylet of its own, joined by a bridge whose links can be cut.

Each host has two interfaces. `eth1` leads to the others, by the address that Ray is told; `eth0` has addresses of one
network too, and leads nowhere. Ends no process but those of its own hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
_PORT = 6399
_SWITCH = "switch"


def obstacle() -> str | None:
    """Why this machine does not permit network namespaces; None if it does."""
    if shutil.which("ip") is None:
        return "needs the command ip, of iproute2"
    name = f"raytp-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "dev", "one", "type", "veth", "peer", "name", "two")
        _ip("-n", name, "link", "add", "dev", "bridge", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"needs to make network namespaces, veth pairs and bridges, as root can: {error.stderr.strip()}"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", name)
    return None


class Hosts:
    """A network, with no host at first; the first one that is added is the head. `close` whatever happens."""

    def __init__(self, ray_settings: Mapping[str, str]) -> None:
        """`ray_settings`: in the environment of Ray's processes."""
        self.folder = Path(tempfile.mkdtemp(prefix="rh-"))  # Ray's sockets need a short path
        self._settings = ray_settings
        self._prefix = f"raytp-{os.getpid()}-{self.folder.name}-"
        self._names: list[str] = []
        _ip("netns", "add", self._prefix + _SWITCH)
        self._in(_SWITCH, "link", "add", "dev", "bridge", "type", "bridge")
        self._in(_SWITCH, "link", "set", "dev", "bridge", "up")

    def add(self, name: str) -> None:
        """Start a host with one CPU; returns before it has joined the cluster."""
        self._names.append(name)
        number = len(self._names)
        _ip("netns", "add", self._prefix + name)
        self._in(name, "link", "set", "dev", "lo", "up")
        for index, port in enumerate((f"dead-{number}", f"port-{number}")):
            other = ["peer", "name", f"eth{index}", "netns", self._prefix + name]
            self._in(_SWITCH, "link", "add", "dev", port, "type", "veth", *other)
            self._in(_SWITCH, "link", "set", "dev", port, "up")
            self._in(name, "addr", "add", f"10.{66 + index}.0.{number}/24", "dev", f"eth{index}")
            self._in(name, "link", "set", "dev", f"eth{index}", "up")
        self.mend(name)
        start = [str(BIN / "ray"), "start", "--block", "--num-cpus=1", "--object-store-memory=100000000"]
        start += [f"--node-ip-address={self.address(name)}", f"--temp-dir={self.folder / name}"]
        start += ["--disable-usage-stats"]
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        start += head if number == 1 else [f"--address={self.address(self._names[0])}:{_PORT}"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.run(name, start, dict(self._settings), stdout=log, stderr=log)

    def address(self, name: str) -> str:
        """What Ray calls the host."""
        return f"10.67.0.{self._names.index(name) + 1}"

    def run(self, name: str, command: list[str], settings: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
        """A process of that host, with the host's name."""
        env = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "disabled",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            **settings,
        }
        there = ["ip", "netns", "exec", self._prefix + name, "unshare", "--uts", "sh", "-c"]
        there += ['hostname "$0" && exec "$@"', name, *command]
        return subprocess.Popen(there, env=env, text=True, start_new_session=True, **options)

    def run_job(self, script: Path) -> subprocess.Popen[str]:
        """A Python script on the head, as a job of the cluster, that reads and writes lines."""
        address = {"RAY_ADDRESS": f"{self.address(self._names[0])}:{_PORT}"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.run(self._names[0], [sys.executable, str(script)], address, **pipes)

    def cut(self, name: str) -> None:
        """What is sent to and from the host is lost; nobody is told."""
        self._in(_SWITCH, "link", "set", "dev", self._port(name), "nomaster")

    def mend(self, name: str) -> None:
        """As before the cut."""
        self._in(_SWITCH, "link", "set", "dev", self._port(name), "master", "bridge")

    def lose(self, name: str) -> None:
        """As when its power fails."""
        self.cut(name)
        self._kill_all(name)

    def processes(self, name: str) -> dict[int, str]:
        """Command lines, or titles, of the host's processes by process id."""
        found = {}
        for pid in _ip("netns", "pids", self._prefix + name).split():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(pid)] = line.strip()
        return found

    def close(self) -> None:
        """End all hosts."""
        for name in self._names:
            self._kill_all(name)
        for name in (*self._names, _SWITCH):
            _ip("netns", "del", self._prefix + name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_all(self, name: str) -> None:
        deadline = time.monotonic() + 10
        while (pids := self.processes(name)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _port(self, name: str) -> str:
        return f"port-{self._names.index(name) + 1}"

    def _in(self, name: str, *arguments: str) -> None:
        _ip("-n", self._prefix + name, *arguments)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=20).stdout
