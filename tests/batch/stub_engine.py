"""An engine that answers at once, from the prompt alone: what the machinery of a batch job is tested and timed with."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Generator, Iterable
from typing import Any

from raytp.batch_job.rows import Job
from raytp.outputs import CompletionOutput, RequestOutput


def answer_to(request: Any) -> str:
    """What the engine says to a prompt or to messages."""
    return f"answer {zlib.crc32(repr(request).encode('utf-8', 'surrogatepass')):08x}"


class StubEngine:
    """Answers in an order of its own. A prompt that holds "too long" fails."""

    model_name = "stub"
    tokenizer = None

    def __init__(self, seed: int = 0, window: int = 64, delay_s: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._window = window
        self._delay_s = delay_s
        self.asked: list[int] = []
        """The keys of all jobs, if `remembers`."""
        self.remembers = True
        self.max_lead = 0
        """The most that the newest job was ahead of the oldest unanswered one."""

    def complete(self, jobs: Iterable[Job | None]) -> Generator[tuple[int, RequestOutput] | None, None, None]:
        """As `raytp.LLM.complete`."""
        source, waiting, is_exhausted = iter(jobs), [], False
        while waiting or not is_exhausted:
            while len(waiting) < self._window and not is_exhausted:
                job = next(source, "end")
                if job == "end":
                    is_exhausted = True
                elif job is None:
                    break
                else:
                    waiting.append(job)
                    if self.remembers:
                        self.asked.append(job[0])
                        self.max_lead = max(self.max_lead, job[0] - min(each[0] for each in waiting))
            if not waiting:
                yield None
                continue
            if self._delay_s:
                time.sleep(self._delay_s)
            key, request, _ = waiting.pop(self._random.randrange(len(waiting)))
            yield key, output_of(request)


def output_of(request: Any) -> RequestOutput:
    """The whole answer."""
    is_bad = "too long" in repr(request)
    completion = CompletionOutput(
        index=0,
        text="" if is_bad else answer_to(request),
        token_ids=[] if is_bad else [1, 2, 3],
        finish_reason="error" if is_bad else "stop",
        error="the prompt has 900 tokens, over the limit of 512" if is_bad else None,
    )
    return RequestOutput(prompt=None, prompt_token_ids=[1, 2], num_cached_tokens=1, outputs=[completion])
