"""Parts of an experiment in words, for the report and the pictures."""

from __future__ import annotations

from raytp.experiment.spec import ClusterKind, ExperimentSpec, Failure, LoseNode, SlowStart


def describe_cluster(spec: ExperimentSpec) -> str:
    """Where the runs take place."""
    cluster = spec.cluster
    replicas = f"{spec.min_replicas} to {spec.max_replicas} replicas of {_gpus(spec.tensor_parallel_size)}"
    if cluster.kind is ClusterKind.RAY:
        return f"a Ray cluster, {replicas}"
    nodes = f"{cluster.min_nodes} to {cluster.max_nodes} nodes of {_gpus(cluster.gpus_per_node)}, {replicas}"
    if cluster.kind is ClusterKind.FAKE:
        return f"fake nodes of this machine with Ray's autoscaler, {nodes}"
    times = f"{cluster.provisioning_s:g} s until a node comes and {cluster.startup_s:g} s until a replica has started"
    return f"simulated {cluster.gpu}, {nodes}, {times}"


def describe_failure(failure: Failure) -> str:
    """What goes wrong."""
    if isinstance(failure, LoseNode):
        return f"node {failure.node} is lost after {failure.at_s:g} s"
    who = "every replica" if failure.replica is None else f"replica {failure.replica}"
    if isinstance(failure, SlowStart):
        return f"{who} takes {failure.seconds:g} s longer to start"
    return f"{who} takes {failure.seconds:g} s longer for each step"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
