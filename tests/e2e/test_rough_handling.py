"""What the surroundings may do to an engine and its command: forks, killed owners, closed streams, no room."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table

from raytp import LLM, SamplingParams, rank_group
from raytp.config import EngineConfig
from raytp.errors import ChannelError, EngineError
from raytp.placement import group_name
from raytp.progress import ProgressBar
from tests.e2e.checkpoints import TRIVIA
from tests.e2e.conftest import EngineCache
from tests.held_cpus import held_cpus
from workers.channel import Listener, connect

_KEY = b"k" * 32
_PROMPTLY_S = 15.0
"""Far more than it takes; the machine may be busy."""
_GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def _use_after_fork(llm: LLM) -> None:
    for use in (lambda: llm.generate([5, 6], _GREEDY), lambda: list(llm.stream([5, 6], _GREEDY)), llm.stats):
        with pytest.raises(EngineError, match=f"belongs to process {os.getppid()}"):
            use()
    llm.shutdown()


def test_a_forked_process_is_refused_and_does_no_harm(engines: EngineCache) -> None:
    """Ray's calls would hang in it; nor may its end, or the end of its copy of the engine, end the engine."""
    llm = engines.get(TRIVIA)
    before = llm.generate([5, 6], _GREEDY)[0].token_ids
    child = multiprocessing.get_context("fork").Process(target=_use_after_fork, args=(llm,))
    child.start()
    child.join(_PROMPTLY_S)
    has_ended = child.exitcode is not None
    child.kill()
    child.join()
    assert has_ended
    assert child.exitcode == 0
    assert llm.generate([5, 6], _GREEDY)[0].token_ids == before


_OWN_RAY = """
import functools, os, subprocess, sys
import ray
from raytp.errors import EngineError, PlacementError
from raytp.ray_runtime import check_room, ensure_ray, join_ray

if len(sys.argv) > 1:  # what looks for a Ray finds this one
    join = functools.partial(ray.init, sys.argv[1])
    ray.init = lambda address, **options: join(**options)
try:
    if len(sys.argv) > 1:
        join_ray()
    ensure_ray(2)
    check_room(2, "cpu")
    check_room(99, "cuda")
except (EngineError, PlacementError) as error:
    print(os.getpid(), error, flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, ray.get_runtime_context().gcs_address], check=True)
"""


def test_a_ray_of_one_s_own_is_no_place_to_wait_in_or_to_stay_in(tmp_path: Path) -> None:
    program = tmp_path / "own_ray.py"
    program.write_text(_OWN_RAY)
    env = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    alone, beside = done.stdout.splitlines()
    pid = alone.partition(" ")[0]
    assert "GPUs for tensor_parallel_size=99, which takes one for each rank" in alone
    assert f"process {pid}'s own and ends with it: start one that stays" in beside


class _Owner:
    def start(self) -> str:
        self.llm = LLM(TRIVIA)
        (name,) = (group["name"] for group in placement_group_table().values() if group["state"] == "CREATED")
        return str(name)


def test_what_a_killed_owner_leaves_goes_to_the_next_engine(engine_cache: EngineCache) -> None:
    """Its driver dies with it, but Ray would keep the placement group for the whole job."""
    engine_cache.clear()
    owner: Any = ray.remote(_Owner).options(num_cpus=0).remote()
    left = str(ray.get(owner.start.remote(), timeout=60))
    ray.kill(owner)
    with held_cpus(1, f"{group_name('a')}-like"), LLM(TRIVIA, 2) as beside:  # one that lives is not touched
        deadline = time.monotonic() + _PROMPTLY_S
        while _state_of(left) != "REMOVED" and time.monotonic() < deadline:
            with LLM(TRIVIA):
                pass
        assert beside.generate([5, 6], _GREEDY)[0].error is None
        assert _state_of(left) == "REMOVED"
        assert _state_of(f"{group_name('a')}-like") == "CREATED"


def test_an_engine_that_ends_as_it_asks_for_room_leaves_no_placement_group(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has closed it kills the driver then: nothing may come after that."""
    is_asking, go_on = threading.Event(), threading.Event()

    def ask_slowly(*arguments: Any, **options: Any) -> Any:
        is_asking.set()
        assert go_on.wait(_PROMPTLY_S)
        return placement_group(*arguments, **options)

    monkeypatch.setattr(rank_group, "placement_group", ask_slowly)
    before = placement_group_table()
    worker_config: Any = SimpleNamespace(device="cpu", world_size=1)
    group = rank_group.RankGroup(EngineConfig(), worker_config, epoch=0)
    with ThreadPoolExecutor(2) as threads:
        starting = threads.submit(group.start, lambda *_: None)
        assert is_asking.wait(_PROMPTLY_S)
        closing = threads.submit(group.close)
        assert not wait([closing], timeout=0.5).done, "it is closed while a placement group is on its way"
        go_on.set()
        closing.result(_PROMPTLY_S)
        made = [each for key, each in placement_group_table().items() if key not in before]
        assert [each["state"] for each in made] == ["REMOVED"]
        assert starting.exception(_PROMPTLY_S) is not None


def _state_of(name: str) -> str:
    return next(str(group["state"]) for group in placement_group_table().values() if group["name"] == name)


def test_a_long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has 107 bytes."""
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    listener = Listener(_KEY, 0, None)
    connection = connect(listener.local_address, _KEY, 0, 0, _PROMPTLY_S)
    (accepted,) = listener.accept_ranks(1, _PROMPTLY_S)
    accepted.send_bytes(b"hello")
    assert connection.recv_bytes() == b"hello"
    accepted.close()
    connection.close()
    assert not Path(listener.local_address.path or "").parent.exists()


def test_a_temporary_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(ChannelError, match="set TMPDIR"):
        Listener(_KEY, 0, None)


def test_progress_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with ProgressBar("waiting", None) as bar:
        bar.update("working", 0.5)


@pytest.mark.parametrize(
    ("arguments", "closed", "status", "message"),
    [
        ("generate", "<&-", 1, "the prompt is empty: standard input"),
        ("info", ">&-", 0, ""),
        ("info --memory -1", "2>&-", 2, ""),
    ],
)
def test_the_command_with_a_stream_closed(arguments: str, closed: str, status: int, message: str) -> None:
    line = f"{sys.executable} -m raytp.cli {arguments} {closed}"
    if arguments.startswith("info"):
        line = line.replace("info", f"info {TRIVIA}")
    ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "Traceback" in ended.stderr) == (status, False), ended.stderr
    assert message in ended.stderr


_HOOKS = """
import os, sys, threading
from pathlib import Path
from raytp.llm import LLM
from raytp.tokenizer import TokenizerLoading

late = []
register = os.register_at_fork

def recording(**hooks):
    if "before" in hooks and threading.current_thread() is not threading.main_thread():
        late.append(hooks)
    register(**hooks)

os.register_at_fork = recording
assert TokenizerLoading(Path(sys.argv[1])).result() is not None
print(late)
"""


def test_loading_a_tokenizer_while_ray_starts_adds_no_half_of_a_fork_hook() -> None:
    """Ray forks meanwhile. A hook that is added in the middle of a fork releases a lock that it has not taken."""
    ended = subprocess.run([sys.executable, "-c", _HOOKS, str(TRIVIA)], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[]\n", ended.stderr
