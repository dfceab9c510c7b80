"""What a job leaves behind, with a stub for the engine: records, refusals, resumption, order, both formats."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytp.batch_job import progress
from raytp.batch_job.json_text import dump_line
from raytp.batch_job.locations import locate
from raytp.batch_job.manifest import Counts
from raytp.batch_job.output import Output
from raytp.errors import BatchError
from tests.batch.stub_engine import StubEngine, answer_to
from tests.batch.stub_job import run_stub

NUM_ROWS = 40


@pytest.fixture
def source(tmp_path):
    """40 rows; 3 is no JSON, 5 has the id of 4, and 6 is refused by the engine."""
    lines = [json.dumps({"id": f"row {i}", "prompt": f"prompt {i}", "text": i}) for i in range(NUM_ROWS)]
    lines[3] = "{"
    lines[5] = lines[4]
    lines[6] = json.dumps({"id": "row 6", "prompt": "too long"})
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    return file


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(found):
    """Each row once, with its answer or its error."""
    assert sorted(record["row"] for record in found) == list(range(NUM_ROWS))
    errors = {record["row"]: record for record in found if record["error_code"]}
    assert {row: record["error_code"] for row, record in errors.items()} == {
        3: "invalid_json",
        5: "duplicate_id",
        6: "invalid_request",
    }
    assert errors[5]["prompt"] == "prompt 4"
    assert (errors[3]["error_line"], errors[3]["error_source"][-10:]) == (4, "rows.jsonl")
    for record in found:
        if not record["error_code"]:
            i = record["row"]
            assert (record["id"], record["prompt"], record["input_text"]) == (f"row {i}", f"prompt {i}", i)
            assert (record["text"], record["finish_reason"]) == (answer_to(f"prompt {i}"), "stop")
            assert [record[f"num_{kind}_tokens"] for kind in ("prompt", "cached", "output")] == [2, 1, 3]


def test_a_file_has_a_record_for_each_row(source, tmp_path):
    target = tmp_path / "out.jsonl"
    summary = run_stub(source, target)
    check(records(target))
    assert (summary.status, summary.num_rows, summary.num_failed) == ("complete", NUM_ROWS, 3)
    assert summary.error_codes == {"invalid_json": 1, "duplicate_id": 1, "invalid_request": 1}
    assert not list(tmp_path.glob("out.jsonl.parts/*.jsonl"))


def test_a_folder_has_parts(source, tmp_path):
    run_stub(source, tmp_path / "out")
    parts = sorted((tmp_path / "out").glob("part-*.jsonl"))
    assert [len(records(part)) for part in parts] == [7, 7, 7, 7, 7, 5]
    check([record for part in parts for record in records(part)])


def test_errors_can_have_a_file_of_their_own(source, tmp_path):
    run_stub(source, tmp_path / "out.jsonl", errors=str(tmp_path / "errors.jsonl"))
    found, errors = records(tmp_path / "out.jsonl"), records(tmp_path / "errors.jsonl")
    assert [len(found), len(errors)] == [NUM_ROWS - 3, 3]
    check(found + errors)


def test_jsonl_becomes_parquet_and_nothing_is_lost(tmp_path):
    rows = [{"prompt": str(i), "number": i, "tags": [{"a": i}], "empty": None, "hollow": {}} for i in range(10)]
    rows[7] |= {"number": 7.5, "tags": [{"a": 1, "b": 2}]}
    rows[8] |= {"number": "eight", "late": {"x": 1}, "empty": 2, "tags": "none"}
    rows[9] |= {"other_columns": "mine", "row": -1}
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    run_stub(source, tmp_path / "out.parquet", output_format="parquet", ordered=True, max_part_rows=4)
    table = pq.read_table(tmp_path / "out.parquet")
    found = table.to_pylist()
    assert table.schema.field("number").type == pa.int64()
    assert [row["prompt"] for row in found] == [str(i) for i in range(10)]
    assert [row["text"] for row in found] == [answer_to(str(i)) for i in range(10)]
    for i, row in enumerate(found):
        others = json.loads(row["other_columns"])
        renamed = {f"input_{name}": name for name in ("row", "other_columns")}
        kept = {name: row.get(name) for name in rows[i] if name not in renamed.values()}
        assert kept | {renamed.get(name, name): value for name, value in others.items()} == rows[i], i


def test_parquet_keeps_the_types_of_its_input(tmp_path):
    table = pa.table(
        {
            "prompt": ["a", "b", "too long"],
            "text": pa.array([1, 2, None], pa.int8()),
            "day": pa.array([1, 2, 3], pa.date32()),
            "raw": [b"\xff", b"", None],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    run_stub(tmp_path / "rows.parquet", tmp_path / "out", output_format="parquet", ordered=True, max_part_rows=2)
    found = pq.read_table(tmp_path / "out")
    assert found.select(["prompt", "day", "raw"]).equals(table.select(["prompt", "day", "raw"]))
    assert found["input_text"].equals(table["text"])
    assert found["error_code"].to_pylist() == [None, None, "invalid_request"]
    run_stub(tmp_path / "rows.parquet", tmp_path / "out.jsonl", ordered=True)
    assert [row["raw"] for row in records(tmp_path / "out.jsonl")] == ["/w==", "", None]


@pytest.mark.parametrize(("name", "output_format"), [("out.jsonl", "jsonl"), ("out.parquet", "parquet")])
def test_no_rows_make_an_empty_file(tmp_path, name, output_format):
    (tmp_path / "rows.jsonl").write_text("\n\n")
    assert run_stub(tmp_path / "rows.jsonl", tmp_path / name, output_format=output_format).num_rows == 0
    if output_format == "parquet":
        assert pq.read_table(tmp_path / name).num_rows == 0
    else:
        assert (tmp_path / name).read_bytes() == b""


@pytest.mark.parametrize("order_window", [1, 5, 1000])
def test_ordered_is_the_order_of_the_input(source, tmp_path, order_window):
    engine = StubEngine(seed=1, window=20)
    run_stub(source, tmp_path / "out.jsonl", engine=engine, ordered=True, order_window=order_window)
    assert [record["row"] for record in records(tmp_path / "out.jsonl")] == list(range(NUM_ROWS))
    assert engine.max_lead < order_window
    check(records(tmp_path / "out.jsonl"))


class _DiesAfter(StubEngine):
    """Raises after so many answers."""

    def __init__(self, num_answers, seed=0):
        super().__init__(seed, window=4)
        self._num_answers = num_answers

    def complete(self, jobs):
        answers = super().complete(jobs)
        for _ in range(self._num_answers):
            yield next(answers)
        raise ConnectionError("the engine is gone")


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", ["out", "out.jsonl"])
def test_after_a_failure_the_rest_is_done_alone(source, tmp_path, ordered, name):
    target = tmp_path / name
    for seed in range(5):
        engine = _DiesAfter(6, seed)
        with pytest.raises(ConnectionError):
            run_stub(source, target, engine=engine, ordered=ordered, max_part_rows=4)
    engine = StubEngine()
    summary = run_stub(source, target, engine=engine, ordered=ordered)
    parts = sorted(target.glob("part-*")) if target.is_dir() else [target]
    found = [record for part in parts for record in records(part)]
    check(found)
    assert summary.num_done_earlier >= (10 if ordered else 30)
    assert len(engine.asked) <= NUM_ROWS - summary.num_done_earlier
    if ordered:
        assert [record["row"] for record in found] == list(range(NUM_ROWS))


def test_a_finished_job_does_nothing_again(source, tmp_path):
    run_stub(source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    engine = StubEngine()
    summary = run_stub(source, tmp_path / "out.jsonl", engine=engine)
    assert (summary.num_rows, summary.num_done_earlier, summary.num_failed) == (NUM_ROWS, NUM_ROWS, 3)
    assert engine.asked == []
    assert (tmp_path / "out.jsonl").read_bytes() == before
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(BatchError, match=r"out\.jsonl, which the earlier run has written, is gone"):
        run_stub(source, tmp_path / "out.jsonl")


def test_other_settings_are_refused_with_the_difference(source, tmp_path):
    run_stub(source, tmp_path / "out")
    with pytest.raises(BatchError, match='model was "stub" and is "other"; ordered was false and is true'):
        run_stub(source, tmp_path / "out", model="other", ordered=True)
    os.utime(source, (1, 1))
    with pytest.raises(BatchError, match=r"rows\.jsonl\.version was .* and is \"1\.0\""):
        run_stub(source, tmp_path / "out")
    engine = StubEngine()
    run_stub(source, tmp_path / "out", model="other", restart=True, engine=engine)
    assert len(engine.asked) == NUM_ROWS - 2
    check([record for part in (tmp_path / "out").glob("part-*") for record in records(part)])


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_no_earlier_run_is_left_alone(source, tmp_path, restart):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(BatchError, match=r"holds thesis\.txt and no earlier run"):
        run_stub(source, tmp_path / "out", restart=restart)
    with pytest.raises(BatchError, match="is there already"):
        run_stub(source, tmp_path / "out.jsonl", restart=restart)
    with pytest.raises(BatchError, match="is there already"):
        run_stub(source, tmp_path / "new.jsonl", errors=str(tmp_path / "out.jsonl"), restart=restart)
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    others = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} - {source.relative_to(tmp_path)}
    assert {str(path) for path in others} == {"out", "out/thesis.txt", "out.jsonl"}


def test_a_restart_removes_what_the_earlier_run_has_made_and_nothing_else(source, tmp_path):
    target, errors, precious = tmp_path / "out.jsonl", tmp_path / "errors.jsonl", tmp_path / "precious.jsonl"
    run_stub(source, target, errors=str(errors))
    precious.write_text("mine")
    with pytest.raises(BatchError, match=r"precious\.jsonl is there already"):
        run_stub(source, target, errors=str(precious), restart=True)
    assert (precious.read_text(), target.exists(), errors.exists()) == ("mine", False, False)
    run_stub(source, target)
    check(records(target))


def test_two_jobs_do_not_share_an_output(source, tmp_path):
    output = Output(locate(tmp_path / "out"), None, "jsonl")
    output.open({"model": "stub"}, None, restart=False)
    with pytest.raises(BatchError, match=rf"another job writes to this output \(process {os.getpid()} on"):
        run_stub(source, tmp_path / "out")
    output.close()
    with pytest.raises(BatchError, match="other settings"):
        run_stub(source, tmp_path / "out")


def test_half_a_manifest_line_and_stray_parts_do_not_count(source, tmp_path):
    with pytest.raises(ConnectionError):
        run_stub(source, tmp_path / "out", engine=_DiesAfter(20))
    with open(tmp_path / "out/_raytp/manifest.jsonl", "ab") as opened:
        opened.write(b'{"number": 9, "ordinals": "0-')
    (tmp_path / "out/part-000099.jsonl").write_text('{"row": 0}\n')
    run_stub(source, tmp_path / "out")
    check([record for part in (tmp_path / "out").glob("part-*") for record in records(part)])


def test_a_part_that_is_gone_is_not_forgotten(source, tmp_path):
    with pytest.raises(ConnectionError):
        run_stub(source, tmp_path / "out", engine=_DiesAfter(20))
    (tmp_path / "out/part-000001.jsonl").unlink()
    with pytest.raises(BatchError, match=r"part-000001\.jsonl, which the earlier run has written, is gone"):
        run_stub(source, tmp_path / "out")


def test_too_many_failures_stop_it_and_a_larger_limit_goes_on(source, tmp_path):
    summary = run_stub(source, tmp_path / "out.jsonl", max_failures=1, engine=StubEngine(window=1))
    assert (summary.status, summary.num_failed) == ("too many failures", 2)
    assert not (tmp_path / "out.jsonl").exists()
    assert run_stub(source, tmp_path / "out.jsonl", max_failures=3).status == "complete"
    check(records(tmp_path / "out.jsonl"))


def test_records_are_always_json():
    record = {"a": float("nan"), "b": [float("-inf"), {"c": "\ud800"}], "d": b"\x00", "e": np.datetime64("2020-01-01")}
    assert json.loads(dump_line(record)) == {"a": None, "b": [None, {"c": "\ud800"}], "d": "AA==", "e": "2020-01-01"}
    assert dump_line({"a": "ü"}) == '{"a": "ü"}\n'.encode()


def test_every_order_of_completion_gives_the_same_records(source, tmp_path):
    def run(seed):
        target = tmp_path / f"out-{seed}.jsonl"
        run_stub(source, target, seed=seed, max_part_rows=random.Random(seed).randint(1, 50))
        return sorted(target.read_text().splitlines())

    assert len({tuple(run(seed)) for seed in range(5)}) == 1


def test_a_log_gets_a_line_of_numbers_now_and_then(monkeypatch, capsys):
    clock = iter([0.0, 5.0, 10.0, 10.0, 20.0, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown = progress.JobProgress(Counts(num_succeeded=100), None)
    shown.counts.add(Counts(num_succeeded=50, num_prompt_tokens=1000, num_cached_tokens=250, num_output_tokens=100))
    shown.show(num_read=200, fraction_read=0.1)
    assert capsys.readouterr().err == ""
    shown.show(num_read=200, fraction_read=0.1)
    shown.counts.add(Counts(num_failed=50, error_codes={"invalid_json": 50}))
    shown.show(num_read=200, fraction_read=1.0)
    first, last = capsys.readouterr().err.splitlines()
    assert first == ("150 of about 2,000 rows (8%), 0 failed | 100 tok/s in, 10 out, 25% cached | 0:06:10 left")
    assert last == "200 of 200 rows (100%), 50 failed | 50 tok/s in, 5 out, 25% cached | 0.0 s left"
