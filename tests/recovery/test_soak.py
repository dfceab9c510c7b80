"""20,000 requests of every sort, and ranks that are killed all the while: each request ends exactly once.

The step loop runs in this process, so that its scheduler's invariants can be held at every step, and its memory be
looked at; the ranks are real processes. RAYTP_SOAK_REQUESTS sets another number of requests, RAYTP_SOAK_SEED a seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raytp.config import EngineConfig
from raytp.engine import Engine
from raytp.rank_supply import RankSupply
from raytp.tokenizer import Tokenizer
from raytp.worker_settings import make_worker_config
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from scheduler.step import Step, StepResult
from tests.control_plane.fake_model import check_invariants
from tests.e2e.checkpoints import TRIVIA, questions
from tests.recovery.soak_callers import MAX_MODEL_LEN, VOCAB_SIZE, Callers, make_request
from workers.model_config import load_model_config

NUM_REQUESTS = int(os.environ.get("RAYTP_SOAK_REQUESTS", "20000"))
SEED = int(os.environ.get("RAYTP_SOAK_SEED", "1"))
NUM_KNOWN = 40
KILL_AFTER_S = (4.0, 7.0)
KILL_AFTER_REQUESTS = NUM_REQUESTS // 25
"""Both, since the last ranks came up: on a busy machine the work must get on, too."""
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
    callers = Callers(rig.engine, rng, ask_undisturbed(rig.engine), NUM_REQUESTS)
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
