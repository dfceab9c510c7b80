"""What users import, and the tree of errors that they may catch."""

from __future__ import annotations

import re

import raytp
import raytp.errors
import scheduler.errors
import workers.errors

PUBLIC = [
    "LLM",
    "CompletionOutput",
    "OutputChunk",
    "RaytpError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "batch",
]


def test_the_public_names_are_exactly_these() -> None:
    assert raytp.__all__ == PUBLIC
    for name in PUBLIC:
        value = getattr(raytp, name)
        assert value.__name__ == name
        assert value.__doc__


def _tree_in_docstring() -> dict[str, str | None]:
    """{error: the one it hangs under} as raytp.errors draws it."""
    assert raytp.errors.__doc__
    tree: dict[str, str | None] = {}
    path: list[str] = []
    for line in raytp.errors.__doc__.splitlines():
        drawn = re.match(r"([│├└─ ]*)([A-Z]\w+)( |$)", line)
        if drawn is None or not (drawn[1] or drawn[2] == "RaytpError"):
            continue
        depth = len(drawn[1]) // 4
        path[depth:] = [drawn[2]]
        tree[drawn[2]] = path[depth - 1] if depth else None
    return tree


def _tree_of_classes() -> dict[str, str | None]:
    tree: dict[str, str | None] = {}
    for module in (scheduler.errors, workers.errors, raytp.errors):
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, raytp.RaytpError):
                assert value.__name__ == name
                parent = next(base for base in value.__mro__[1:] if issubclass(base, Exception))
                tree[name] = parent.__name__ if parent is not Exception else None
    return tree


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    assert _tree_in_docstring() == _tree_of_classes()


def test_the_drawn_tree_says_which_are_value_errors() -> None:
    assert raytp.errors.__doc__
    drawn = {match[1] for match in re.finditer(r"─ (\w+) .*?also a ValueError", raytp.errors.__doc__)}
    real = {name for name in _tree_of_classes() if issubclass(getattr(raytp.errors, name), ValueError)}
    assert drawn == real


def test_every_error_can_be_caught_from_one_place() -> None:
    assert set(raytp.errors.__all__) == set(_tree_of_classes())
    for name in raytp.errors.__all__:
        assert getattr(raytp.errors, name).__doc__
