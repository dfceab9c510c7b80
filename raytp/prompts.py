"""Turns what callers hand over as prompts into token ids, each checked by itself. Called by `raytp.llm` and the CLI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from raytp.tokenizer import Message, Tokenizer
from scheduler.errors import RequestError, shown
from scheduler.step import IntArray

Prompt: TypeAlias = str | Sequence[int] | IntArray
Conversation: TypeAlias = Sequence[Message]


def as_prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of integers is one prompt, and so is what can be no list of prompts."""
    is_many = _has_items(prompts) and not isinstance(prompts, (str, bytes, Mapping))
    items: list[Any] = list(prompts) if is_many else [prompts]
    is_one = is_many and bool(items) and all(isinstance(item, (int, np.integer)) for item in items)
    return [items] if is_one else items


def as_conversation_list(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or many, as a list. A list of messages is one conversation."""
    is_many = _has_items(messages) and not isinstance(messages, (str, Mapping))
    items: list[Any] = list(messages) if is_many else [messages]
    return [items] if is_many and items and isinstance(items[0], Mapping) else items


def _has_items(value: Any) -> bool:
    """An array of no dimensions says that it has, and has none."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> IntArray:
    """(n,) int32 token ids of a prompt that is text or ids. Raises RequestError that says what is wrong with it."""
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is an empty string: it must have at least one token")
        return require_tokenizer(tokenizer).encode(prompt)
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise RequestError(f"a prompt must be a str or a list of token ids, not {type(prompt).__name__}")
    if len(prompt) == 0:
        raise RequestError("the prompt is an empty list: it must have at least one token")
    for token_id in prompt:
        if not isinstance(token_id, (int, np.integer)) or isinstance(token_id, bool):
            raise RequestError(f"the prompt holds {shown(token_id)}: token ids are integers")
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token id {shown(int(token_id))} is outside the vocabulary: ids go from 0 to {vocab_size - 1}"
            )
    return np.array(prompt, dtype=np.int32)


def encode_conversation(
    messages: Conversation, tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any]
) -> IntArray:
    """(n,) int32 token ids of a chat, up to where the answer begins. Raises RequestError."""
    return require_tokenizer(tokenizer).encode_chat(messages, **template_kwargs)


def has_chat_template(tokenizer: Tokenizer | None) -> bool:
    """Whether a message can be made a prompt."""
    try:
        encode_conversation([{"role": "user", "content": "?"}], tokenizer, {})
    except RequestError:
        return False
    return True


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or a RequestError if the model came without one."""
    if tokenizer is None:
        raise RequestError("the model has no tokenizer: give token ids instead of text")
    return tokenizer
