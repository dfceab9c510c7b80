"""Around an engine's placement group: its name, what others left behind, and what the cluster has or lacks for it.

Called by `raytp.rank_group` and `raytp.rank_supply`; for its name and its end, by `raytp.driver_actor` and
`raytp.shared_engines`.
"""

from __future__ import annotations

import re

import ray
from ray._private.state import actors, available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

_PREFIX = "raytp-"
_NAME = re.compile(rf"{_PREFIX}([0-9a-f]{{32}})")


def group_name(driver_actor_id: str) -> str:
    """Says whose it is, so that others can find and remove it if the driver dies."""
    return _PREFIX + driver_actor_id


def remove_group(name: str) -> None:
    """If there is one, whichever job has made it: Ray itself looks for names in the caller's namespace alone."""
    for group_id, group in placement_group_table().items():
        if group["name"] == name and group["state"] != "REMOVED":
            _remove(group_id)


def resource_of(device: str) -> str:
    """What each rank needs one of, as Ray names it."""
    return "GPU" if device == "cuda" else "CPU"


def remove_abandoned_groups() -> None:
    """Give back what engines hold that ended without a chance to do so.

    If a process is killed that had an engine, its driver dies with it, and Ray keeps the placement group for the job,
    which may go on: the process may have been one actor of many.
    """
    for group_id, group in placement_group_table().items():
        name = _NAME.fullmatch(group["name"])
        if name and group["state"] != "REMOVED" and actors(name[1]).get("State") == "DEAD":
            _remove(group_id)


def _remove(group_id: str) -> None:
    remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))


def describe_shortage(
    bundles: list[dict[str, float]], strategy: str, waited_s: float, group: PlacementGroup | None
) -> str:
    """What was asked for, what each node has free, and what is missing. All bundles are alike, of one resource.

    What `group` already holds of it counts as free.
    """
    num_ranks = len(bundles)
    ((resource, amount),) = bundles[0].items()
    asked = _say_asked(num_ranks * amount, resource, strategy)
    lines = [f"the cluster did not give {asked} within placement_timeout_s={waited_s:g}. Nodes:"]
    free_of = _free(resource, group)
    free, total = [], []
    for node in ray.nodes():
        if node["Alive"]:
            free.append(free_of.get(node["NodeID"], 0.0))
            total.append(node["Resources"].get(resource, 0.0))
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            lines.append(f"  {name}: {free[-1]:g} of {total[-1]:g} {resource} free")
    missing = num_ranks - _most_ranks(free, strategy)
    if missing > 0:
        lines.append(f"Missing: {_say_missing(missing, resource, strategy)}.")
    if _most_ranks(total, strategy) < num_ranks:
        lacking = f"These nodes cannot hold {asked}, even idle"
        if strategy == "STRICT_PACK":
            lacking = f"No node has {num_ranks * amount:g} {resource}"
        lines.append(
            f"{lacking}, so waiting cannot help unless the autoscaler adds some that can: "
            f"lower tensor_parallel_size{_other_strategy(strategy)}."
        )
    else:
        lines.append("Free some, add nodes, or raise placement_timeout_s if the autoscaler needs longer.")
    if resource == "CPU":
        lines.append("It would run on CPUs. To wait for a node with GPUs instead, set device='cuda' (--device cuda).")
    return "\n".join(lines)


def describe_missing(bundles: list[dict[str, float]], strategy: str, group: PlacementGroup | None) -> str:
    """The same, for whoever waits, in a few words."""
    ((resource, amount),) = bundles[0].items()
    asked = _say_asked(len(bundles) * amount, resource, strategy)
    missing = len(bundles) - _most_ranks(list(_free(resource, group).values()), strategy)
    return f"{asked}; missing: {_say_missing(missing, resource, strategy)}" if missing > 0 else asked


def has_room(num_ranks: int, resource: str, strategy: str, held: PlacementGroup | None) -> bool:
    """One `resource` a rank, placed by Ray's `strategy`. What the ranks of `held` have counts as free.

    False if Ray does not say.
    """
    try:
        return _most_ranks(list(_free(resource, held).values()), strategy) >= num_ranks
    except ray.exceptions.RayError:
        return False


def _most_ranks(amounts: list[float], strategy: str) -> int:
    """How many ranks, of one resource each, nodes with these amounts hold."""
    whole = [int(amount) for amount in amounts]
    if strategy == "STRICT_PACK":
        return max(whole, default=0)
    return sum(amount > 0 for amount in whole) if strategy == "STRICT_SPREAD" else sum(whole)


def _say_asked(amount: float, resource: str, strategy: str) -> str:
    places = {"STRICT_PACK": " on one node", "STRICT_SPREAD": f" on {amount:g} nodes, one on each"}
    return f"{amount:g} {resource}{places.get(strategy, '') if amount > 1 else ''}"


def _say_missing(missing: int, resource: str, strategy: str) -> str:
    if strategy == "STRICT_PACK":
        return f"{missing} {resource} on the node that has most free"
    return f"{missing} nodes with a free {resource}" if strategy == "STRICT_SPREAD" else f"{missing} {resource}"


def _other_strategy(strategy: str) -> str:
    if strategy == "STRICT_PACK":
        return ", or set placement_strategy='PACK' to use several nodes"
    return ", or set placement_strategy='SPREAD' to let ranks share a node" if strategy == "STRICT_SPREAD" else ""


def _free(resource: str, held: PlacementGroup | None) -> dict[str, float]:
    """By node id, of those that are there; with what bundles of `held` have, of one `resource` each."""
    free_of = available_resources_per_node()
    free = {node["NodeID"]: free_of.get(node["NodeID"], {}).get(resource, 0.0) for node in ray.nodes() if node["Alive"]}
    if held is not None:
        for node_id in placement_group_table(held).get("bundles_to_node_id", {}).values():
            if node_id in free:
                free[node_id] += 1
    return free
