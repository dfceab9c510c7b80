"""JSON as batch files hold it: strict when read, UTF-8 when written. Called by the readers and writers of a job."""

from __future__ import annotations

import base64
import json
import math
from typing import Any, NoReturn

from raytp.batch_job.rows import RowError


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object on a line. Raises RowError."""
    try:
        value = json.loads(decode(line), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RowError("invalid_json", f"the line is not JSON: {_shorten(str(error))}") from None
    if not isinstance(value, dict):
        raise RowError("invalid_json", f"the line is JSON of type {type(value).__name__}: it must be an object")
    return value


def decode(line: bytes) -> str:
    """The text of a line. Raises RowError."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"byte {error.start} of the line is not UTF-8: {error.reason}") from None


def dump_line(record: Any) -> bytes:
    """One line of JSONL, its end included; what JSON has no type for becomes text, and NaN and infinity null."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, default=_as_json).encode() + b"\n"
    except ValueError:  # a number that JSON lacks, or half a surrogate pair, which only an escape can spell
        return json.dumps(_finite(record), default=_as_json).encode() + b"\n"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _as_json(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
