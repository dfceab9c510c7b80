"""Processes that are killed at any moment, interrupted, or given a million rows: nothing lost, nothing twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_ROWS = 3000
NUM_KILLS = 10


def start(source, target, program=("-m", "tests.batch.stub_job"), **settings):
    command = [sys.executable, *program, str(source), str(target), json.dumps(settings)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write_rows(path, num_rows):
    with open(path, "w") as opened:
        for i in range(num_rows):
            prompt = f"too long {i}" if i % 100 == 7 else f"question {i}"
            body = json.dumps({"id": f"id-{i}", "prompt": prompt})
            opened.write("broken\n" if i % 100 == 9 else body + "\n")
    return path


def records(target):
    """Of a file or of all parts of a folder, as lines."""
    files = [target] if target.is_file() else sorted(target.glob("part-*.jsonl"))
    return [line for file in files for line in file.read_text().splitlines()]


def num_commits(target):
    folder = target if not target.suffix else target.with_name(f"{target.name}.parts")
    manifest = folder / "_raytp/manifest.jsonl"
    return manifest.read_bytes().count(b"\n") if manifest.exists() else 0


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
@pytest.mark.parametrize("ordered", [False, True])
def test_killed_at_random_moments_every_row_appears_once(tmp_path, name, ordered):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    source = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    undisturbed = tmp_path / "undisturbed.jsonl"
    calm = start(source, undisturbed, ordered=ordered, max_part_rows=500)
    assert calm.wait(60) == 0, calm.stderr.read()
    target, num_kills = tmp_path / name, 0
    while num_kills < NUM_KILLS:
        settings = {"seed": rng.randrange(1000), "max_part_rows": rng.choice([5, 20, 100]), "delay_s": 0.002}
        process = start(source, target, ordered=ordered, **settings)
        before, deadline = num_commits(target), time.monotonic() + 30
        # Importing takes most of a process's time: the moment is drawn from the time in which it writes.
        while num_commits(target) <= before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.3)
        process.kill()
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
        num_kills += 1
    last = start(source, target, ordered=ordered, max_part_rows=100)
    assert last.wait(60) == 0, last.stderr.read()
    assert json.loads(last.stdout.read()) == {"status": "complete", "num_rows": NUM_ROWS, "num_failed": 60}
    if ordered:
        assert records(target) == records(undisturbed)
    else:
        assert sorted(records(target)) == sorted(records(undisturbed))


def test_an_interrupt_finishes_what_is_in_flight_and_the_same_command_goes_on(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", 2000)
    process = start(source, tmp_path / "out.jsonl", delay_s=0.01, max_part_rows=20)
    while num_commits(tmp_path / "out.jsonl") < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    stopped = json.loads(out)
    assert stopped["status"] == "interrupted"
    # What is in flight is there as well, beside the two commits before: 64, or 63 where one was answered just then.
    assert 40 + 63 <= stopped["num_rows"] < 2000
    again = start(source, tmp_path / "out.jsonl")
    assert json.loads(again.communicate(timeout=30)[0]) == {"status": "complete", "num_rows": 2000, "num_failed": 40}
    assert len({json.loads(line)["row"] for line in records(tmp_path / "out.jsonl")}) == 2000


def test_a_request_to_end_commits_at_once(tmp_path):
    """What is in flight would take half a minute."""
    source = write_rows(tmp_path / "rows.jsonl", 500)
    process = start(source, tmp_path / "out.jsonl", delay_s=0.5, max_part_rows=50)
    partial = tmp_path / "out.jsonl.parts/_raytp/.output.raytp-partial"
    while not partial.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=4)
    assert process.returncode == 0, errors
    stopped = json.loads(out)
    assert stopped["status"] == "interrupted"
    assert len(records(tmp_path / "out.jsonl.parts")) == stopped["num_rows"] > 0
    again = start(source, tmp_path / "out.jsonl")
    assert json.loads(again.communicate(timeout=30)[0])["num_rows"] == 500


def test_a_second_interrupt_ends_it_at_once(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", 2000)
    process = start(source, tmp_path / "out.jsonl", delay_s=0.5, max_part_rows=1)
    while num_commits(tmp_path / "out.jsonl") < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert time.monotonic() - start_s < 4  # less than what is in flight is given


@pytest.mark.parametrize("ordered", [False, True])
def test_twenty_times_the_rows_need_no_more_memory(tmp_path, ordered):
    program = (
        "import json, resource, sys\n"
        "import pyarrow.parquet\n"
        "from tests.batch.stub_job import run_stub\n"
        "run_stub(sys.argv[1], sys.argv[2], remembers=False, **json.loads(sys.argv[3]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for num_rows in (5_000, 100_000):
        source = write_rows(tmp_path / f"{num_rows}.jsonl", num_rows)
        target = tmp_path / f"out-{num_rows}.jsonl"
        process = start(source, target, ("-c", program), ordered=ordered, max_part_rows=2000)
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        peaks.append(int(out))
    assert peaks[1] < 1.1 * peaks[0]
