"""Around an engine's placement group: its name, what others left behind, and what the cluster lacks for it.

Called by `raytp.rank_group` and, for the name, by `raytp.driver_client`.
"""

from __future__ import annotations

import re
from collections import Counter

import ray
from ray._private.state import actors, available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

_PREFIX = "raytp-"
_NAME = re.compile(rf"{_PREFIX}([0-9a-f]{{32}})")


def group_name(driver_actor_id: str) -> str:
    """Says whose it is, so that others can find and remove it if the driver dies."""
    return _PREFIX + driver_actor_id


def remove_abandoned_groups() -> None:
    """Give back what engines hold that ended without a chance to do so.

    If a process is killed that had an engine, its driver dies with it, and Ray keeps the placement group for the job,
    which may go on: the process may have been one actor of many.
    """
    for group_id, group in placement_group_table().items():
        name = _NAME.fullmatch(group["name"])
        if name and group["state"] != "REMOVED" and actors(name[1]).get("State") == "DEAD":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))


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
    if "CPU" in wanted:
        lines.append("It would run on CPUs. To wait for a node with GPUs instead, set device='cuda' (--device cuda).")
    return "\n".join(lines)
