"""A line of an OpenAI batch file as a row: what is asked of which endpoint. Called by `openai_response`.

A field that would change the answer and that raytp does not serve makes the row a bad one; it is never left out in
silence. https://platform.openai.com/docs/api-reference/batch/request-input
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytp.batch_job.plain_format import checked_messages, checked_params, checked_prompt
from raytp.batch_job.rows import BadRow, Place, Row, RowError
from scheduler.errors import shown
from scheduler.sampling_params import SamplingParams

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"

_SAMPLING = {
    "temperature",
    "top_p",
    "seed",
    "n",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
}
"""Fields that are named as in SamplingParams; those from top_k on are vLLM's additions."""
_HANDLED = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL: dict[str, list[Any]] = {
    "stream": [False],
    "echo": [False],
    "suffix": [""],
    "best_of": [1],
    "logit_bias": [{}],
    "tools": [[]],
    "tool_choice": ["none"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
}
"""Fields that raytp does not serve, with the values that ask for nothing."""


def parse_request(place: Place, record: Mapping[str, Any], defaults: SamplingParams) -> Row | BadRow:
    """The row that a line of the file makes; `defaults` hold where its body has no value."""
    custom_id = None
    try:
        custom_id = _custom_id(record)
        is_chat, body = _endpoint(record)
        _check_fields(body)
        return Row(
            place=place,
            id=custom_id,
            request=_messages(body) if is_chat else _prompt(body),
            params=checked_params(defaults, _sampling(body, is_chat)),
            is_chat=is_chat,
        )
    except RowError as error:
        return BadRow(place=place, id=custom_id, code=error.code, message=error.message)


def _custom_id(record: Mapping[str, Any]) -> str:
    custom_id = record.get("custom_id")
    if custom_id is None:
        raise RowError("missing_field", "custom_id is missing")
    if not isinstance(custom_id, str) or not custom_id:
        raise RowError("invalid_value", "custom_id must be a text that is not empty")
    return custom_id


def _endpoint(record: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """(whether it is a chat, body without nulls)"""
    method, url, body = (record.get(name) for name in ("method", "url", "body"))
    for name, value in (("method", method), ("url", url), ("body", body)):
        if value is None:
            raise RowError("missing_field", f"{name} is missing")
    if method != "POST":
        raise RowError("unsupported_method", f"method={shown(method)} must be POST")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise RowError("unsupported_url", f"url={shown(url)} must be {CHAT_URL} or {COMPLETION_URL}")
    if not isinstance(body, dict):
        raise RowError("invalid_value", f"body is of type {type(body).__name__}: it must be an object")
    return url == CHAT_URL, {name: value for name, value in body.items() if value is not None}


def _check_fields(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _SAMPLING or name in _HANDLED or name in _WITHOUT_EFFECT:
            continue
        if value not in _NEUTRAL.get(name, []):
            raise RowError("unsupported_field", f"{name} is not supported: leave it out")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "prompt" in body:
        raise RowError("invalid_value", f"prompt belongs to {COMPLETION_URL}: give messages")
    if "messages" not in body:
        raise RowError("missing_field", "body.messages is missing")
    return checked_messages(body["messages"])


def _prompt(body: Mapping[str, Any]) -> str | list[int]:
    if "messages" in body:
        raise RowError("invalid_value", f"messages belong to {CHAT_URL}: give a prompt")
    if "prompt" not in body:
        raise RowError("missing_field", "body.prompt is missing")
    prompt = body["prompt"]
    if isinstance(prompt, list) and any(isinstance(each, (str, list)) for each in prompt):
        if len(prompt) > 1:
            raise RowError("invalid_value", f"prompt holds {len(prompt)} prompts: give each a line of its own")
        prompt = prompt[0]
    return checked_prompt(prompt)


def _sampling(body: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    """The fields of SamplingParams that the body sets."""
    given = {name: value for name, value in body.items() if name in _SAMPLING}
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if name in body]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise RowError("invalid_value", "max_tokens and max_completion_tokens differ: give one")
    if limits:
        given["max_tokens"] = limits[0]
    logprobs = _chat_logprobs(body) if is_chat else _completion_logprobs(body)
    return given if logprobs is None else given | {"logprobs": logprobs}


def _chat_logprobs(body: Mapping[str, Any]) -> Any:
    is_wanted = body.get("logprobs", False)
    if not isinstance(is_wanted, bool):
        raise RowError("invalid_value", f"logprobs={shown(is_wanted)} must be true or false for {CHAT_URL}")
    if "top_logprobs" in body and not is_wanted:
        raise RowError("invalid_value", "top_logprobs needs logprobs to be true")
    return body.get("top_logprobs", 0) if is_wanted else None


def _completion_logprobs(body: Mapping[str, Any]) -> Any:
    if "top_logprobs" in body:
        raise RowError("unsupported_field", f"top_logprobs belongs to {CHAT_URL}: logprobs is a number here")
    return body.get("logprobs")
