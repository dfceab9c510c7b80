"""Rows of a user's own table: a `prompt` or `messages` column, perhaps an `id`, sampling columns, and others to keep.

The record of a row holds the input's columns and those of `RESULT_COLUMNS`. Called by `raytp.batch_job.readers` and
`raytp.batch_job.job`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from raytp.batch_job.rows import BadRow, Place, Request, Row, RowError
from raytp.outputs import RequestOutput
from scheduler.errors import ConfigError, RequestError
from scheduler.sampling_params import SamplingParams, validate

SAMPLING_COLUMNS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
"""Columns that set the sampling of their row. n and logprobs are no such columns: a record has one text."""
RESULT_COLUMNS = (
    "row",
    "text",
    "finish_reason",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "error_code",
    "error_message",
    "error_source",
    "error_line",
)
OTHER_COLUMNS = "other_columns"
"""The Parquet column that holds, as JSON, what does not fit the schema of the first part."""
_OURS = frozenset((*RESULT_COLUMNS, OTHER_COLUMNS))


class PlainFormat:
    """Parses a row's columns, and writes its record."""

    def __init__(self, defaults: SamplingParams, use_chat: bool) -> None:
        """`defaults` hold where a row has no sampling column; `use_chat` makes a prompt of text a user's message."""
        self._defaults = defaults
        self._use_chat = use_chat

    def parse(self, place: Place, columns: Mapping[str, Any]) -> Row | BadRow:
        """The row that the columns make."""
        row_id = None
        try:
            row_id = _id(columns.get("id"))
            if clash := name_clash(columns):
                raise RowError("invalid_value", clash)
            request, is_chat = self._request(columns)
            return Row(
                place=place,
                id=row_id,
                request=request,
                params=self._params(columns),
                columns=columns,
                is_chat=is_chat,
            )
        except RowError as error:
            return BadRow(place=place, id=row_id, code=error.code, message=error.message, columns=columns)

    def record(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        """The record of a row that was answered."""
        first = output.outputs[0]
        return _kept(row.columns) | {
            "row": row.place.ordinal,
            "text": first.text,
            "finish_reason": first.finish_reason,
            "num_prompt_tokens": output.num_prompt_tokens,
            "num_cached_tokens": output.num_cached_tokens,
            "num_output_tokens": len(first.token_ids),
            "error_code": None,
            "error_message": None,
            "error_source": None,
            "error_line": None,
        }

    def error_record(self, row: BadRow) -> dict[str, Any]:
        """The record of a row that failed."""
        nothing: dict[str, Any] = dict.fromkeys(RESULT_COLUMNS)
        return (
            _kept(row.columns)
            | nothing
            | {
                "row": row.place.ordinal,
                "error_code": row.code,
                "error_message": row.message,
                "error_source": row.place.source,
                "error_line": row.place.line,
            }
        )

    def _request(self, columns: Mapping[str, Any]) -> tuple[Request, bool]:
        prompt, messages = columns.get("prompt"), columns.get("messages")
        if prompt is not None and messages is not None:
            raise RowError("invalid_value", "the row has both prompt and messages: leave one out")
        if messages is not None:
            return checked_messages(messages), True
        if prompt is None:
            raise RowError("missing_field", "the row has neither prompt nor messages")
        prompt = checked_prompt(prompt)
        if self._use_chat and isinstance(prompt, str) and prompt:
            return [{"role": "user", "content": prompt}], True
        return prompt, False

    def _params(self, columns: Mapping[str, Any]) -> SamplingParams:
        given = {name: _number(columns[name]) for name in SAMPLING_COLUMNS if name in columns}
        given = {name: value for name, value in given.items() if value is not None}
        return checked_params(self._defaults, given)


def check_defaults(defaults: SamplingParams) -> None:
    """Raises ConfigError for what would be computed, and has no place in a record."""
    if defaults.n != 1 or defaults.logprobs is not None:
        raise ConfigError(
            f"n={defaults.n}, logprobs={defaults.logprobs}: a row of one's own has one text and no log probabilities; "
            f"leave them out, or ask in OpenAI's format"
        )


def checked_params(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """`defaults` with the values that a row gives. Raises RowError if one is out of its range."""
    if not given:
        return defaults
    params = defaults.replace(**given)
    try:
        validate(params)
    except RequestError as error:
        raise RowError("invalid_value", str(error)) from None
    return params


def checked_prompt(prompt: Any) -> str | list[int]:
    """A prompt that is text or a list of token ids. Raises RowError."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return prompt
    raise RowError(
        "invalid_value", f"prompt is of type {type(prompt).__name__}: it must be text or a list of token ids"
    )


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages without the nulls that Parquet fills absent fields with. Raises RowError."""
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise RowError("invalid_value", 'messages must be a list of {"role": ..., "content": ...}')
    if not messages:
        raise RowError("invalid_value", "messages is empty: a chat needs at least one message")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _id(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**100:
        return str(value)
    raise RowError("invalid_value", f"id is of type {type(value).__name__}: it must be text or an integer")


def _number(value: Any) -> Any:
    """Tables hold integers with gaps as floats, and a gap as NaN."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def kept_name(name: str) -> str:
    """What an input's column is called in the output: `input_text` for `text`, say, which is ours."""
    return f"input_{name}" if name in _OURS else name


def name_clash(names: Iterable[str]) -> str | None:
    """What is wrong with an input's columns if two of them would be called the same in the output."""
    names = set(names)
    for name in sorted(names & _OURS):
        if kept_name(name) in names:
            return f"the columns {name} and {kept_name(name)} would both be {kept_name(name)} in the output: rename one"
    return None


def _kept(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {kept_name(name): value for name, value in columns.items()}
