"""Programmatic dependent launch: a kernel starts before the one before it in the stream has ended.

What a kernel does between `gdc_launch_dependents`, which lets the next one start, and `gdc_wait`, which returns when
the kernel before has ended and its results can be read, hides the time of a launch: in a decode step hundreds of
kernels of a few microseconds follow each other. Until `gdc_wait` a kernel writes nothing, and reads only what no kernel
of the step writes shortly before it; every program of it waits, so that whoever waits for it has waited for all before.
A kernel that is launched without `launch_pdl` has waited for all of them, and may let the next one in all the same.
Used by the kernels of this package (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def can_overlap(device: torch.device) -> bool:
    """It came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
