"""The shared engines of a cluster, by their names: which there are, how to reach one, and how to end one.

Their names are those of their driver actors, in a namespace of Ray's. Called by `raytp.connection`, and by the commands
`raytp engines` and `raytp stop`; `raytp.ray_runtime` must have found Ray before.
"""

from __future__ import annotations

import re
import time
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table

from raytp.driver_actor import NAMESPACE, end_driver
from raytp.driver_client import DriverClient
from raytp.errors import ConfigError, EngineError, EngineNotFoundError
from raytp.outputs import EngineDescription
from raytp.placement import group_name, remove_group

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ANSWER_WITHIN_S = 15.0
_GONE_WITHIN_S = 15.0


def check_name(name: str) -> None:
    """Raises ConfigError if an engine cannot be called so, or one is already."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"an engine cannot be called {name!r}: a name has 1 to 64 letters, digits, and _ . - but not at its start"
        )
    if name in _names():
        raise ConfigError(f"there is an engine {name} already: choose another name, or end it with raytp stop {name}")


def find_engine(name: str) -> DriverClient:
    """A shared engine, whatever its state. Raises EngineNotFoundError."""
    return DriverClient(_find_driver(name), name)


def list_engines() -> list[EngineDescription]:
    """What there is, by name, those that start or have failed too."""
    names = _names()
    refs = {}
    for name in names:
        try:
            refs[name] = ray.get_actor(name, namespace=NAMESPACE).describe.remote()
        except ValueError:
            continue  # it has ended meanwhile
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=_ANSWER_WITHIN_S)
    descriptions = (_description(name, ref) for name, ref in refs.items())
    return [description for description in descriptions if description is not None]


def stop_engine(name: str) -> None:
    """End a shared engine, and wait until nothing of it is left; callers that use it get an error.

    Raises EngineNotFoundError, or EngineError if something stays.
    """
    driver = _find_driver(name)
    group = group_name(driver._actor_id.hex())
    end_driver(driver)
    deadline = time.monotonic() + _GONE_WITHIN_S
    while name in _names() or _is_there(group):
        remove_group(group)  # a driver that was killed may have been about to make it
        if time.monotonic() > deadline:
            raise EngineError(f"engine {name} has been told to end, but has not within {_GONE_WITHIN_S:g} s: ask again")
        time.sleep(0.1)


def _names() -> list[str]:
    actors = list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)


def _find_driver(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        others = ", ".join(_names())
        there_is = f"there are {others}" if others else "there is none; raytp serve-engine NAME starts one"
        raise EngineNotFoundError(f"no engine is called {name!r} in this cluster: {there_is}") from None


def _description(name: str, ref: Any) -> EngineDescription | None:
    """None if the engine has ended meanwhile."""
    try:
        description: EngineDescription = ray.get(ref, timeout=0)
    except ray.exceptions.RayActorError:
        return None
    except ray.exceptions.GetTimeoutError:
        return EngineDescription(name=name, model_name="?", model_digest="", num_ranks=0, stage="does not answer")
    return description


def _is_there(group: str) -> bool:
    return any(each["name"] == group and each["state"] != "REMOVED" for each in placement_group_table().values())
