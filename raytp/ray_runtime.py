"""Finds the Ray to run on, or starts one. Called by `raytp.llm`, before anything else touches Ray."""

from __future__ import annotations

import logging
import os

import ray


def ensure_ray(num_ranks: int) -> None:
    """Use the Ray this process has, else the cluster of RAY_ADDRESS (set inside a Ray job), else start a local one.

    The local one has at least as many CPUs as there are ranks, and ends with this process.
    """
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_ranks),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def cluster_has_gpus() -> bool:
    """Whether any node that is up now has a GPU."""
    return bool(ray.cluster_resources().get("GPU", 0) > 0)
