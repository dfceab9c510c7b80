"""The rows of a run on Ray: prompts for its requests, when they are there, and what has become of each.

Random token ids stand for what nobody has written; they agree where requests have a prefix in common. Each row ends
exactly once, or that is an error. Called by `raytp.experiment.real`. Knows nothing of Ray.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from raytp.batch_job.rows import Job
from raytp.errors import EngineError
from raytp.outputs import RequestOutput
from raytp.simulator.requests import SimulatedRequest
from raytp.simulator.results import RequestTimes
from scheduler.sampling_params import SamplingParams


class Rows:
    """All rows of one run, by arrival. Times are in seconds since the run began."""

    def __init__(
        self, requests: Sequence[SimulatedRequest], seed: int, vocab_size: int, clock: Callable[[], float]
    ) -> None:
        """`clock` says how long the run has lasted."""
        self.times = [RequestTimes(arrival_s=one.arrival_s, output_tokens=one.output_tokens) for one in requests]
        self.num_finished = 0
        self._requests = requests
        self._arrivals_s = [one.arrival_s for one in requests]
        self._num_at_once = bisect_right(self._arrivals_s, 0.0)
        self._seed = seed
        self._vocab_size = vocab_size
        self._clock = clock
        self._num_read = 0

    def jobs(self) -> Iterator[Job | None]:
        """Each row once it is there; None while the next one is not."""
        for index, request in enumerate(self._requests):
            while request.arrival_s > self._clock():
                yield None
            self._num_read = index + 1
            sampling = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
            yield index, self.prompt(index), sampling

    def num_unread(self) -> int:
        """Rows that are there, and that `jobs` has not given yet."""
        return bisect_right(self._arrivals_s, self._clock()) - self._num_read

    def num_arrived(self) -> int:
        """Rows that have come. What is there from the beginning tells nothing of a rate, and does not count."""
        return bisect_right(self._arrivals_s, self._clock()) - self._num_at_once

    def prompt(self, index: int) -> list[int]:
        """Token ids; the same for the same row, seed and vocabulary, always."""
        request = self._requests[index]
        prefix = self._draw(f"prefix {request.prefix_id}", request.prefix_tokens)
        return prefix + self._draw(f"row {index}", request.prompt_tokens - request.prefix_tokens)

    def finish(self, index: int, output: RequestOutput) -> None:
        """A row came back, now. Raises EngineError if it has before."""
        times = self.times[index]
        if times.finish_s is not None:
            raise EngineError(f"row {index} was answered twice; this is a bug in raytp")
        times.finish_s = now_s = self._clock()
        since_first_s = output.timings.finished_s - output.timings.first_token_s
        times.first_token_s = max(times.arrival_s, now_s - since_first_s)
        times.output_tokens = len(output.token_ids)
        if output.finish_reason in ("error", "abort"):
            times.error = output.error or f"the row ended with {output.finish_reason}"
        self.num_finished += 1

    def check_all_finished(self) -> None:
        """Raises EngineError if a row has not ended."""
        lost = [index for index, times in enumerate(self.times) if times.finish_s is None]
        if lost:
            raise EngineError(f"{len(lost)} rows were lost, row {lost[0]} the first; this is a bug in raytp")

    def tokens_by(self, moments: Sequence[float]) -> list[float]:
        """Output tokens that had been made by each moment, if each row's came evenly between its first and its last."""
        ended = [times for times in self.times if times.finish_s is not None and times.first_token_s is not None]
        counts = np.array([times.output_tokens for times in ended], dtype=np.float64)
        first_s = np.array([times.first_token_s for times in ended], dtype=np.float64)
        length_s = np.maximum(np.array([times.finish_s for times in ended], dtype=np.float64) - first_s, 1e-9)
        return [float(np.sum(counts * np.clip((moment - first_s) / length_s, 0.0, 1.0))) for moment in moments]

    def _draw(self, what: str, num_tokens: int) -> list[int]:
        return random.Random(f"{self._seed} {what}".encode("utf-8", "surrogatepass")).choices(
            range(self._vocab_size), k=num_tokens
        )
