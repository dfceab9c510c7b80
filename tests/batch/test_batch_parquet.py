"""Parquet as input: how far its reader is, and values that are hard to read."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytp.batch_job.plain_format import PlainFormat
from raytp.batch_job.readers import Reader, find_files
from scheduler.sampling_params import SamplingParams

PLAIN = PlainFormat(SamplingParams(), use_chat=False)


def reader_of(file):
    return Reader(find_files(str(file)), "parquet")


def test_how_far_it_is_does_not_depend_on_how_well_rows_compress(tmp_path):
    pq.write_table(pa.table({"prompt": ["the same"] * 40_000}), tmp_path / "rows.parquet")
    reader = reader_of(tmp_path / "rows.parquet")
    assert os.path.getsize(tmp_path / "rows.parquet") < 20_000
    for _ in zip(reader.rows(PLAIN), range(10_000), strict=False):
        pass
    assert (reader.fraction, reader.num_unread()) == (pytest.approx(0.25, rel=0.01), pytest.approx(30_000, rel=0.01))


def test_a_value_that_python_has_no_room_for_is_an_error_of_its_own_row(tmp_path):
    days = pa.array([0, 10**7, 1], pa.date32())  # the second is in the year 29349
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "day": days}), tmp_path / "rows.parquet")
    rows = list(reader_of(tmp_path / "rows.parquet").rows(PLAIN))
    assert [getattr(row, "code", None) for row in rows] == [None, "invalid_value", None]
    assert (rows[1].place.line, rows[2].request) == (2, "c")
