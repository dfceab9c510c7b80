"""Reads a file of YAML, without its traps. Called by `raytp.experiment.reading`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from raytp.errors import ConfigError


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.1, but 1:8 and 010 are texts, not 68 and 8, 1e3 is a number, and a key that stands twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_INT, _FLOAT, _DATE = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, _DATE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> tuple[Any, str]:
    """What a file holds, and its text. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a name with a zero byte, or what is no text
        raise ConfigError(f"the experiment {path} cannot be read: {error}") from None
    try:
        return yaml.load(text, Loader=_Loader), text
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"the experiment {path} is no YAML: {words}") from None
