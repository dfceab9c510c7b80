"""Runs cases on an engine and takes the time. Called by `raytp.bench.run`; the next hop is `raytp.llm`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from raytp.bench.workloads import Case
from raytp.errors import RequestError
from raytp.llm import LLM
from scheduler.sampling_params import SamplingParams
from workers.config import DeviceProfile

_PROFILE_S = 0.5
_TOKENS_BEFORE_PROFILE = 50
"""Of each sequence: by then nothing is left of the prompts' steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All runs of one case."""

    case: Case
    seconds: list[float]
    """Of each run, from handing the prompts over until every answer is back."""
    num_steps: int
    """Of all runs together, as are the other counts."""
    driver_cpu_s: float
    """CPU time of the step loop."""
    num_cached_tokens: int
    num_preemptions: int


def warm_up(llm: LLM) -> None:
    """One small request, so that no run pays for what happens only once."""
    _generate(llm, Case(prompts=[[1, 2, 3, 4]], output_lens=[16]))


def measure(llm: LLM, case: Case, num_runs: int, on_run: Callable[[int, float], None]) -> Measurement:
    """Run a case; `on_run` is told each run's number and seconds. Raises RequestError if the engine cannot serve it."""
    stats_before, cpu_before = llm.stats(), llm.step_loop_cpu_s()
    seconds = []
    for run in range(num_runs):
        seconds.append(_generate(llm, case))
        on_run(run + 1, seconds[-1])
    stats = llm.stats()
    return Measurement(
        case=case,
        seconds=seconds,
        num_steps=stats.num_steps - stats_before.num_steps,
        driver_cpu_s=llm.step_loop_cpu_s() - cpu_before,
        num_cached_tokens=stats.num_cached_tokens - stats_before.num_cached_tokens,
        num_preemptions=stats.num_preemptions - stats_before.num_preemptions,
    )


def profile_decode(llm: LLM, case: Case) -> list[DeviceProfile]:
    """What the GPU of each rank does in the midst of a case's decode steps; empty on CPUs."""
    if None in llm.profile(0.0):  # also loads the profiler, which takes a moment
        return []
    num_computed_before = llm.stats().num_computed_tokens
    num_wanted = case.num_prompt_tokens + _TOKENS_BEFORE_PROFILE * len(case.prompts)
    with ThreadPoolExecutor(max_workers=1) as executor:
        generating: Future[float] = executor.submit(_generate, llm, case)
        while llm.stats().num_computed_tokens - num_computed_before < num_wanted and not generating.done():
            time.sleep(0.02)
        profiles = llm.profile(_PROFILE_S)
        generating.result()
    return [profile for profile in profiles if profile is not None]


def _generate(llm: LLM, case: Case) -> float:
    """Seconds that a run of the case takes. Its own salt keeps it from what earlier runs have left in the cache."""
    params = [_plain_sampling(length) for length in case.output_lens]
    start = time.perf_counter()
    outputs = llm.generate(case.prompts, params, cache_salt=uuid.uuid4().hex)
    seconds = time.perf_counter() - start
    for output, length in zip(outputs, case.output_lens, strict=True):
        if output.error is not None or len(output.token_ids) != length:
            reason = output.error or f"it ended after {len(output.token_ids)} of {length} tokens"
            raise RequestError(f"a prompt of {output.num_prompt_tokens} tokens could not be measured: {reason}")
    return seconds


def _plain_sampling(num_tokens: int) -> SamplingParams:
    """The same whatever a checkpoint's generation_config says."""
    return SamplingParams(
        temperature=0.6,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        ignore_eos=True,
        max_tokens=num_tokens,
    )
