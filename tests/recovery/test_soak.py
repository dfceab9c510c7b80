"""20,000 requests of every sort, and ranks that are killed all the while: each request ends exactly once.

The step loop runs in this process, so that its scheduler's invariants can be held at every step, and its memory be
looked at; the ranks are real processes. RAYTP_SOAK_REQUESTS sets another number of requests, RAYTP_SOAK_SEED a seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytp.config import EngineConfig
from raytp.engine import Engine
from raytp.outputs import CompletionUpdate, Request
from raytp.rank_supply import RankSupply
from raytp.tokenizer import Tokenizer
from raytp.worker_settings import make_worker_config
from scheduler.config import SchedulerConfig
from scheduler.sampling_params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.step import Step, StepResult
from tests.control_plane.fake_model import check_invariants
from tests.e2e.checkpoints import TRIVIA, questions
from workers.model_config import load_model_config

NUM_REQUESTS = int(os.environ.get("RAYTP_SOAK_REQUESTS", "20000"))
SEED = int(os.environ.get("RAYTP_SOAK_SEED", "1"))
NUM_CLIENTS = 8
NUM_KNOWN = 40
MAX_OPEN = 600
CHUNK = 100
KILL_AFTER_S = (4.0, 7.0)
KILL_AFTER_REQUESTS = NUM_REQUESTS // 25
"""Both, since the last ranks came up: on a busy machine the work must get on, too."""
VOCAB_SIZE = 2048
MAX_MODEL_LEN = 100
BLOCK_SIZE = 8
NUM_BLOCKS = 120
MEMORY_SLACK = 32 * 2**20
FD_SLACK = 10
STALLED_S = 120.0
"""Without an end of any request: ranks take a few seconds to be replaced."""


class CheckedScheduler(Scheduler):
    """Its invariants hold after everything that the step loop has it do; else the engine ends, and says so."""

    def schedule(self) -> Step | None:
        step = super().schedule()
        check_invariants(self)
        return step

    def postprocess(self, result: StepResult) -> None:
        super().postprocess(result)
        check_invariants(self)

    def lose_ranks(self, report: str, *, is_accident: bool = False) -> bool:
        verdict = super().lose_ranks(report, is_accident=is_accident)
        check_invariants(self)
        return verdict


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


class Rig:
    """An engine in this process, on two ranks in theirs."""

    def __init__(self) -> None:
        config = EngineConfig(
            tensor_parallel_size=2,
            device="cpu",
            block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=128,
            max_restarts=20,
        )
        worker_config = make_worker_config(config, load_model_config(TRIVIA), TRIVIA, VOCAB_SIZE)
        self.supply = RankSupply(config, worker_config, on_status=lambda *_: None)
        transport, reports = self.supply.start()
        assert [report.num_kv_blocks for report in reports] == [NUM_BLOCKS] * 2
        limits = SchedulerConfig(
            num_kv_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=worker_config.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            enable_prefix_caching=True,
        )
        self.engine = Engine(CheckedScheduler(limits), transport, self.supply, max_restarts=config.max_restarts)

    def close(self) -> None:
        self.engine.close()
        self.supply.close()


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

    def __init__(self, engine: Engine, rng: random.Random, known: list[tuple[list[int], list[int]]]) -> None:
        """`known`: prompts, and the tokens that answer them."""
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
        while self._num_asked < NUM_REQUESTS and self.num_open < MAX_OPEN - CHUNK:
            client = self._rng.choice(self._clients)
            make = self._make_growing if self._num_asked // CHUNK % 10 == 3 else self._make_ask
            asks = [make() for _ in range(min(CHUNK, NUM_REQUESTS - self._num_asked))]
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


@dataclass(frozen=True)
class Footprint:
    """What this process holds."""

    num_over: int
    memory: int
    num_fds: int

    @classmethod
    def now(cls, num_over: int) -> Footprint:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(num_over, num_pages * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/fd")))


def soak(rig: Rig, callers: Callers, rng: random.Random) -> list[Footprint]:
    """Until all is over; what was held each time that ranks had been replaced."""
    footprints = [Footprint.now(0)]
    num_kills = 0
    last_over, stalled_at = 0, time.monotonic() + STALLED_S
    kill_at, kill_after = time.monotonic() + rng.uniform(*KILL_AFTER_S), KILL_AFTER_REQUESTS
    while callers.num_over < NUM_REQUESTS:
        callers.turn()
        now = time.monotonic()
        if callers.num_over > last_over:
            last_over, stalled_at = callers.num_over, now + STALLED_S
        assert now < stalled_at, f"nothing ends any more: {callers.num_open} open, {rig.engine.stats()}"
        if len(footprints) <= num_kills and len(rig.supply.recoveries) == num_kills:
            footprints.append(Footprint.now(callers.num_over))
            kill_at, kill_after = now + rng.uniform(*KILL_AFTER_S), callers.num_over + KILL_AFTER_REQUESTS
        elif len(footprints) > num_kills and now > kill_at and callers.num_over > kill_after:
            os.kill(rng.choice(rig.supply.group.nodes).pid, signal.SIGKILL)
            num_kills += 1
        time.sleep(0.005)
    return footprints


@pytest.fixture
def rig(ray_session: None) -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def ask_undisturbed(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Questions that the model knows, as token ids, and its answers; too sure of itself to change its mind."""
    tokenizer = Tokenizer.load(TRIVIA)
    shortest = sorted(questions(), key=lambda pair: len(pair[0]))[:NUM_KNOWN]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]).tolist() for question, _ in shortest]
    stop_ids = {"stop_token_ids": (2,), "max_tokens": 30}
    engine.submit("first", [make_request(index, prompt, **stop_ids) for index, prompt in enumerate(prompts)])
    answers: dict[int, list[int]] = {}
    while len(answers) < len(prompts):
        answers |= {update.request_id: update.token_ids[:-1] for update in engine.poll("first", 10)}
    for index, (_, answer) in enumerate(shortest):
        assert answer.startswith(tokenizer.decode(answers[index]))
    return [(prompt, answers[index]) for index, prompt in enumerate(prompts)]


@pytest.mark.timeout(60 + NUM_REQUESTS // 50)
def test_every_request_ends_once_while_ranks_are_killed_every_few_seconds(rig: Rig) -> None:
    print(f"RAYTP_SOAK_SEED={SEED}")
    rng = random.Random(SEED)
    callers = Callers(rig.engine, rng, ask_undisturbed(rig.engine))
    start = time.monotonic()
    footprints = soak(rig, callers, rng)
    took = time.monotonic() - start
    stats = rig.engine.stats()
    print(f"{took:.0f} s, {len(footprints) - 1} kills, {dict(callers.reasons)}, {stats}")
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, NUM_BLOCKS)
    assert not rig.engine._completions
    assert set(callers.reasons) == {"length", "abort", "error", "forgotten"}
    assert min(callers.reasons.values()) > NUM_REQUESTS / 200
    assert stats.num_preemptions > NUM_REQUESTS / 200
    assert len(footprints) >= 5
    middle, last = footprints[len(footprints) // 2], footprints[-1]
    print(middle, last)
    assert last.num_fds <= middle.num_fds + FD_SLACK
    assert last.memory <= middle.memory + MEMORY_SLACK
