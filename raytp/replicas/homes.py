"""Which replica has seen the beginning of a prompt, and so may have it in its prefix cache. Called by `backlog`.

A guess by the text alone: tokens and caches are far away, in the engines.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

_SIZES = tuple(64 << power for power in range(8))
"""Bytes of the beginnings that are remembered: 64 are a block of 16 tokens, 8,192 some 2,000 tokens."""
_MAX_REMEMBERED = 200_000
_MIN_SHARE = 0.25
"""What a replica has seen counts if it is so much of the prompt, or a prompt's first words would decide."""
Home = TypeVar("Home")


def beginnings(request: Any) -> tuple[list[int], int]:
    """(hashes of the request's first 64, 128, ... bytes, bytes of the request up to the largest of them)"""
    data = _as_bytes(request)
    hashing, start, hashes = xxhash.xxh64(), 0, []
    for size in _SIZES:
        if size > len(data):
            break
        hashing.update(data[start:size])
        hashes.append(hashing.intdigest())
        start = size
    return hashes, min(len(data), _SIZES[-1])


class Homes(Generic[Home]):
    """Remembers who was given which beginnings, the latest ones."""

    def __init__(self, min_share: float = _MIN_SHARE) -> None:
        """`min_share`: of a prompt that must have been seen; above 1, no prompt has a home."""
        self._min_share = min_share
        self._homes: OrderedDict[int, Home] = OrderedDict()

    def find(self, hashes: Sequence[int], num_bytes: int) -> Home | None:
        """Who was given the longest of these beginnings; None if nobody was given enough of it."""
        for size, each in sorted(zip(_SIZES, hashes, strict=False), reverse=True):
            if size < self._min_share * num_bytes:
                return None
            if each in self._homes:
                return self._homes[each]
        return None

    def settle(self, hashes: Sequence[int], home: Home) -> None:
        """`home` is given a prompt that begins so."""
        for each in hashes:
            self._homes[each] = home
            self._homes.move_to_end(each)
        while len(self._homes) > _MAX_REMEMBERED:
            self._homes.popitem(last=False)


def _as_bytes(request: Any) -> bytes:
    if isinstance(request, str):
        return request[: _SIZES[-1]].encode("utf-8", "surrogatepass")
    if request and isinstance(request[0], dict):
        return json.dumps(request, default=str)[: 2 * _SIZES[-1]].encode()
    try:
        return np.asarray(request[: _SIZES[-1] // 4], dtype=np.int32).tobytes()
    except (OverflowError, TypeError, ValueError):  # it is no prompt, as the engine will say
        return b""
