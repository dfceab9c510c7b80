"""Ranks die, stop, raise and receive rubbish while they work: callers see a pause, and the same tokens as ever."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table

from raytp import LLM, RequestOutput, SamplingParams
from raytp.autopsy import find_processes, kill_processes
from raytp.errors import EngineError
from workers.faults import Fault

TRIVIA = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
PROMPTS = [f"The story of {name} begins" for name in ("a cat", "the sea", "one king", "two kings", "rain", "bread")]
SAMPLING = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=50, ignore_eos=True) for i in range(6)]

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

pytestmark = [pytest.mark.usefixtures("ray_session")]


def faults(*specs: tuple[str, int, str, int]) -> tuple[Fault, ...]:
    """(kind, rank, point, nth), one an epoch."""
    return tuple(
        Fault(kind=kind, rank=rank, point=point, nth=nth, epoch=epoch)
        for epoch, (kind, rank, point, nth) in enumerate(specs)
    )


_others: set[int] = set()
"""Ranks of engines that other tests of the session keep."""


@pytest.fixture(autouse=True)
def note_others(ray_session: None) -> None:
    """Before a test starts engines of its own."""
    _others.clear()
    _others.update(rank_pids())


def rank_pids() -> list[int]:
    """Of the rank actors that live, this test's."""
    alive = {a["Pid"] for a in actors().values() if a["ActorClassName"] == "RankActor" and a["State"] == "ALIVE"}
    return sorted(alive - _others)


def placement_groups() -> set[str]:
    """Those that have not been given back."""
    return {group_id for group_id, group in placement_group_table().items() if group["state"] != "REMOVED"}


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


@functools.cache
def undisturbed(model: Path | None) -> list[list[int]]:
    """What a model, SmolLM2 if it is None, answers on two ranks that nothing happens to."""
    with LLM(model, 2, device="cpu") as llm:
        return ids(llm.generate(PROMPTS, SAMPLING))


KILLED = faults(
    ("kill", 0, "prefill", 1),
    ("kill", 1, "decode", 12),
    ("kill", 0, "rendezvous", 1),
    ("kill", 0, "loading", 1),
    ("kill", 1, "warm-up", 1),
    ("exit", 0, "decode", 12),
    ("kill", 1, "rendezvous", 1),
    ("kill", 1, "loading", 1),
    ("kill", 0, "warm-up", 1),
    ("kill", 1, "prefill", 1),  # the second death in a row at one place: everybody is tried alone, and acquitted
)
OTHERWISE = faults(
    ("stop", 1, "decode", 5),
    ("raise", 0, "decode", 5),
    ("raise", 1, "decode", 9),
    ("corrupt", 0, "frame", 9),
    ("corrupt", 1, "frame", 7),
    ("stop", 0, "decode", 5),
)
ONE_OF_EACH_KIND = faults(
    ("kill", 1, "decode", 12),
    ("stop", 0, "decode", 5),
    ("raise", 1, "decode", 9),
    ("corrupt", 0, "frame", 9),
)


@pytest.mark.parametrize(
    ("model", "what", "transport"),
    [
        (TRIVIA, KILLED, "socket"),
        (TRIVIA, OTHERWISE, "socket"),
        (TRIVIA, ONE_OF_EACH_KIND, "ray"),
        (None, ONE_OF_EACH_KIND, "socket"),
    ],
    ids=["killed", "otherwise", "through Ray", "SmolLM2"],
)
def test_the_answers_are_those_of_an_undisturbed_engine(
    model: Path | None, what: tuple[Fault, ...], transport: str
) -> None:
    """One fault after another, each in the ranks that took the place of those before.

    `benchmarks/recovery.py` runs each rank and point with any model, in an engine of its own.
    """
    expected = undisturbed(model)
    with LLM(model, 2, device="cpu", faults=what, heartbeat_timeout_s=3.0, transport=transport) as llm:
        assert ids(llm.generate(PROMPTS, SAMPLING)) == expected
        recoveries = llm.recoveries()
        assert recoveries[-1].epoch == len(what)
        num_while_running = sum(fault.point in ("decode", "prefill", "frame") for fault in what)
        assert len(recoveries) == num_while_running
        assert ids(llm.generate(PROMPTS, SAMPLING)) == expected, "and again, when all is calm"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_during_an_abort_and_another_while_the_engine_ends(rank: int) -> None:
    what = faults(("kill", rank, "abort", 1), ("kill", rank, "shutdown", 1))
    before = placement_groups()
    with LLM(TRIVIA, 2, device="cpu", faults=what) as llm:
        outputs: list[RequestOutput] = []
        beside = threading.Thread(target=lambda: outputs.extend(llm.generate(PROMPTS, SAMPLING)))
        aborted = llm.stream("Nobody will hear the end", GREEDY.replace(max_tokens=400))
        next(aborted)
        beside.start()
        aborted.abort()
        assert list(aborted)[-1].finish_reason == "abort"
        beside.join()
        assert ids(outputs) == undisturbed(TRIVIA)
        assert len(llm.recoveries()) == 1
        assert "fault: kill" in llm.recoveries()[0].report
        ended_at = time.monotonic()
    assert time.monotonic() - ended_at < 15
    assert rank_pids() == []
    assert placement_groups() == before
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    assert any(f"kill of rank {rank} in epoch 1 at shutdown" in log.read_text() for log in logs.glob("worker-*.err"))


def test_a_neighbour_notices_nothing() -> None:
    """Two engines at work on one node, and a rank of one of them dies."""
    with (
        LLM(TRIVIA, 2, device="cpu", faults=faults(("kill", 1, "decode", 12))) as unlucky,
        LLM(TRIVIA, 2, device="cpu") as neighbour,
    ):
        outputs: list[RequestOutput] = []
        beside = threading.Thread(target=lambda: outputs.extend(unlucky.generate(PROMPTS, SAMPLING)))
        beside.start()
        while beside.is_alive():
            assert ids(neighbour.generate(PROMPTS, SAMPLING)) == undisturbed(TRIVIA)
        beside.join()
        assert ids(outputs) == undisturbed(TRIVIA)
        assert (len(unlucky.recoveries()), neighbour.recoveries()) == (1, [])


def test_a_rank_that_stops_before_it_has_said_where_it_is_can_be_killed() -> None:
    @ray.remote(num_cpus=0)
    class RankActor:
        def __init__(self) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

    actor = RankActor.remote()
    deadline = time.monotonic() + 30
    while not (found := find_processes([actor])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ((_, pid),) = found
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kill_processes(found)
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_report_names_the_rank_its_process_and_what_it_said() -> None:
    what = faults(("exit", 1, "decode", 9), ("raise", 1, "decode", 9), ("corrupt", 0, "frame", 9))
    with LLM(TRIVIA, 2, device="cpu", faults=what) as llm:
        assert len(llm.generate("Hello", SamplingParams(max_tokens=40, ignore_eos=True))[0].token_ids) == 40
        exited, raised, damaged = [recovery.report for recovery in llm.recoveries()]
    assert exited.startswith("rank 1 (pid ")
    assert "died: killed from outside (SIGKILL), or ended without a word" in exited.splitlines()[0]
    assert raised.count("InjectedFaultError: at decode, as was asked for") == 2, (
        "in the first line, and once traced back"
    )
    assert "FrameError: damaged frame" in damaged
    assert "rank 0 (pid " in damaged


def test_a_crash_is_named_by_its_signal_and_the_user_is_told_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(TRIVIA, 2, device="cpu") as llm:
        llm.generate("Hello", GREEDY)
        os.kill(rank_pids()[0], signal.SIGSEGV)
        assert len(llm.generate("Hello", GREEDY)[0].token_ids) == 20
        report = llm.recoveries()[0].report
    assert "Fatal Python error: Segmentation fault; its log ends with:" in report
    told, again = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{report}\nThe ranks are being replaced")
    assert again == "The ranks have been replaced, and answers come again."


def test_a_request_that_kills_the_ranks_ends_alone() -> None:
    """It is the first in each step, and each step with it dies: twice among others, and in two trials."""
    what = faults(*[("kill", 1, "prefill", 1)] * 4)
    with LLM(TRIVIA, 2, device="cpu", faults=what, max_num_seqs=1) as llm:
        outputs = llm.generate(["the killer", "an innocent", "another one"], SamplingParams(max_tokens=8))
        assert [output.error is None for output in outputs] == [False, True, True]
        assert "died each time that they computed this request" in str(outputs[0].error)
        assert "rank 1 (pid " in str(outputs[0].error)
        assert llm.stats().num_running == 0


def test_ranks_that_never_come_up_end_the_start_with_every_cause() -> None:
    start = time.monotonic()
    with pytest.raises(
        EngineError, match=r"the ranks could not be started, 3 times in a row \(max_restarts=2\)"
    ) as caught:
        LLM(TRIVIA, 2, device="cpu", max_restarts=2, faults=faults(*[("kill", 1, "loading", 1)] * 3))
    assert [f"attempt {number}: rank 1 (pid " in str(caught.value) for number in (1, 2, 3)] == [True] * 3
    assert time.monotonic() - start < 60


def test_ranks_that_die_at_once_again_and_again_end_the_engine_for_everybody() -> None:
    what = faults(("kill", 0, "decode", 2), *[("kill", 1, "loading", 1)] * 2)
    with LLM(TRIVIA, 2, device="cpu", max_restarts=1, faults=what) as llm:
        with pytest.raises(EngineError, match="the ranks could not be started, 2 times"):
            llm.generate(["a", "b"], SamplingParams(max_tokens=20, ignore_eos=True))
        with pytest.raises(EngineError, match="the ranks could not be started, 2 times"):
            llm.generate("c")


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_ranks_that_end_while_there_is_nothing_to_do_are_replaced_before_the_next_request(
    signal_number: signal.Signals,
) -> None:
    with LLM(TRIVIA, 2, device="cpu", heartbeat_timeout_s=2.0) as llm:
        first = llm.generate("Hello", GREEDY)
        os.kill(rank_pids()[-1], signal_number)
        deadline = time.monotonic() + 30
        while not llm.recoveries():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert ids(llm.generate("Hello", GREEDY)) == ids(first)
        assert len(llm.recoveries()) == 1
        assert len(rank_pids()) == 2


def ranks_under(ancestor: int) -> list[int]:
    """Ranks at work that descend from a process."""
    parents, ranks = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(b"ray::RankActor.run"):
                ranks.append(int(folder.name))

    def descends(pid: int) -> bool:
        while pid > 1 and pid != ancestor:
            pid = parents.get(pid, 0)
        return pid == ancestor

    return [pid for pid in ranks if descends(pid)]


def test_the_results_of_a_command_stay_clean_when_a_rank_dies(tmp_path: Path) -> None:
    """Ray prints the death of a worker on standard output."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"number {index}\n" for index in range(200)))
    options = ["--model", TRIVIA, "-t", "2", "--device", "cpu", "--max-tokens", "100", "--no-chat", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = subprocess.Popen(
        [sys.executable, "-m", "raytp.cli", "generate", "--file", str(prompts), "--lines", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        deadline = time.monotonic() + 60
        while not (ranks := ranks_under(command.pid)):
            assert time.monotonic() < deadline
            assert command.poll() is None
            time.sleep(0.02)
        os.kill(ranks[0], signal.SIGKILL)
        output, errors = command.communicate(timeout=120)
    finally:
        command.kill()
    assert command.returncode == 0, errors
    assert [json.loads(line)["error"] for line in output.splitlines()] == [None] * 200
