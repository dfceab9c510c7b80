"""Finds the sequence that kills the ranks, if there is one.

When the ranks die, each sequence of a step on its way may be the cause. One that is there at two deaths in a row, and
has got no further in between, is put on trial: it runs alone until it has passed the place. If the ranks die during
two trials of one sequence, it is convicted. Deaths that no sequence causes thus cost a few steps, and convict nobody
unless two of them happen during trials of the same. Called by `Scheduler`, which carries out what is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from scheduler.sequence import Sequence


class Verdict(NamedTuple):
    """What a death says about the sequences that were there."""

    was_trial: bool
    """One of them was alone."""
    culprit: Sequence | None = None
    """The one to blame, if that is clear."""


class Suspects:
    """The sequences that were there when the ranks died last, those that must be tried, and the one on trial."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        """Of the sequences on their way at the last death, by seq_id: tokens, those on their way included."""
        self.to_try: deque[Sequence] = deque()
        self.on_trial: Sequence | None = None
        self._incriminated: set[int] = set()
        """Sequences, by seq_id, during whose trial the ranks have died once."""

    def record_death(self, in_flight: Iterable[Sequence]) -> Verdict:
        """The ranks have died with these sequences on their way."""
        there = list(in_flight)
        tried, self.on_trial = self.on_trial, None
        if tried is not None and there == [tried]:
            if tried.seq_id in self._incriminated:
                return Verdict(was_trial=True, culprit=tried)
            self._incriminated.add(tried.seq_id)
            self._lengths[tried.seq_id] = tried.length
            self.to_try.appendleft(tried)
            return Verdict(was_trial=True)
        suspects = [seq for seq in there if seq.num_tokens <= self._lengths.get(seq.seq_id, -1)]
        self._lengths = {seq.seq_id: seq.length for seq in [*there, *self.to_try]}
        if tried is not None and tried not in there:
            suspects.insert(0, tried)
            self._lengths[tried.seq_id] = tried.length
        self.to_try.extendleft(reversed(suspects))
        return Verdict(was_trial=False)

    def excuse(self) -> None:
        """The ranks have died of something that no sequence does: whoever was on trial will be tried again."""
        if self.on_trial is not None:
            self.to_try.appendleft(self.on_trial)
            self.on_trial = None

    def begin_trial(self) -> Sequence | None:
        """The sequence to be tried next, if there is any and none is on trial."""
        if self.on_trial is None and self.to_try:
            self.on_trial = self.to_try.popleft()
            return self.on_trial
        return None

    def acquit(self) -> Sequence | None:
        """The sequence on trial, if it has passed the place of the last death; its trial then is over."""
        tried = self.on_trial
        if tried is None or tried.num_tokens <= self._lengths[tried.seq_id]:
            return None
        self.on_trial = None
        self._incriminated.discard(tried.seq_id)
        return tried

    def discard(self, seq: Sequence) -> bool:
        """The sequence has ended. Whether it was still to be tried."""
        self._incriminated.discard(seq.seq_id)
        if seq is self.on_trial:
            self.on_trial = None
        if seq in self.to_try:
            self.to_try.remove(seq)
            return True
        return False
