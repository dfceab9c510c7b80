"""How busy the GPU is while the rank goes on with its steps, as CUPTI sees it. Called by `workers.worker`."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable

import torch

from workers.config import DeviceProfile

_NUM_TOP_KERNELS = 20
_COPIES = ("Memcpy", "Memset")
"""Not kernels: the copy engines run them, beside the multiprocessors."""

Kernel = tuple[str, float, float]
"""Name, start and end in microseconds."""


def profile_device(duration_s: float) -> DeviceProfile:
    """Record the kernels that any thread of this process has running on the GPU in the next `duration_s`."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        time.sleep(duration_s)
    return summarize_kernels(
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not event.name.startswith(_COPIES)
    )


def summarize_kernels(kernels: Iterable[Kernel]) -> DeviceProfile:
    """Busy is when at least one kernel runs; a kernel's share is of the sum of all their times."""
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    if not ordered:
        return DeviceProfile(window_s=0.0, busy_s=0.0, top_kernels=())
    times: collections.defaultdict[str, float] = collections.defaultdict(float)
    first = busy_until = ordered[0][1]
    busy = 0.0
    for name, start, end in ordered:
        times[name] += end - start
        busy += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    total = sum(times.values())
    longest = sorted(times.items(), key=lambda item: item[1], reverse=True)[:_NUM_TOP_KERNELS]
    return DeviceProfile(
        window_s=(busy_until - first) / 1e6,
        busy_s=busy / 1e6,
        top_kernels=tuple((name, spent / total) for name, spent in longest),
    )
