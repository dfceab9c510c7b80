"""Ray's own autoscaler under `raytp experiment`: nodes come for the rows and go after them, and one is killed."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from raytp import LLM
from raytp.experiment.reading import read_experiment
from raytp.experiment.rows import Rows
from raytp.experiment.workloads import make_requests
from tests.replicas.autoscaled_job import FILE

ROOT = Path(__file__).parents[2]


def environment(tmp_path):
    """As a user has it: no cluster, and no mode of authentication."""
    unset = ("RAY_ADDRESS", "RAY_AUTH_MODE")
    return {name: text for name, text in os.environ.items() if name not in unset} | {"RAY_TMPDIR": str(tmp_path)}


@pytest.fixture
def short_path():
    """Sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="raytp-") as folder:
        yield Path(folder)


def processes_in(folder):
    """Command lines that name it."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (each / "cmdline").read_bytes()
            found += [command] if str(folder).encode() in command else []
    return found


def undisturbed_answers(num_rows):
    """Tokens of the same rows from one engine to which nothing happens."""
    spec, _ = read_experiment(FILE)
    requests = make_requests(spec.workload, seed=0)
    assert len(requests) == num_rows
    with LLM(spec.model, show_progress=False, device="cpu", max_num_seqs=32, cpu_kv_cache_gib=0.1) as llm:
        rows = Rows(requests, 0, llm.model_config.vocab_size, clock=time.monotonic)
        outputs = dict(each for each in llm.complete(rows.jobs()) if each is not None)
    return {index: output.token_ids for index, output in outputs.items()}


def test_nodes_come_and_go_and_one_that_is_killed_loses_and_repeats_nothing(ray_session, tmp_path, short_path):
    results, answered = tmp_path / "results", tmp_path / "answered.json"
    command = [sys.executable, "-m", "tests.replicas.autoscaled_job", str(results), str(answered)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(short_path), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(answered.read_text())
    [num_rows_lost] = told["num_rows_lost"]
    assert num_rows_lost > 0, "the node had no rows when it was lost"
    answers = dict(told["answers"])
    assert len(told["answers"]) == len(answers)
    assert answers == undisturbed_answers(len(answers))

    with (results / "series.csv").open() as file:
        nodes = [int(tick["nodes"]) for tick in csv.DictReader(file)]
    assert (nodes[0], max(nodes), nodes[-1]) == (0, 3, 0)
    [record] = json.loads((results / "runs.json").read_text())
    assert (record["num_requests"], record["num_failed"], record["error"]) == (len(answers), 0, None)
    assert record["num_steps"] > 0
    assert 0 < record["busy_gpu_seconds"] < record["gpu_seconds"]
    pictures = sorted(path.name for path in results.glob("*.png"))
    assert pictures == ["comparison.png", "policy-1-fixed.png"]
    assert all((results / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert not processes_in(short_path)
    assert not list(short_path.iterdir())


START = """
import sys, time
from raytp.experiment.fake_cluster import fake_cluster
from raytp.experiment.spec import ClusterSpec

with fake_cluster(ClusterSpec(gpus_per_node=1, min_nodes=1, max_nodes=1)) as cluster:
    print(cluster.address, flush=True)
    time.sleep(100)
"""


def signalled(short_path, number):
    """The exit status of a process that has got the signal when its cluster had a node, and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", START], env=environment(short_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline()
    deadline = time.monotonic() + 60
    while sum(b"/raylet\0" in command for command in processes_in(short_path)) < 2:
        assert time.monotonic() < deadline, "no node came"
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_that_is_interrupted_leaves_nothing(short_path, number):
    code, errors = signalled(short_path, number)
    assert code not in (0, -number), errors
    assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert not processes_in(short_path)
    assert not list(short_path.iterdir())


def test_a_cluster_whose_owner_is_killed_ends_by_itself(short_path):
    """It has come up beside another head, which has taken the port of Ray's client."""
    with socket.socket() as other, contextlib.suppress(OSError):
        other.bind(("", 10001))  # or somebody else has it
        other.listen()
        signalled(short_path, signal.SIGKILL)
    deadline = time.monotonic() + 15
    while processes_in(short_path) or list(short_path.iterdir()):
        assert time.monotonic() < deadline, processes_in(short_path)
        time.sleep(0.1)
