"""What somebody reads who waits for a cluster."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest
import ray
from ray.util.placement_group import placement_group_table

from raytp import LLM, SamplingParams, progress
from raytp.errors import PlacementError
from raytp.placement import describe_shortage
from raytp.progress import ProgressBar
from tests.cluster.local_cluster import BIN

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
JOINS_AFTER_S = 20.0
"""The longer, the more looks the engine has taken in vain; 20 s are no different."""


@pytest.mark.parametrize(("enabled", "said"), [(None, "waiting for resources, 0 s so far\n"), (False, "")])
def test_a_log_says_what_is_waited_for(
    enabled: bool | None, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LOG_EVERY_S", 0.0)
    with ProgressBar("finding the model", enabled) as bar:
        bar.update("waiting for resources", 0.0)
    assert capsys.readouterr().err == said


def test_what_takes_no_time_leaves_a_log_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("finding the model", None) as bar:
        bar.update("starting Ray", 0.0)
    assert capsys.readouterr().err == ""


def test_an_engine_that_waits_for_cpus_is_told_how_to_wait_for_gpus(ray_session: None) -> None:
    assert "set device='cuda' (--device cuda)" in describe_shortage([{"CPU": 1.0}] * 99, "STRICT_PACK", 900.0, None)
    message = describe_shortage([{"GPU": 1.0}] * 4, "STRICT_PACK", 900.0, None)
    assert "did not give 4 GPU on one node within placement_timeout_s=900" in message
    assert "--device cuda" not in message


@contextmanager
def node_that_joins(after_s: float) -> Iterator[None]:
    """A second node of the session's cluster, with one CPU."""
    command = [str(BIN / "ray"), "start", "--block", f"--address={ray.get_runtime_context().gcs_address}"]
    command += ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
    started: list[subprocess.Popen[bytes]] = []
    timer = Timer(after_s, lambda: started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL)))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for process in started:
            process.terminate()  # which gives notice to the cluster
            process.wait(30)
        wait_until(lambda: num_nodes() == 1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def num_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def groups() -> set[str]:
    return {group_id for group_id, group in placement_group_table().items() if group["state"] != "REMOVED"}


def test_ranks_on_nodes_of_their_own_wait_for_a_node_that_joins_late(ray_session: None) -> None:
    """In time, they start; before, the error says what is missing, and nothing stays reserved."""
    before = groups()
    with pytest.raises(PlacementError) as raised:
        LLM(MODEL, 2, device="cpu", placement_strategy="STRICT_SPREAD", placement_timeout_s=1)
    assert groups() == before
    assert "did not give 2 CPU on 2 nodes, one on each within placement_timeout_s=1" in str(raised.value)
    assert "Missing: 1 nodes with a free CPU" in str(raised.value)
    assert "placement_strategy='SPREAD'" in str(raised.value)
    start = time.monotonic()
    with (
        node_that_joins(JOINS_AFTER_S),
        LLM(MODEL, 2, device="cpu", placement_strategy="STRICT_SPREAD", placement_timeout_s=90) as llm,
    ):
        print(f"ready {time.monotonic() - start:.1f} s after it began to wait, for a node after {JOINS_AFTER_S:g} s")
        assert time.monotonic() - start > JOINS_AFTER_S
        pair = json.loads((MODEL / "questions.json").read_text())[0]
        chat = [{"role": "user", "content": pair["question"]}]
        assert llm.chat(chat, SamplingParams(temperature=0))[0].text == pair["answer"]
    assert groups() == before
