"""One cluster for the tests that submit jobs: a head without CPUs, and workers that its autoscaler adds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.local_cluster import LocalCluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    cluster = LocalCluster({"cpu_worker": {"CPU": 2}, "gpu_worker": {"CPU": 2, "GPU": 4}})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.shutdown()
