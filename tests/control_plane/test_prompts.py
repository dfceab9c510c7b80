"""Prompts as callers write them: what is one, what is many, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raytp.prompts import as_conversation_list, as_prompt_list, encode_conversation, encode_prompt
from scheduler.errors import RequestError

MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("text", 1),
        ("", 1),
        ([1, 2, 3], 1),
        ((1, 2, 3), 1),
        (np.array([1, 2, 3]), 1),
        ([np.int64(1), 2], 1),
        (["a", "b"], 2),
        (["a", [1, 2]], 2),
        ([[1, 2], [3]], 2),
        (np.array([[1, 2], [3, 4], [5, 6]]), 3),
        ([np.array([1, 2]), np.array([3])], 2),
        pytest.param(iter(["a", "b"]), 2, id="iterator"),
        ([[]], 1),
        ([], 0),
        ([1, "a"], 2),
    ],
    ids=repr,
)
def test_one_prompt_or_many(prompts: Any, count: int) -> None:
    assert len(as_prompt_list(prompts)) == count


@pytest.mark.parametrize("prompts", [None, 5, b"bytes", {"prompt": "a"}, 1.5], ids=repr)
def test_what_is_no_prompt_is_refused_as_one(prompts: Any) -> None:
    (prompt,) = as_prompt_list(prompts)
    with pytest.raises(RequestError, match=f"must be a str or a list of token ids, not {type(prompts).__name__}"):
        encode_prompt(prompt, None, vocab_size=10)


@pytest.mark.parametrize(
    "prompt",
    [[1, 0, 9], (1, 0, 9), np.array([1, 0, 9]), np.array([1, 0, 9], dtype=np.uint8), [np.int32(1), 0, 9]],
    ids=repr,
)
def test_token_ids_come_out_as_int32(prompt: Any) -> None:
    ids = encode_prompt(prompt, None, vocab_size=10)
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 0, 9]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty string"),
        ([], "empty list"),
        (np.array([], dtype=np.int32), "empty list"),
        ([10], "token id 10 is outside the vocabulary: ids go from 0 to 9"),
        ([0, -1], "token id -1 is outside the vocabulary: ids go from 0 to 9"),
        ([2**70], f"token id {2**70} is outside"),
        (np.array([2**40]), f"token id {2**40} is outside"),
        ([1, 2.0], "holds 2.0: token ids are integers"),
        ([1, "2"], "holds '2': token ids are integers"),
        ([True, 1], "holds True: token ids are integers"),
        (np.array([1.5]), "holds 1.5: token ids are integers"),
        (np.array([[1, 2]]), r"holds \[1, 2\]: token ids are integers"),
        (np.array(3), "must be a str or a list of token ids, not int"),
        ([None], "holds None: token ids are integers"),
        ("text", "no tokenizer: give token ids"),
    ],
    ids=repr,
)
def test_a_bad_prompt_is_refused_by_name(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encode_prompt(prompt, None, vocab_size=10)


@pytest.mark.parametrize(
    ("messages", "count"),
    [([MESSAGE], 1), ((MESSAGE, MESSAGE), 1), ([[MESSAGE], [MESSAGE]], 2), ([], 0), (MESSAGE, 1), ("hi", 1), (None, 1)],
    ids=repr,
)
def test_one_conversation_or_many(messages: Any, count: int) -> None:
    assert len(as_conversation_list(messages)) == count


def test_a_chat_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        encode_conversation([MESSAGE], None, {})
