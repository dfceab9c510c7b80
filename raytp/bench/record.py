"""What a measurement leaves behind: one JSON object for each workload, in a file that holds a list of them.

Called by `raytp.bench.run`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import raytp
from raytp.bench.floor import Floor
from raytp.bench.measure import Measurement
from raytp.errors import ConfigError
from raytp.outputs import EngineInfo
from workers.config import DeviceProfile

Record = dict[str, Any]

_DISTRIBUTIONS = ("ray", "torch", "triton", "numpy", "flash-attn", "flash-attn-3", "tokenspeed-fa3")
"""Those whose versions a record names, if they are installed; the last three are builds of FlashAttention."""


def describe_results(measurements: Sequence[Measurement], floors: Sequence[Floor] | None) -> Record:
    """The numbers of one workload, all of its cases taken together.

    Rates and times are the median of the runs, and the runs stand beside them. Steps are counted as the longest
    request's tokens out: `step_ms` and `floor_step_ms` are a case's time over that number, by the case's sequences.
    """
    seconds = [sum(run) for run in zip(*(m.seconds for m in measurements), strict=True)]
    num_runs, median_s = len(seconds), statistics.median(seconds)
    num_in = sum(m.case.num_prompt_tokens for m in measurements)
    num_out = sum(m.case.num_output_tokens for m in measurements)
    num_steps = sum(m.num_steps for m in measurements)
    floor_s = None if floors is None else sum(floor.total_s for floor in floors)
    return {
        "num_prompts": sum(len(m.case.prompts) for m in measurements),
        "num_prompt_tokens": num_in,
        "num_output_tokens": num_out,
        "seconds": median_s,
        "seconds_of_runs": seconds,
        "output_tokens_per_s": num_out / median_s,
        "output_tokens_per_s_of_runs": [num_out / run for run in seconds],
        "input_tokens_per_s": num_in / median_s,
        "step_ms": {_key(m): _step_ms(m, statistics.median(m.seconds)) for m in measurements},
        "floor_s": floor_s,
        "floor_parts": None if floors is None else _parts(floors),
        "floor_step_ms": None
        if floors is None
        else {_key(m): _step_ms(m, floor.total_s) for m, floor in zip(measurements, floors, strict=True)},
        "ratio": None if floor_s is None else median_s / floor_s,
        "num_scheduler_steps": num_steps / num_runs,
        "driver_us_per_step": sum(m.driver_cpu_s for m in measurements) / num_steps * 1e6,
        "cached_share": sum(m.num_cached_tokens for m in measurements) / num_runs / num_in,
        "num_preemptions": sum(m.num_preemptions for m in measurements) / num_runs,
    }


def describe_profiles(profiles: Sequence[DeviceProfile]) -> Record:
    """How idle the idlest rank's GPU was in steady decode, and where rank 0's time went; None if nothing was seen."""
    seen = [profile for profile in profiles if profile.window_s > 0]
    return {
        "gpu_idle_share": max((1 - profile.busy_s / profile.window_s for profile in seen), default=None),
        "top_kernels": [list(kernel) for kernel in seen[0].top_kernels] if seen else None,
    }


def describe_circumstances(info: EngineInfo) -> Record:
    """Where, when, with what and how it was measured."""
    return {
        "gpu": list(info.device_names),
        "engine": dataclasses.asdict(info),
        "versions": _versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(Path(raytp.__file__).parents[1]),
        "command": shlex.join(["raytp", *sys.argv[1:]]),
    }


def seconds_since_process_start() -> float:
    """The interpreter's own start and all imports included."""
    fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields_after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def read_records(file: Path) -> list[Record]:
    """The records that a file holds; none if it does not exist. Raises ConfigError if it holds something else."""
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent} for the results: make it first")
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be added to: {error}") from None
    if not isinstance(records, list):
        raise ConfigError(f"{file} cannot be added to: it holds no list of records")
    return records


def append_records(file: Path, records: Sequence[Record]) -> None:
    """Add records at the end. The file is replaced as a whole, so that nothing is lost if this is interrupted."""
    all_records = [*read_records(file), *records]
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(all_records, indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


def _key(measurement: Measurement) -> str:
    return str(len(measurement.case.prompts))


def _step_ms(measurement: Measurement, seconds: float) -> float:
    return seconds / max(measurement.case.output_lens) * 1e3


def _parts(floors: Sequence[Floor]) -> dict[str, float]:
    names = [field.name for field in dataclasses.fields(Floor)]
    return {name: sum(getattr(floor, name) for floor in floors) for name in names}


def _versions() -> dict[str, str]:
    versions = {"raytp": raytp.__version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file() and (found := re.search(r"Module[^\n]*?(\d+\.\d[\d.]*)", driver.read_text())):
        versions["nvidia driver"] = found[1]
    return versions


def _commit(root: Path) -> str | None:
    """The commit of the checkout that raytp runs from, with "+" if files differ from it; None if it is installed."""
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
