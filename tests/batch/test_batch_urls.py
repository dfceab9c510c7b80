"""Jobs that write to URLs: what an object store can do is enough, for several processes and through kills."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest

from raytp.batch_job.locations import LocalLocation, locate
from raytp.errors import BatchError, ConfigError
from tests.batch import bucket
from tests.batch.stub_engine import StubEngine, answer_to
from tests.batch.stub_job import run_stub

ROOT = Path(__file__).parents[2]
NUM_ROWS = 1000


@pytest.fixture
def url(tmp_path):
    return f"bucket://{tmp_path}/a.bucket/deep/in"


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"id": str(i), "prompt": "too long" if i % 100 == 7 else f"prompt {i}"} for i in range(NUM_ROWS)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def lines(url):
    """Of an object, or of all parts below it."""
    system, path = fsspec.core.url_to_fs(url)
    names = [path] if system.isfile(path) else sorted(system.glob(f"{path}/part-*"))
    return [json.loads(line) for name in names for line in system.cat_file(name).splitlines()]


def check(records):
    """Every row once, with its answer or its error."""
    assert sorted(record["row"] for record in records) == list(range(NUM_ROWS))
    for record in records:
        if record["row"] % 100 == 7:
            assert record["error_code"] == "invalid_request"
        else:
            assert record["text"] == answer_to(f"prompt {record['row']}")


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
def test_rows_of_a_url_become_records_at_another(source, url, name):
    fsspec.filesystem("bucket").put_file(str(source), f"{url}/in/rows.jsonl")
    summary = run_stub(f"{url}/in/*.jsonl", f"{url}/{name}", max_part_rows=100)
    assert (summary.status, summary.num_rows, summary.num_failed) == ("complete", NUM_ROWS, 10)
    check(lines(f"{url}/{name}"))
    engine = StubEngine()
    assert run_stub(f"{url}/in/*.jsonl", f"{url}/{name}", engine=engine).num_done_earlier == NUM_ROWS
    assert engine.asked == []


def test_errors_and_parquet_go_to_urls_too(source, url):
    errors = f"{url}/errors.jsonl"
    run_stub(source, f"{url}/out.parquet", output_format="parquet", errors=errors, max_part_rows=300)
    with fsspec.open(f"{url}/out.parquet") as opened:
        found = pq.read_table(opened).to_pylist()
    assert (len(found), len(lines(errors))) == (NUM_ROWS - 10, 10)
    check(found + lines(errors))


def test_memory_is_a_url_as_well(source):
    run_stub(source, "memory://jobs/out.jsonl", max_part_rows=400)
    check(lines("memory://jobs/out.jsonl"))
    with pytest.raises(BatchError, match="other settings"):
        run_stub(source, "memory://jobs/out.jsonl", model="other")
    run_stub(source, "memory://jobs/out.jsonl", model="other", restart=True)
    check(lines("memory://jobs/out.jsonl"))


def test_a_url_of_this_machine_is_a_path(source, tmp_path):
    assert isinstance(locate(f"file://{tmp_path}/out"), LocalLocation)
    run_stub(source, f"file://{tmp_path}/out.jsonl")
    assert (tmp_path / "out.jsonl.parts/_raytp/lock").exists()
    run_stub(source, tmp_path / "out.jsonl")  # the same output
    check(lines(str(tmp_path / "out.jsonl")))


def test_what_is_no_earlier_run_is_left_alone(source, url):
    system = fsspec.filesystem("bucket")
    system.pipe_file(f"{url}/out/thesis.txt", b"mine")
    system.pipe_file(f"{url}/out.jsonl", b"mine")
    with pytest.raises(BatchError, match=r"holds thesis\.txt and no earlier run"):
        run_stub(source, f"{url}/out", restart=True)
    with pytest.raises(BatchError, match="is there already"):
        run_stub(source, f"{url}/out.jsonl", restart=True)
    assert system.cat_file(f"{url}/out.jsonl") == system.cat_file(f"{url}/out/thesis.txt") == b"mine"


def test_who_comes_later_takes_the_output_over(source, url):
    class Overtaken(StubEngine):
        def complete(self, jobs):
            for number, each in enumerate(super().complete(jobs)):
                if number == 250:
                    run_stub(source, f"{url}/out", max_part_rows=100)
                yield each

    with pytest.raises(BatchError, match=r"another job has taken over this output \(process \d+ on"):
        run_stub(source, f"{url}/out", engine=Overtaken(), max_part_rows=100)
    check(lines(f"{url}/out"))
    assert run_stub(source, f"{url}/out").num_done_earlier == NUM_ROWS


def test_who_is_refused_takes_nothing_over(source, url):
    class Visited(StubEngine):
        def complete(self, jobs):
            for number, each in enumerate(super().complete(jobs)):
                if number == 250:
                    with pytest.raises(BatchError, match="other settings"):
                        run_stub(source, f"{url}/out", model="other")
                yield each

    assert run_stub(source, f"{url}/out", engine=Visited(), max_part_rows=100).status == "complete"
    check(lines(f"{url}/out"))


def test_an_object_of_the_manifest_that_is_gone_is_noticed(source, url):
    run_stub(source, f"{url}/out", max_part_rows=100)
    fsspec.filesystem("bucket").rm_file(f"{url}/out/_raytp/manifest-000003.json")
    with pytest.raises(BatchError, match="--restart"):
        run_stub(source, f"{url}/out")
    run_stub(source, f"{url}/out", restart=True, max_part_rows=100)
    check(lines(f"{url}/out"))


def test_what_the_store_refuses_ends_the_job_with_its_words(source, url, monkeypatch):
    def refuse(self, lpath, rpath, **_):
        raise PermissionError(f"no access to {rpath}")

    monkeypatch.setattr(bucket.BucketFileSystem, "put_file", refuse)
    with pytest.raises(BatchError, match=r"part-000000\.jsonl cannot be written: no access to"):
        run_stub(source, f"{url}/out", max_part_rows=100)
    monkeypatch.undo()
    run_stub(source, f"{url}/out", max_part_rows=100)
    check(lines(f"{url}/out"))


def test_a_url_that_nothing_serves_is_refused():
    with pytest.raises(ConfigError, match=r"the output nosuch://a/b\.jsonl cannot be used: Protocol not known"):
        locate("nosuch://a/b.jsonl")


@pytest.mark.parametrize(("name", "ordered"), [("out", False), ("out.jsonl", True)])
def test_killed_at_random_moments_every_row_appears_once(source, url, name, ordered):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng, target = random.Random(seed), f"{url}/{name}"
    entries = f"{target if name == 'out' else f'{target}.parts'}/_raytp/manifest-*"
    system = fsspec.filesystem("bucket")

    def start(**settings):
        command = [sys.executable, "-m", "tests.batch.stub_job", source, target, json.dumps(settings)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    for _ in range(5):
        before, deadline = len(system.glob(entries)), time.monotonic() + 30
        process = start(ordered=ordered, seed=rng.randrange(1000), max_part_rows=rng.choice([5, 20]), delay_s=0.002)
        while len(system.glob(entries)) <= before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.3)
        process.kill()
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
    last = start(ordered=ordered, max_part_rows=100)
    out, errors = last.communicate(timeout=60)
    assert last.returncode == 0, errors
    assert json.loads(out) == {"status": "complete", "num_rows": NUM_ROWS, "num_failed": 10}
    records = lines(target)
    check(records)
    if ordered:
        assert [record["row"] for record in records] == list(range(NUM_ROWS))
