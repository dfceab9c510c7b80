"""Engines of a pool that answer from the prompt alone, and that die, recover or dawdle as a test wants it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from raytp.batch_job.rows import Job
from raytp.errors import EngineError
from raytp.outputs import RequestOutput
from tests.batch.stub_engine import output_of


class StubReplica:
    """Runs `rows_at_once` rows, and finishes as many every `delay_s`."""

    model_name = "stub"
    tokenizer = None

    def __init__(self, *, rows_at_once: int = 4, delay_s: float = 0.001, dies_after: int | None = None) -> None:
        self.info: Any = SimpleNamespace(max_num_seqs=rows_at_once, hostnames=("here",), node_ids=("a",))
        self.delay_s = delay_s
        self.dies_after = dies_after
        self.recovering = threading.Event()
        self.is_shut_down = False
        self.asked: list[Any] = []
        """Requests, in the order in which they came."""
        self.done: list[int] = []
        self.most_open = 0
        self._aborted: set[int] = set()

    def complete(self, jobs: Iterable[Job | None]) -> Generator[tuple[int, RequestOutput] | None, None, None]:
        """As `raytp.LLM.complete`."""
        source, open_jobs, is_exhausted = iter(jobs), {}, False
        while open_jobs or not is_exhausted:
            while not is_exhausted:
                job = next(source, "end")
                is_exhausted = job == "end"
                if job is None or job == "end":
                    break
                open_jobs[job[0]] = job[1]
                self.asked.append(job[1])
                self.most_open = max(self.most_open, len(open_jobs))
            for key in [key for key in open_jobs if key in self._aborted]:
                self._aborted.remove(key)
                yield key, aborted(open_jobs.pop(key))
            time.sleep(self.delay_s)
            if self.recovering.is_set() or not open_jobs:
                yield None
                continue
            for key in list(open_jobs)[: self.info.max_num_seqs]:
                if self.dies_after is not None and len(self.done) >= self.dies_after:
                    raise EngineError("the stub died")
                self.done.append(key)
                yield key, output_of(open_jobs.pop(key))

    def abort(self, key: int) -> None:
        """As `raytp.LLM.abort`."""
        self._aborted.add(key)

    def abort_all(self) -> None:
        """As `raytp.LLM.abort_all`."""

    def is_recovering(self) -> bool:
        """As `raytp.LLM.is_recovering`."""
        return self.recovering.is_set()

    def shutdown(self) -> None:
        """As `raytp.LLM.shutdown`."""
        self.is_shut_down = True


def aborted(request: Any) -> RequestOutput:
    """What comes of a row that was taken back."""
    whole = output_of(request)
    return replace(whole, outputs=[replace(whole.outputs[0], finish_reason="abort")])
