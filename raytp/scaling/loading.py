"""A policy by the text that a user gives. Called by the commands, and by whoever reads an experiment's file."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from typing import Any

from raytp.errors import ConfigError
from raytp.scaling.blame import raised
from raytp.scaling.observation import Policy
from raytp.scaling.policies import DeadlinePolicy, FixedPolicy, QueuePolicy
from scheduler.errors import shown

_BUILT_IN = "fixed, fixed:COUNT, queue:SECONDS or deadline:SECONDS"
_FORMS = "fixed, fixed:COUNT, queue:SECONDS, deadline:SECONDS or MODULE:FUNCTION"
_ABSENT = object()


def load_policy(text: str) -> Policy:
    """The policy that `text` names, in one of the forms of `_FORMS`. Raises ConfigError.

    A module of the current folder is found, too.
    """
    name, _, argument = text.partition(":")
    try:
        if name == "fixed":
            return FixedPolicy(_count(argument) if argument else None)
        if name == "queue":
            return QueuePolicy(float(argument))
        if name == "deadline":
            return DeadlinePolicy(float(argument))
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(f"policy {shown(text)}: {shown(argument)} is no number; a policy is {_FORMS}") from None
    if not argument.isidentifier() or not all(name.split(".")):
        raise ConfigError(f"policy {shown(text)} is not known; a policy is {_FORMS}")
    return _load_function(text, name, argument)


def look_also_in(folder: str) -> None:
    """Find modules of policies there, too: after all other folders, so that no module is hidden by a file there."""
    if folder not in sys.path:
        sys.path.append(folder)


def _count(argument: str) -> int:
    count = int(argument)
    if count < 0:
        raise ConfigError(f"policy fixed:{shown(count)}: the count must be at least 0")
    return count


def _load_function(text: str, module_name: str, function_name: str) -> Policy:
    with suppress(OSError):  # there may be no such folder any more
        look_also_in(os.getcwd())
    try:
        module = importlib.import_module(module_name)
        function: Any = getattr(module, function_name, _ABSENT)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):  # it imports another one
            raise ConfigError(f"policy {shown(text)} cannot be imported: that {raised(error)}") from error
        raise ConfigError(
            f"policy {shown(text)}: there is no module {error.name} in the current folder, or where Python looks: go "
            f"to its folder, or name that in PYTHONPATH. A policy that comes with raytp is {_BUILT_IN}"
        ) from None
    except (Exception, SystemExit) as error:  # the module may raise anything
        raise ConfigError(f"policy {shown(text)} cannot be imported: that {raised(error)}") from error
    if function is _ABSENT:
        file = getattr(module, "__file__", None) or "a module of Python's own"
        raise ConfigError(
            f"policy {shown(text)} is not there: {module_name}, which is {file}, has no {function_name}; if another "
            f"file was meant, give it a name that no other module has"
        )
    if not callable(function):
        raise ConfigError(
            f"policy {shown(text)} is no function: it must take an Observation and return a count of replicas"
        )
    policy: Policy = function
    return policy
