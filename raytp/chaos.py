"""Faults by seed in an engine at work: whether every request is answered, and with the tokens of an undisturbed run.

Plans the faults, runs the same requests without and with them, and compares. Called by `raytp.cli.chaos`; starts
engines by `raytp.connection`, and looks at them only through `raytp.llm`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from raytp.config import EngineConfig, make_engine_config
from raytp.connection import start_engine
from raytp.errors import ConfigError
from raytp.llm import LLM
from raytp.outputs import ProgressCallback, Recovery, RequestOutput
from scheduler.errors import shown
from scheduler.sampling_params import SamplingParams
from workers.faults import KINDS, Fault

_RUNNING = {
    "kill": ("decode",),
    "exit": ("decode",),
    "stop": ("decode",),
    "raise": ("decode",),
    "delay": ("prefill", "decode"),
    "corrupt": ("frame",),
}
"""Where each kind may happen once the engine has answered something."""
STARTING = ("rendezvous", "loading", "warm-up")
"""And where, to ranks that take the place of others: what kills a process."""
_NTH = {"decode": (8, 16), "frame": (10, 18)}
"""Between two faults each request must get further, else it is suspected to be their cause; other points: the first."""
_NUM_TOKENS = 32
"""Of each answer: more steps than any fault waits for."""
_PROMPT_LENGTHS = (4, 40)
_DELAY_S = 1.0
_HEARTBEAT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOutcome:
    """What came of one fault."""

    fault: Fault
    noticed_s: float | None = None
    """From the first request on; None if it was not noticed, as a delay is not."""
    rebuild_s: float | None = None
    """From then until new ranks were ready."""
    report: str = ""
    """What the engine found out."""

    @property
    def is_as_planned(self) -> bool:
        """Whether it was noticed if it is one that ends ranks; that a delay has happened nobody can tell."""
        return self.noticed_s is not None or self.fault.kind == "delay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """What came of all of them."""

    outcomes: tuple[FaultOutcome, ...]
    num_requests: int
    num_lost: int
    """Requests that ended with an error, or not at all."""
    num_changed: int
    """Requests that were answered, with other tokens than without the faults."""
    undisturbed_s: float
    """How long all requests took without faults."""
    disturbed_s: float
    """And with them."""

    @property
    def is_ok(self) -> bool:
        """Whether nothing was lost or changed, and every fault happened."""
        return not self.num_lost and not self.num_changed and all(each.is_as_planned for each in self.outcomes)


def plan_faults(seed: int, num_faults: int, num_ranks: int, kinds: tuple[str, ...] = KINDS) -> tuple[Fault, ...]:
    """Faults one after another, each in the ranks that the one before has left. Raises ConfigError.

    Only the first may be at a prompt. Later ones wait until every request has got further, since one that is there at
    two deaths in a row is, rightly, taken for their cause (`scheduler.suspects`).
    """
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ConfigError(f"kinds={shown(kinds)} must name kinds of faults, among {', '.join(KINDS)}")
    rng = random.Random(seed)
    faults: list[Fault] = []
    epoch = 0
    for _ in range(num_faults):
        kind = rng.choice(kinds)
        points = _RUNNING[kind]
        if kind in ("kill", "exit"):
            points += STARTING if epoch else ("prefill",)
        point = rng.choice(points)
        nth = rng.randint(*_NTH.get(point, (1, 1)))
        faults.append(
            Fault(kind=kind, rank=rng.randrange(num_ranks), point=point, nth=nth, epoch=epoch, seconds=_DELAY_S)
        )
        epoch += kind != "delay"
    return tuple(faults)


def run_chaos(
    model: str | os.PathLike[str] | None,
    tensor_parallel_size: int,
    faults: tuple[Fault, ...],
    *,
    seed: int,
    num_requests: int,
    on_progress: ProgressCallback,
    **options: Any,
) -> ChaosReport:
    """Run the requests twice, each time on an engine of their own. `options`: settings of both, as of `LLM`.

    Raises RaytpError if an engine cannot start, or ends for good.
    """
    num_waves = len(faults) + 1  # each fault finds an engine that works
    if num_requests < num_waves:
        raise ConfigError(f"num_requests={shown(num_requests)} must be at least {num_waves} for {len(faults)} faults")
    settings = {
        "dtype": "float32",  # in which what is computed again in other company differs too little to matter
        "heartbeat_timeout_s": _HEARTBEAT_TIMEOUT_S,
        "max_restarts": len(faults) + 5,
    } | options
    config = make_engine_config(tensor_parallel_size, settings)
    with _start(model, config, on_progress) as llm:
        prompts = _make_prompts(seed, num_requests, llm.model_config.vocab_size)
        start = time.monotonic()
        expected = _answer(llm, prompts, num_waves, lambda num: on_progress("without faults", num / num_requests))
        undisturbed_s = time.monotonic() - start
    with _start(model, replace(config, faults=faults), on_progress) as llm:
        start, started_at = time.monotonic(), time.time()

        def report(num_done: int) -> None:
            num_times = len(llm.recoveries())
            text = f"with faults, ranks replaced {num_times} time{'' if num_times == 1 else 's'}"
            on_progress(text, num_done / num_requests)

        outputs = _answer(llm, prompts, num_waves, report)
        disturbed_s = time.monotonic() - start
        recoveries = llm.recoveries()
    both = [(expected.get(index), outputs.get(index)) for index in range(num_requests)]
    return ChaosReport(
        outcomes=tuple(_outcome(fault, recoveries, started_at) for fault in faults),
        num_requests=num_requests,
        num_lost=sum(_is_lost(output) for _, output in both),
        num_changed=sum(not _is_lost(after) and _tokens(before) != _tokens(after) for before, after in both),
        undisturbed_s=undisturbed_s,
        disturbed_s=disturbed_s,
    )


def _start(model: str | os.PathLike[str] | None, config: EngineConfig, on_progress: ProgressCallback) -> LLM:
    return LLM.of(start_engine(model, config, on_progress), show_progress=False)


def _make_prompts(seed: int, num_prompts: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(*_PROMPT_LENGTHS))] for _ in range(num_prompts)]


def _answer(
    llm: LLM, prompts: list[list[int]], num_waves: int, on_progress: Callable[[int], None]
) -> dict[int, RequestOutput]:
    """Greedy answers, by the index of the prompt; a wave is sent when the one before has ended."""
    sampling = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    outputs: dict[int, RequestOutput] = {}

    def jobs(wave: int) -> Iterator[tuple[int, list[int], SamplingParams]]:
        for index in range(wave, len(prompts), num_waves):
            yield index, prompts[index], sampling

    for wave in range(num_waves):
        for item in llm.complete(jobs(wave)):
            if item is not None:
                outputs[item[0]] = item[1]
            if item is None or len(outputs) == len(prompts):
                on_progress(len(outputs))
        on_progress(len(outputs))
    return outputs


def _is_lost(output: RequestOutput | None) -> bool:
    return output is None or output.finish_reason != "length"


def _tokens(output: RequestOutput | None) -> list[int] | None:
    return None if output is None else output.token_ids


def _outcome(fault: Fault, recoveries: list[Recovery], started_at: float) -> FaultOutcome:
    """A fault of ranks that were starting belongs to the recovery that they were part of."""
    after = [recovery for recovery in recoveries if recovery.epoch > fault.epoch]
    if fault.kind == "delay" or not after:
        return FaultOutcome(fault=fault)
    recovery = min(after, key=lambda each: each.epoch)
    told = "\n".join([recovery.report, *(cause for _, cause in recovery.failed_starts)])
    if f"rank {fault.rank} " not in told:  # others have died
        return FaultOutcome(fault=fault)
    return FaultOutcome(
        fault=fault,
        noticed_s=recovery.noticed_at - started_at,
        rebuild_s=recovery.rebuild_s,
        report=recovery.report,
    )
