"""What a job remembers of each row: whether it is done, and its id, in next to no memory. Called by `raytp.batch_job`.

A million rows are 125 KB of bitmap; their ids lie in a scratch file that SQLite deletes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

_CACHE_KIB = 2048


class OrdinalSet:
    """A set of ordinals: a bitmap that grows."""

    def __init__(self) -> None:
        self._bits = np.zeros(1024, dtype=np.uint8)

    def add_range(self, first: int, last: int) -> None:
        """Add `first` to `last`, both included; none of them may be in it already."""
        while last // 8 >= len(self._bits):
            self._bits = np.concatenate([self._bits, np.zeros_like(self._bits)])
        ordinals = np.arange(first, last + 1)
        np.bitwise_or.at(self._bits, ordinals // 8, (1 << (ordinals % 8)).astype(np.uint8))

    def __contains__(self, ordinal: int) -> bool:
        return ordinal // 8 < len(self._bits) and bool(self._bits[ordinal // 8] >> (ordinal % 8) & 1)


class IdSet:
    """The ids seen so far, as 128-bit digests: no two of them are taken for one another."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)  # "" is a private file, gone when it is closed
        for statement in (
            "PRAGMA journal_mode=OFF",
            "PRAGMA synchronous=OFF",
            f"PRAGMA cache_size=-{_CACHE_KIB}",
            "CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID",
            "BEGIN",
        ):
            self._database.execute(statement)

    def add(self, row_id: str) -> bool:
        """Whether it is new."""
        digest = xxhash.xxh3_128_digest(row_id.encode("utf-8", "surrogatepass"))
        return self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        """Delete the scratch file."""
        self._database.close()


def pack_ranges(ordinals: Iterable[int]) -> str:
    """`3-5 9` for 3, 4, 5 and 9, in any order."""
    ranges: list[list[int]] = []
    for ordinal in sorted(ordinals):
        if ranges and ranges[-1][1] == ordinal - 1:
            ranges[-1][1] = ordinal
        else:
            ranges.append([ordinal, ordinal])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def unpack_ranges(text: str) -> Iterator[tuple[int, int]]:
    """(first, last) of each range of `pack_ranges`."""
    for part in text.split():
        first, _, last = part.partition("-")
        yield int(first), int(last or first)
