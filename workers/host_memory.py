"""What this process holds of its host's memory, as Linux counts it. Called by `workers.model_runner`."""

from __future__ import annotations

import os
import resource


def resident_bytes() -> int:
    """Memory that the process holds now, mapped files included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that it has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
