"""Says what the cluster lacks for a placement group. Called by `raytp.rank_group` when a placement has failed."""

from __future__ import annotations

from collections import Counter

import ray
from ray._private.state import available_resources_per_node


def describe_shortage(bundles: list[dict[str, float]], strategy: str, waited_s: float) -> str:
    """What was asked for, what each node has free, and what is missing."""
    wanted: Counter[str] = Counter()
    for bundle in bundles:
        wanted.update(bundle)
    asked = ", ".join(f"{amount:g} {resource}" for resource, amount in wanted.items())
    packed = " on one node" if strategy == "STRICT_PACK" and len(bundles) > 1 else ""
    lines = [f"the cluster did not give {asked}{packed} within placement_timeout_s={waited_s:g}. Nodes:"]
    free = available_resources_per_node()
    most = 0.0
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        name = node["NodeManagerHostname"]
        totals = {resource: node["Resources"].get(resource, 0.0) for resource in wanted}
        most = max(most, *totals.values())
        have = ", ".join(
            f"{free.get(node['NodeID'], {}).get(resource, 0.0):g} of {total:g} {resource} free"
            for resource, total in totals.items()
        )
        lines.append(f"  {name} ({node['NodeManagerAddress']}): {have}")
    if packed and most < len(bundles):
        lines.append(
            f"No node has {asked}, so waiting cannot help unless the autoscaler adds one that has: lower "
            f"tensor_parallel_size, or set placement_strategy='PACK' to use several nodes."
        )
    else:
        lines.append("Free some, add nodes, or raise placement_timeout_s if the autoscaler needs longer.")
    return "\n".join(lines)
