"""Engines end with all their processes, however they end, and say why they cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray.util.placement_group import placement_group_table

from raytp import LLM, SamplingParams
from raytp.errors import (
    EngineClosedError,
    EngineError,
    KVCacheMemoryError,
    ModelNotFoundError,
    PlacementError,
    UnsupportedModelError,
    WeightsError,
)
from tests.e2e.checkpoints import TRIVIA, questions
from tests.e2e.conftest import EngineCache
from tests.held_cpus import held_cpus

_ENDLESS = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)
_GONE_WITHIN_S = 15.0
_FAILS_WITHIN_S = 15.0
"""Far more than it takes; the machine may be busy."""


@pytest.fixture(autouse=True)
def nothing_runs(engine_cache: EngineCache) -> Iterator[None]:
    """Each test starts without engines, and leaves no process and no placement group."""
    engine_cache.clear()
    _wait_until(_nothing_is_left)
    yield
    _wait_until(_nothing_is_left)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GONE_WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, (_actor_pids("RankActor"), _actor_pids("Driver"), _placement_groups())
        time.sleep(0.05)


def _nothing_is_left() -> bool:
    return not (_actor_pids("RankActor") or _actor_pids("Driver") or _placement_groups())


def _placement_groups() -> list[str]:
    states = [group["state"] for group in placement_group_table().values()]
    return [state for state in states if state != "REMOVED"]


def _actor_pids(actor_class: str) -> list[int]:
    """Processes of this test session's Ray that run an actor of this class, which Ray writes into their title."""
    return [pid for pid, _, title in _processes() if title.startswith(f"ray::{actor_class}") and _is_ours(pid)]


def _processes() -> Iterator[tuple[int, int, str]]:
    """(pid, parent's pid, title) of each process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            yield int(folder.name), parent, (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, UnicodeDecodeError):
            continue  # it has ended meanwhile


def _is_ours(pid: int) -> bool:
    parents = {child: parent for child, parent, _ in _processes()}
    while pid > 1 and pid != os.getpid():
        pid = parents.get(pid, 0)
    return pid == os.getpid()


def _answers(llm: LLM) -> bool:
    question, answer = questions()[0]
    return llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0))[0].text == answer


def _generate_forever(llm: LLM) -> None:
    while True:
        llm.generate([[5 + i] for i in range(64)], _ENDLESS)


def test_context_manager_and_shutdown() -> None:
    with LLM(TRIVIA, 2) as llm:
        assert len(_actor_pids("RankActor")) == 2
        assert len(_actor_pids("Driver")) == 1
        assert _answers(llm)
    _wait_until(_nothing_is_left)
    for use in (
        lambda: llm.generate("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: list(llm.stream("a")),
        lambda: llm.stats(),
    ):
        with pytest.raises(EngineClosedError, match="shut down"):
            use()
    llm.shutdown()


def test_an_engine_that_is_dropped_without_shutdown() -> None:
    """As a notebook does when it makes another one."""
    llm = LLM(TRIVIA, 2)
    assert _answers(llm)
    del llm
    _wait_until(_nothing_is_left)


def test_shutdown_while_another_thread_generates() -> None:
    llm = LLM(TRIVIA)
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            _generate_forever(llm)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(1)
    llm.shutdown()
    thread.join(timeout=_FAILS_WITHIN_S)
    assert not thread.is_alive()
    assert [isinstance(error, EngineError) for error in errors] == [True], errors


def test_the_driver_killed_while_it_generates() -> None:
    llm = LLM(TRIVIA)
    (pid,) = _actor_pids("Driver")
    timer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(EngineError, match="driver actor died"):
        _generate_forever(llm)
    llm.shutdown()


def _kill_when_it_is_there(what: str, delay_s: float) -> threading.Thread:
    def kill() -> None:
        deadline = time.monotonic() + 30
        while not (pids := _actor_pids(what)) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay_s)
        os.kill(pids[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_the_driver_killed_while_the_engine_starts(delay_s: float) -> None:
    def start_and_use() -> None:
        with LLM(TRIVIA, 2) as llm:
            killer.join()
            _generate_forever(llm)

    killer = _kill_when_it_is_there("Driver", delay_s)
    with pytest.raises(EngineError, match="died"):  # while it starts, or else with its first steps
        start_and_use()
    killer.join()


@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_a_rank_killed_while_the_engine_starts(delay_s: float) -> None:
    killer = _kill_when_it_is_there("RankActor", delay_s)
    with LLM(TRIVIA, 2) as llm:
        killer.join()
        assert _answers(llm)


def test_a_driver_that_stops_while_the_engine_starts() -> None:
    stopped: list[int] = []

    def stop() -> None:
        deadline = time.monotonic() + 30
        while not (pids := _actor_pids("Driver")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGSTOP)
        stopped.extend(pids)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(EngineError, match="did not answer within startup_timeout_s=3"):
        LLM(TRIVIA, startup_timeout_s=3)
    stopper.join()
    assert len(stopped) == 1


def test_a_relative_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have working directories of their own."""
    monkeypatch.chdir(TRIVIA.parent)
    with LLM(TRIVIA.name) as llm:
        assert _answers(llm)


def test_a_cluster_that_is_not_there() -> None:
    code = "from raytp.ray_runtime import ensure_ray; ensure_ray(1)"
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    script = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert "raytp.errors.EngineError: the Ray cluster at RAY_ADDRESS=127.0.0.1:1 cannot be joined" in script.stderr


def test_missing_models(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        LLM(tmp_path)


def test_unknown_architecture(tmp_path: Path) -> None:
    config = json.loads((TRIVIA / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        LLM(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 100, 1_000_000])
def test_damaged_weights(num_bytes: int, tmp_path: Path) -> None:
    """A file that was cut off: the error names it, and the ranks that found it are gone."""
    for file in TRIVIA.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: num_bytes if file.suffix == ".safetensors" else None])
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
        LLM(tmp_path, 2 if num_bytes == 100 else 1)


def test_a_kv_cache_that_does_not_fit() -> None:
    with pytest.raises(KVCacheMemoryError, match=r"1000000000 blocks needs \d+\.\d\d GiB: lower num_kv_blocks"):
        LLM(TRIVIA, num_kv_blocks=10**9)


def test_a_cluster_that_is_too_small(tmp_path: Path) -> None:
    config = json.loads((TRIVIA / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 32, "num_key_value_heads": 32}))
    with pytest.raises(PlacementError) as raised:
        LLM(tmp_path, 17, load_format="dummy", placement_timeout_s=2)
    message = str(raised.value)
    for fragment in ("17 CPU on one node", "placement_timeout_s=2", "16 of 16 CPU free", "lower tensor_parallel_size"):
        assert fragment in message


def test_a_cluster_that_is_busy() -> None:
    with held_cpus(14, "others"):
        with pytest.raises(PlacementError, match="3 CPU on one node") as raised:
            LLM(TRIVIA, 3, placement_timeout_s=2)
        assert "2 of 16 CPU free" in str(raised.value)
        with LLM(TRIVIA, 2) as llm:
            assert _answers(llm)


def test_eight_engines_started_at_once() -> None:
    """Two ranks each, on one node: none takes another's port, socket or name."""
    with ThreadPoolExecutor(8) as pool:
        engines = list(pool.map(lambda _: LLM(TRIVIA, 2, device="cpu", max_num_seqs=4), range(8)))
        try:
            assert len(_actor_pids("RankActor")) == 16
            assert list(pool.map(_answers, engines)) == [True] * 8
        finally:
            list(pool.map(LLM.shutdown, engines))
