"""One mapping of an experiment's file: values of the wanted kind, or an error that says what is wrong and where.

Called by `raytp.experiment.reading`. Knows nothing of what the keys mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from raytp.errors import ConfigError
from raytp.simulator.seconds import MAX_SECONDS
from scheduler.errors import shown

T = TypeVar("T")

MAX_COUNT = 10**7


class Section:
    """A mapping whose keys are taken one by one, so that `done` knows those that nobody asked for."""

    def __init__(self, where: str, content: Any) -> None:
        """`where`: what messages call it, such as "workload"; empty for the whole file."""
        if not isinstance(content, dict):
            raise ConfigError(f"{where or 'the file'} is {shown(content)}, and must be a mapping, a list of KEY: VALUE")
        self._where = where
        self._content = content
        self._asked: list[str] = []

    def __contains__(self, name: str) -> bool:
        return self._content.get(name) is not None

    def label(self, name: str) -> str:
        """The key as messages name it."""
        return f"{self._where}.{name}" if self._where else name

    def value(self, name: str) -> Any:
        """Whatever stands there; None if nothing does."""
        self._asked.append(name)
        return self._content.get(name)

    def section(self, name: str) -> Section:
        """A mapping inside this one; empty if it is left out."""
        found = self.value(name)
        return Section(self.label(name), {} if found is None else found)

    def text(self, name: str, default: T) -> str | T:
        """A text that is not empty."""
        return self._get(name, default, lambda value: isinstance(value, str) and value.strip() != "", "a text")

    def integer(self, name: str, default: T, *, least: int = 0, most: int = MAX_COUNT) -> int | T:
        """An integer within limits, both included."""
        return self._get(name, default, lambda value: is_integer(value, least, most), f"an integer, {least} to {most}")

    def number(self, name: str, default: T, *, above: float | None = None) -> float | T:
        """A number of at least 0, or above `above`."""
        limits = "at least 0" if above is None else f"above {above:g}"
        is_good = lambda value: _is_number(value) and (value > above if above is not None else value >= 0)  # noqa: E731
        found = self._get(name, default, is_good, f"a number, {limits} and at most {MAX_SECONDS:g}")
        return float(found) if isinstance(found, int) else found

    def required(self, name: str, found: T | None) -> T:
        """`found`, which must be there."""
        if found is None:
            raise ConfigError(f"{self.label(name)} is missing")
        return found

    def items(self, name: str) -> Sequence[Any] | None:
        """A list, which must not be empty; a single value is a list of one."""
        found = self.value(name)
        if found is None:
            return None
        items = found if isinstance(found, list) else [found]
        if not items:
            raise ConfigError(f"{self.label(name)} is an empty list: give one at least, or leave it out")
        return items

    def done(self) -> None:
        """All keys have been asked for. Raises ConfigError if the mapping has others."""
        for name in self._content:
            if name not in self._asked:
                place = f"{self._where} has no key" if self._where else "an experiment has no key"
                raise ConfigError(f"{place} {shown(name)}; its keys are {', '.join(self._asked)}")

    def _get(self, name: str, default: T, is_good: Callable[[Any], bool], kind: str) -> Any | T:
        found = self.value(name)
        if found is None:
            return default
        if not is_good(found):
            raise ConfigError(f"{self.label(name)} is {shown(found)}, and must be {kind}")
        return found


def is_integer(value: Any, least: int, most: int) -> bool:
    """Whether it is one, within limits; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_SECONDS
