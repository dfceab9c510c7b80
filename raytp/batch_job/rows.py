"""One row of the input, as every reader gives it and every writer takes it. Plain values; no logic of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from raytp.outputs import RequestOutput
from raytp.tokenizer import Tokenizer
from scheduler.sampling_params import SamplingParams

Request: TypeAlias = str | list[int] | list[dict[str, Any]]
"""A prompt as text or as token ids, or the messages of a chat."""
Job: TypeAlias = tuple[int, Request, SamplingParams]
"""What an engine is asked: the row's ordinal, request and sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a row stands."""

    ordinal: int
    """Its number in the whole input, from 0; blank lines have none."""
    source: str
    """The file."""
    line: int
    """The line, or a Parquet file's row, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row that can be asked."""

    place: Place
    id: str | None
    request: Request
    params: SamplingParams
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The input's own columns, to be kept."""
    is_chat: bool
    """Whether the request is the messages of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be asked, or whose request failed: it becomes an error record."""

    place: Place
    id: str | None
    code: str
    message: str
    columns: Mapping[str, Any] = field(default_factory=dict)


class RowError(Exception):
    """Raised by a parser: what is wrong with one row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Engine(Protocol):
    """What a job needs of `raytp.LLM`."""

    @property
    def model_name(self) -> str:
        """For records that name it."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Turns messages into a prompt, and token ids into text."""

    def complete(self, jobs: Iterable[Job | None]) -> Generator[tuple[int, RequestOutput] | None, None, None]:
        """Answers in the order of completion; see `raytp.LLM.complete`."""
