"""Measures how long ranks that die, stop, raise or get damaged frames keep their callers waiting.

    PYTHONPATH=. python benchmarks/recovery.py --json benchmarks/results/NAME.json
    PYTHONPATH=. python benchmarks/recovery.py --model tests/models/tiny-qwen3-trivia --only kill --device cuda

One engine for each fault, at its default time-outs: a stream is read while other requests run beside it, and the fault
happens at its point, in one rank. Ranks write into their logs when it was. The answers are compared with those of an
engine that nothing happens to.
"""

from __future__ import annotations

import argparse
import logging
import re
import shlex
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors

from raytp import LLM, SamplingParams
from raytp.bench.record import append_records, describe_circumstances
from workers.faults import Fault

_START_POINTS = ("rendezvous", "loading", "warm-up")
_POINTS = ("decode", "prefill", "abort", "shutdown", *_START_POINTS)
_MATRIX = [("stop", "decode"), ("raise", "decode"), ("corrupt", "frame"), *(("kill", point) for point in _POINTS)]
_NTH = {"decode": 12, "frame": 14}
_TRIGGER = Fault(kind="kill", rank=0, point="decode", nth=12)
"""Ranks must die before the start of others can fail while somebody waits."""
_PROMPTS = [f"The story of {name} begins" for name in ("a cat", "the sea", "one king", "rain")]
_SAMPLING = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]
_ABORTED = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
_EXIT_S = 15.0
"""Within which nothing of an engine may be left."""


@dataclass(frozen=True)
class Cell:
    """One fault of the matrix."""

    kind: str
    point: str
    rank: int

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What the engine is told."""
        fault = {"kind": self.kind, "rank": self.rank, "point": self.point, "nth": _NTH.get(self.point, 1)}
        if self.point in _START_POINTS:
            return _TRIGGER, Fault(**fault, epoch=1)  # type: ignore[arg-type]
        return (Fault(**fault),)  # type: ignore[arg-type]


@dataclass
class Answers:
    """What a caller was told, and when."""

    token_ids: list[list[int]]
    arrivals: list[float]
    """Of the stream's pieces, as time.time() counts."""


def ask(llm: LLM, *, with_abort: bool) -> Answers:
    """One stream, three requests beside it, and one more that is aborted if asked for."""
    others: list[Any] = []
    beside = threading.Thread(target=lambda: others.extend(llm.generate(_PROMPTS[1:], _SAMPLING[1:])))
    beside.start()
    aborted = llm.stream("Nobody will hear the end of", _ABORTED) if with_abort else None
    if aborted is not None:
        next(aborted)
    tokens: list[int] = []
    arrivals = []
    for chunk in llm.stream(_PROMPTS[0], _SAMPLING[0]):
        arrivals.append(time.time())
        tokens += chunk.token_ids
        if aborted is not None and len(tokens) >= 8:
            aborted.abort()
            aborted = None
    beside.join()
    return Answers([tokens, *(output.token_ids for output in others)], arrivals)


def fault_times() -> list[float]:
    """When the faults of this Ray session happened, as the ranks' logs say: oldest first."""
    session = ray._private.worker._global_node.get_session_dir_path()
    logs = Path(session, "logs").glob("worker-*.err")
    return sorted(float(t) for log in logs for t in re.findall(r"^fault: .*, ([\d.]+)$", log.read_text(), re.MULTILINE))


def num_ranks_alive() -> int:
    """Rank actors' processes that have not ended."""
    pids = [actor["Pid"] for actor in actors().values() if actor["ActorClassName"] == "RankActor"]
    lines = [Path(f"/proc/{pid}/cmdline") for pid in pids]
    return sum(line.exists() and b"RankActor" in line.read_bytes() for line in lines)


def measure(cell: Cell, options: argparse.Namespace, expected: list[list[int]]) -> dict[str, Any]:
    """One record."""
    llm = LLM(options.model, options.ranks, device=options.device, faults=cell.faults, show_progress=False)
    try:
        answers = ask(llm, with_abort=cell.point == "abort")
        recoveries, info = llm.recoveries(), llm.info
    finally:
        asked_at = time.time()
        llm.shutdown()
    while num_ranks_alive() and time.time() - asked_at < _EXIT_S:
        time.sleep(0.05)
    end_s = time.time() - asked_at
    record: dict[str, Any] = {
        "kind": cell.kind,
        "point": cell.point,
        "rank": cell.rank,
        "is_identical": answers.token_ids == expected,
        "detection_s": None,
        "rebuild_s": None,
        "next_token_s": None,
        "end_s": round(end_s, 3),
        "num_ranks_left": num_ranks_alive(),
    }
    happened_at = fault_times()[-1]
    if cell.point != "shutdown":
        recovery = recoveries[-1]
        noticed_at = recovery.failed_starts[-1][0] if recovery.failed_starts else recovery.noticed_at
        ready_at = recovery.noticed_at + recovery.rebuild_s
        record["detection_s"] = round(noticed_at - happened_at, 3)
        record["rebuild_s"] = round(ready_at - noticed_at, 3)
        record["next_token_s"] = round(min(t for t in answers.arrivals if t > ready_at) - happened_at, 3)
    return record | describe_circumstances(info) | {"command": shlex.join(["python", *sys.argv])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the small default model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help="faults of this kind, or at this point")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with LLM(options.model, options.ranks, device=options.device, show_progress=False) as llm:
        expected = ask(llm, with_abort=False).token_ids
        model = llm.model_name
    cells = [Cell(kind, point, rank) for kind, point in _MATRIX for rank in range(options.ranks)]
    for cell in cells:
        if options.only in (None, cell.kind, cell.point):
            record = {"model": model, "tensor_parallel_size": options.ranks} | measure(cell, options, expected)
            print({name: record[name] for name in list(record)[2:11]}, flush=True)
            if options.json is not None:
                append_records(options.json, [record])


if __name__ == "__main__":
    main()
