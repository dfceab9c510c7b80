"""How a job ends, and how it lets go of its output and its engine, when something is not as it should be."""

from __future__ import annotations

import errno
import fcntl
import json
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytp import SamplingParams, batch
from raytp.batch_job.journal import LocalJournal
from raytp.errors import BatchError, ConfigError, EngineClosedError
from tests.batch.stub_engine import StubEngine
from tests.batch.stub_job import run_stub


class _GoneAtTheEnd(StubEngine):
    """A job is ended after eleven answers, and its engine has died by then."""

    def complete(self, jobs):
        answers = super().complete(jobs)
        try:
            for _ in range(10):
                yield next(answers)
            signal.raise_signal(signal.SIGTERM)
            yield next(answers)
            raise AssertionError("it goes on")
        finally:
            raise EngineClosedError("the engine is gone")


def test_what_was_finished_is_committed_though_the_engine_is_gone(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(40)))
    with pytest.raises(EngineClosedError):
        run_stub(source, tmp_path / "out", engine=_GoneAtTheEnd(), max_part_rows=5000, max_part_s=1000)
    assert run_stub(source, tmp_path / "out").num_done_earlier == 11


def test_a_job_that_comes_while_another_leaves_takes_nobody_s_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "work" / "lock"
    flock = fcntl.flock

    def one_leaves_and_one_comes(descriptor: int, flags: int) -> None:
        lock.unlink()
        lock.write_text("somebody else's")
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", one_leaves_and_one_comes)
    journal = LocalJournal(tmp_path / "work" / "manifest.jsonl")
    with pytest.raises(BatchError, match="run the same command again"):
        journal.acquire()
    journal.release()
    assert lock.read_text() == "somebody else's"


def test_a_file_system_without_locks_is_no_other_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, flags: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BatchError, match=r"no file can be locked .*Function not implemented"):
        LocalJournal(tmp_path / "work" / "manifest.jsonl").acquire()


@pytest.mark.parametrize("is_parquet", [False, True])
def test_two_columns_that_would_have_one_name_are_an_error(tmp_path: Path, is_parquet: bool) -> None:
    row = {"prompt": "x", "text": "ours", "input_text": "theirs"}
    if is_parquet:
        pq.write_table(pa.table({name: [value] for name, value in row.items()}), tmp_path / "rows.parquet")
        with pytest.raises(ConfigError, match="text and input_text would both be input_text"):
            run_stub(tmp_path / "rows.parquet", tmp_path / "out", output_format="parquet")
        assert not (tmp_path / "out").exists()
        return
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    run_stub(tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    assert "would both be input_text" in json.loads((tmp_path / "out.jsonl").read_text())["error_message"]


def test_the_folder_of_the_errors_is_made_like_that_of_the_output(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "x"}\n{')
    run_stub(source, tmp_path / "answers" / "out.jsonl", errors=str(tmp_path / "failed" / "errors.jsonl"))
    assert "invalid_json" in (tmp_path / "failed" / "errors.jsonl").read_text()


@pytest.mark.parametrize("sampling", [SamplingParams(n=2), SamplingParams(logprobs=0)])
def test_what_a_record_has_no_place_for_is_refused(tmp_path: Path, sampling: SamplingParams) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "x"}')
    with pytest.raises(ConfigError, match="a row of one's own has one text and no log probabilities"):
        batch(source, tmp_path / "out", sampling_params=sampling)
    assert not (tmp_path / "out").exists()
