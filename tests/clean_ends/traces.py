"""What an engine leaves on a machine: processes, listening sockets, files in /dev/shm, folders of Unix sockets."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"
_MAPPED = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Traces:
    """Those of some processes at one moment."""

    titles: dict[int, str]
    """By process id."""
    listening: dict[int, str]
    """Ports and paths by the sockets' inodes."""
    files: frozenset[str]
    """In /dev/shm, mapped or open, and the folders of Unix sockets."""

    def left(self) -> list[str]:
        """What of it there still is."""
        processes = [f"process {pid} {title}" for pid, title in self.titles.items() if title_of(pid) == title]
        still = _all_listening()
        ports = [f"listens at {where}" for inode, where in self.listening.items() if inode in still]
        return processes + ports + [f"file {path}" for path in self.files if os.path.exists(path)]


def take_traces(pids: Iterable[int]) -> Traces:
    """Of these processes as they are now."""
    titles = {pid: title_of(pid) for pid in pids}
    inodes: set[int] = set()
    files: set[str] = set()
    for pid in titles:
        with contextlib.suppress(OSError):
            files.update(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    inodes.add(int(target[8:-1]))
                elif target.startswith("/dev/shm/"):
                    files.add(target)
    listening = {inode: where for inode, where in _all_listening().items() if inode in inodes}
    ours = f"{tempfile.gettempdir()}/raytp-"
    folders = {str(Path(where).parent) for where in listening.values() if where.startswith(ours)}
    return Traces(titles, listening, frozenset(path for path in files | folders if os.path.exists(path)))


def title_of(pid: int) -> str:
    """A process's command line, or the title that Ray gives it; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def marked(mark: str) -> set[int]:
    """Processes with this in their environment, and no zombies."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def _all_listening() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                found[int(fields[9])] = f"port {int(fields[1].rpartition(':')[2], 16)}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000" and len(fields) > 7:  # accepts connections
            found[int(fields[6])] = fields[7]
    return found
