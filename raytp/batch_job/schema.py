"""The pyarrow schemas of Parquet output, and how the manifest holds one. Called by `raytp.batch_job.output`."""

from __future__ import annotations

import base64
from typing import Any

from raytp.batch_job.plain_format import kept_name, name_clash
from raytp.errors import ConfigError


def result_schema(input_schema: Any | None) -> Any:
    """The schema of `raytp.batch_job.plain_format.PlainFormat`'s records, behind an input's own columns, if known.

    Raises ConfigError if two of those would be called the same.
    """
    import pyarrow as pa

    clash = None if input_schema is None else name_clash(input_schema.names)
    if clash is not None:
        raise ConfigError(clash)
    own = [
        pa.field("row", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("num_prompt_tokens", pa.int32()),
        pa.field("num_cached_tokens", pa.int32()),
        pa.field("num_output_tokens", pa.int32()),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("error_source", pa.string()),
        pa.field("error_line", pa.int64()),
    ]
    kept = [field.with_name(kept_name(field.name)).with_nullable(True) for field in input_schema or ()]
    return pa.schema([*kept, *own])


def encode_schema(schema: Any) -> str:
    """As text."""
    return base64.b64encode(schema.serialize()).decode()


def decode_schema(text: str) -> Any:
    """From `encode_schema`."""
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
