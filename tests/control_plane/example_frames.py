"""A step, bytes whose digest is right, equality of every field. Called by the tests of frames and of connections."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import xxhash

from scheduler.step import SlotSampling, Step


def assert_same(left: Any, right: Any) -> None:
    """Equal in every field, arrays in type and shape as well."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert (left == right).all()
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif hasattr(left, "__dataclass_fields__"):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    else:
        assert left == right


def sealed(payload: Any, pack: Any = msgpack.packb) -> bytes:
    """Bytes whose digest is right, whatever they hold."""
    data: bytes = pack(payload)
    return xxhash.xxh3_64_digest(data) + data


def a_step(num_tokens: int = 3) -> Step:
    empty = np.empty(0, dtype=np.int32)
    return Step(
        step_id=0,
        slots=np.array([1], dtype=np.int32),
        num_scheduled_tokens=np.array([num_tokens], dtype=np.int32),
        seq_lens=np.array([num_tokens], dtype=np.int32),
        samples=np.array([1], dtype=np.int32),
        token_ids=np.arange(num_tokens, dtype=np.int32),
        block_slots=empty,
        block_starts=empty,
        block_counts=empty,
        block_ids=empty,
        new_slots=(
            SlotSampling(
                slot=1,
                num_prompt_tokens=num_tokens,
                temperature=0.5,
                top_k=3,
                top_p=0.9,
                min_p=0.0,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                seed=2**63 - 1,
                min_tokens=0,
                logprobs=-1,
                stop_token_ids=empty,
                history=empty,
            ),
        ),
    )
