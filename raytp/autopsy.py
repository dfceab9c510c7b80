"""Why ranks died: what Ray knows of each, and the last lines of its log; and the end of those that have not.

Called by `raytp.rank_group`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.config import NodeInfo

_NUM_LINES = 10
_MAX_BYTES = 20_000
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
_NOTICE_S = 0.5
"""Ray learns of a death a moment after the connection has broken."""
_TIMEOUT_S = 3.0
_FATAL = re.compile(r"^(?:Fatal Python error|terminate called|Aborted|\*\*\* SIG|Segmentation fault).*", re.MULTILINE)
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(?:\s+There are some potential root causes|\n|$)", re.DOTALL)
_UNEXPECTED = "The actor died unexpectedly"
_EXIT_CODE = re.compile(r"exit code (\d+)")


@dataclass(frozen=True, slots=True)
class Traces:
    """What a process has left on its machine."""

    log: str
    """The last lines of its standard error."""
    num_oom_kills: int
    """See `count_oom_kills`."""


_LOW_MEMORY = "killed by Ray's memory monitor, since its node ran low on memory"
_NO_MEMORY = "killed by the kernel, which ran out of memory"
_LOST_NODE = "its node was lost"
ACCIDENTS = (_LOW_MEMORY, _NO_MEMORY, _LOST_NODE)
"""How a cause begins that is nothing a request can do."""
_NO_TRACES = Traces(log="", num_oom_kills=0)


def examine(nodes: Sequence[NodeInfo], run_refs: Sequence[Any]) -> dict[int, str]:
    """Why each rank whose process has ended did so, by rank; empty if none has.

    `run_refs`: a call on each rank, which fails if the rank has died.
    """
    if not run_refs:
        return {}
    ended, _ = ray.wait(list(run_refs), num_returns=len(run_refs), timeout=_NOTICE_S, fetch_local=False)
    deaths = {rank: death for rank, ref in enumerate(run_refs) if ref in ended and (death := _death(ref)) is not None}
    traces = _traces([nodes[rank] for rank in deaths])
    return {
        rank: _describe(nodes[rank], death, found) for (rank, death), found in zip(deaths.items(), traces, strict=True)
    }


def describe_end(node: NodeInfo | None, death: str) -> str:
    """Why a rank has died, and the end of its log. `death` is what Ray says; `node` is None if it is not yet known."""
    return _describe(node, death, _NO_TRACES if node is None else _traces([node])[0])


def _describe(node: NodeInfo | None, death: str, traces: Traces) -> str:
    is_oom = node is not None and traces.num_oom_kills > node.num_oom_kills
    cause = describe_death(death, traces.log, is_oom=is_oom)
    if not traces.log:
        return cause
    return "\n".join([f"{cause}; its log ends with:", *(f"  | {line}" for line in traces.log.splitlines())])


def find_processes(ranks: Sequence[Any]) -> list[tuple[str, int]]:
    """(node id, pid) of those actors that have begun, also if they have never said where they are."""
    found = [actors(rank._actor_id.hex()) for rank in ranks]
    return [(actor["Address"]["NodeID"], actor["Pid"]) for actor in found if actor.get("Pid")]


def kill_processes(processes: Sequence[tuple[str, int]]) -> None:
    """SIGKILL those ranks, (node id, pid), that have not ended; waits a moment for nodes that are far away."""
    if not processes:
        return
    here = ray.get_runtime_context().get_node_id()
    refs = [_ask(node_id, kill_rank, pid) for node_id, pid in processes if node_id != here]
    for node_id, pid in processes:
        if node_id == here:
            kill_rank(pid)
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=_TIMEOUT_S, fetch_local=False)


def kill_rank(pid: int) -> None:
    """SIGKILL a process of this machine, if it is a rank's."""
    with contextlib.suppress(OSError):
        if b"RankActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def describe_death(death: str, log: str, *, is_oom: bool = False) -> str:
    """One line, from what Ray says of an actor's death, the end of its log, and what the kernel did meanwhile."""
    if "low on memory" in death or "memory monitor" in death.lower():
        return f"{_LOW_MEMORY}: use a larger node, or more ranks"
    if "node has died" in death or "node was terminated" in death:
        return _LOST_NODE
    fatal = _FATAL.search(log)
    if fatal is not None:
        return fatal[0]
    if is_oom:
        return f"{_NO_MEMORY}: use a larger node, or more ranks"
    code = _EXIT_CODE.search(death)
    if code is not None:
        return f"it ended with exit code {code[1]}"
    detail = _EXIT_DETAIL.search(death)
    if detail is None and not death.startswith(_UNEXPECTED):  # cut off from the network, say
        return death.strip()
    if detail is None or "connection error code 2" in detail[1]:
        return "killed from outside (SIGKILL), or ended without a word"
    return " ".join(detail[1].split())


def _death(ref: Any) -> str | None:
    """What Ray says of the actor's death; None if it has not died."""
    try:
        ray.get(ref, timeout=_TIMEOUT_S)
    except ray.exceptions.RayActorError as error:
        return str(error)
    except ray.exceptions.RayError:
        return None
    return None


def _traces(nodes: Sequence[NodeInfo]) -> list[Traces]:
    """What ranks have left on their nodes, which are asked all at once; nothing from one that does not say in time."""
    if not nodes:
        return []
    here = ray.get_runtime_context().get_node_id()
    refs = {node: _ask(node.node_id, find_traces, node.log_path) for node in nodes if node.node_id != here}
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=_TIMEOUT_S)
    return [_answer(refs[node]) if node in refs else find_traces(node.log_path) for node in nodes]


def _ask(node_id: str, function: Callable[..., Any], argument: Any) -> Any:
    """A call on another node."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=there, max_retries=0).remote(argument)


def _answer(ref: Any) -> Traces:
    with contextlib.suppress(ray.exceptions.RayError):
        traces: Traces = ray.get(ref, timeout=0)
        return traces
    return _NO_TRACES


def find_traces(log_path: str) -> Traces:
    """Of a process of this machine that logged to that file."""
    return Traces(log=_read_end(log_path), num_oom_kills=count_oom_kills())


def count_oom_kills() -> int:
    """Processes of this one's control group that were killed for want of memory; of the machine, if it has none."""
    for path in (*_control_groups(), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if found is not None:
                return int(found[1])
    return 0


def _control_groups() -> list[Path]:
    """The counts of this process's own group of version 2, as of the kernel's admin-guide/cgroup-v2."""
    with contextlib.suppress(OSError):
        own = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        if own is not None:
            return [Path("/sys/fs/cgroup") / own[1] / "memory.events"]
    return []


def _read_end(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, Path(path).stat().st_size - _MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line for line in lines if line.strip() and not line.startswith(_RAY_MARKS)]
    return "\n".join(said[-_NUM_LINES:])
