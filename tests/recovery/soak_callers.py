"""All callers of the soak at once, and what each of their requests may become. Called by `test_soak`."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytp.engine import Engine
from raytp.outputs import CompletionUpdate, Request
from scheduler.sampling_params import ResolvedSampling

NUM_CLIENTS = 8
MAX_OPEN = 600
CHUNK = 100
VOCAB_SIZE = 2048
MAX_MODEL_LEN = 100


@dataclass
class Ask:
    """A request on its way, and what may become of it."""

    request: Request
    allowed: frozenset[str]
    """Finish reasons."""
    expected: list[int] | None = None
    """Its tokens, unless it is aborted."""
    abort_at: int | None = None
    """The turn of the test's loop in which it is aborted."""
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)

    def take(self, update: CompletionUpdate) -> None:
        """News of one completion, which must not have ended."""
        assert update.index not in self.ends, f"news of what has ended: {update}"
        self.token_ids.setdefault(update.index, []).extend(update.token_ids)
        if update.finish_reason is None:
            return
        self.ends[update.index] = update.finish_reason
        assert update.finish_reason in self.allowed, update
        if self.expected is not None and update.finish_reason != "abort":
            assert self.token_ids[update.index] == self.expected

    @property
    def is_over(self) -> bool:
        return len(self.ends) == self.request.sampling.n


def make_request(
    request_id: int, prompt: list[int], *, cache_salt: str = "", is_stream: bool = False, **sampling: Any
) -> Request:
    return Request(
        request_id=request_id,
        prompt=np.array(prompt, dtype=np.int32),
        sampling=ResolvedSampling(**sampling),
        cache_salt=cache_salt,
        wants_every_token=is_stream,
    )


class Callers:
    """All callers at once: they ask, abort, go away, and keep a record of what they are told."""

    def __init__(
        self, engine: Engine, rng: random.Random, known: list[tuple[list[int], list[int]]], num_requests: int
    ) -> None:
        """`known`: prompts, and the tokens that answer them."""
        self._num_requests = num_requests
        self._engine = engine
        self._rng = rng
        self._known = known
        self._clients = [f"client {index}" for index in range(NUM_CLIENTS)]
        self._open: dict[str, dict[int, Ask]] = {client: {} for client in self._clients}
        self._num_asked = 0
        self._turn = 0
        self.num_over = 0
        self.reasons: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    def turn(self) -> None:
        """A round of all callers."""
        self._turn += 1
        while self._num_asked < self._num_requests and self.num_open < MAX_OPEN - CHUNK:
            client = self._rng.choice(self._clients)
            make = self._make_growing if self._num_asked // CHUNK % 10 == 3 else self._make_ask
            asks = [make() for _ in range(min(CHUNK, self._num_requests - self._num_asked))]
            self._open[client] |= {ask.request.request_id: ask for ask in asks}
            self._engine.submit(client, [ask.request for ask in asks])
            if self._rng.random() < 0.08:
                self._go_away(self._rng.randrange(NUM_CLIENTS))
        for client in self._clients:
            self._abort_some(client)
            for update in self._engine.poll(client, 0):
                self._take(client, update)

    def _take(self, client: str, update: CompletionUpdate) -> None:
        ask = self._open[client][update.request_id]  # a KeyError is news of a request that has ended
        ask.take(update)
        if ask.is_over:
            del self._open[client][update.request_id]
            self.num_over += 1
            self.reasons.update(ask.ends.values())

    def _abort_some(self, client: str) -> None:
        for request_id, ask in self._open[client].items():
            if ask.abort_at is not None and ask.abort_at <= self._turn:
                ask.abort_at = None
                index = self._rng.choice([None, *range(ask.request.sampling.n)])
                self._engine.abort(client, request_id, index, "abort")

    def _go_away(self, which: int) -> None:
        """Nobody is to hear of its requests any more; somebody new comes in its place."""
        client = self._clients[which]
        self._engine.forget(client)
        gone = self._open.pop(client)
        self.num_over += len(gone)
        self.reasons["forgotten"] += sum(ask.request.sampling.n for ask in gone.values())
        self._clients[which] = f"client {which} of turn {self._turn}"
        self._open[self._clients[which]] = {}

    def _next_id(self) -> int:
        self._num_asked += 1
        return self._num_asked

    def _make_growing(self) -> Ask:
        """Many of these begin at once, and need their next blocks at once: some are preempted."""
        return Ask(make_request(self._next_id(), [self._rng.randrange(3, 9)], max_tokens=30), frozenset({"length"}))

    def _make_ask(self) -> Ask:
        request_id, rng = self._next_id(), self._rng
        kind = rng.random()
        if kind < 0.08:
            bad = rng.choice([[], [VOCAB_SIZE], [-1, 5], [5] * MAX_MODEL_LEN, [5] * 5000])
            return Ask(make_request(request_id, bad, n=rng.choice([1, 1, 3])), frozenset({"error"}))
        if kind < 0.2:
            prompt, answer = rng.choice(self._known)
            expected = answer[: rng.randint(1, len(answer))]
            request = make_request(request_id, prompt, max_tokens=len(expected), is_stream=rng.random() < 0.5)
            return Ask(request, frozenset({"length"}), expected)
        prompt = [rng.randrange(3, 9) for _ in range(rng.randint(1, 12))]
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 6), "n": rng.choice([1, 1, 1, 1, 2])}
        if kind < 0.25:
            sampling |= {"temperature": 1.0, "seed": rng.randrange(100), "top_k": rng.choice([0, 20])}
        salt = rng.choice(["", "", "a"])
        request = make_request(request_id, prompt, cache_salt=salt, is_stream=rng.random() < 0.2, **sampling)
        if kind > 0.8:
            return Ask(request, frozenset({"length", "abort"}), abort_at=self._turn + rng.randint(0, 30))
        return Ask(request, frozenset({"length"}))
