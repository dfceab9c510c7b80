"""Starts the engine that a plan asks for and measures its workloads in turn. Called by `raytp.cli.bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raytp.bench.floor import Floor, compute_floor, hardware_of
from raytp.bench.measure import Measurement, measure, profile_decode, warm_up
from raytp.bench.plan import Plan
from raytp.bench.record import (
    Record,
    append_records,
    describe_circumstances,
    describe_profiles,
    describe_results,
    read_records,
    seconds_since_process_start,
)
from raytp.bench.workloads import Case, make_steady_decode
from raytp.llm import LLM
from raytp.outputs import EngineInfo

Report = Callable[[str], None]
"""Told what is being done."""


def run(plan: Plan, num_runs: int, *, use_profile: bool, file: Path | None, report: Report) -> list[Record]:
    """Measure, and make a record for each workload; `file` also gets those that precede an interruption.

    Raises RaytpError.
    """
    if file is not None:
        read_records(file)  # better to fail now than after the measurement
    records: list[Record] = []
    try:
        with LLM(plan.path, plan.tensor_parallel_size, **plan.options) as llm:
            startup_s = seconds_since_process_start()
            report(f"{plan.name} is ready after {startup_s:.1f} s")
            warm_up(llm)
            for workload, cases in plan.cases.items():
                results = describe_results(*_measure(llm, workload, cases, num_runs, report))
                records.append(_record(plan, workload, results, startup_s, llm.info))
            if use_profile:  # last, since a profiler that has been loaded may slow down what follows
                report("profiling decode steps")
                profile = describe_profiles(profile_decode(llm, make_steady_decode(llm.model_config.vocab_size)))
                records = [record | profile for record in records]
    finally:
        if file is not None and records:
            append_records(file, records)
    return records


def _measure(
    llm: LLM, workload: str, cases: list[Case], num_runs: int, report: Report
) -> tuple[list[Measurement], list[Floor] | None]:
    measurements = []
    for case in cases:

        def show(run: int, seconds: float, num_prompts: int = len(case.prompts)) -> None:
            report(f"{workload}, {num_prompts} prompts, run {run} of {num_runs}: {seconds:.3f} s")

        measurements.append(measure(llm, case, num_runs, show))
    info = llm.info
    hardware = hardware_of(info.device_names, info.dtype)
    if hardware is None:
        return measurements, None
    floors = [
        compute_floor(
            llm.model_config,
            case,
            hardware=hardware,
            dtype=info.dtype,
            num_ranks=len(info.device_names),
            max_num_seqs=info.max_num_seqs,
        )
        for case in cases
    ]
    return measurements, floors


def _record(plan: Plan, workload: str, results: Record, startup_s: float, info: EngineInfo) -> Record:
    return {
        "workload": workload,
        "model": plan.name,
        "tensor_parallel_size": plan.tensor_parallel_size,
        **results,
        **describe_profiles([]),
        "startup_s": startup_s,
        **describe_circumstances(info),
    }
