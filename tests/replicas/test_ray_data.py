"""Rows through real Ray Data and a real engine: the example as it is, and what becomes of bad rows."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytp import SamplingParams
from raytp.data import Predictor
from raytp.errors import RequestError
from tests.batch.commands import MODEL, PAIRS
from tests.replicas.leftovers import ours, wait_until_nothing_is_left

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_data.py"
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def test_the_example_answers_parquet_with_parquet_and_leaves_nothing(ray_session, tmp_path, monkeypatch):
    rows = [{"number": i, "text": f"kept {i}", "prompt": PAIRS[i % len(PAIRS)][0]} for i in range(300)]
    source = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source)
    before = ours()
    arguments = [EXAMPLE, source, tmp_path / "out", "--model", MODEL, "--max-engines", 1]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    answers = {row["number"]: row for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert sorted(answers) == list(range(300))
    for i in range(300):
        question, answer = PAIRS[i % len(PAIRS)]
        assert (answers[i]["prompt"], answers[i]["text"], answers[i]["error_code"]) == (question, answer, None)
        assert answers[i]["input_text"] == f"kept {i}"
        assert answers[i]["num_prompt_tokens"] > 0
    wait_until_nothing_is_left(before)


@pytest.fixture(scope="module")
def predictor(ray_session):
    made = Predictor(MODEL, sampling_params=GREEDY)
    yield made
    made.shutdown()


def test_rows_that_fail_have_their_error_beside_the_answers_of_others(predictor):
    rows = [
        {"prompt": PAIRS[0][0]},
        {"messages": [{"role": "user", "content": PAIRS[1][0]}]},
        {"prompt": None},
        {"prompt": "too long " * 600},
        {"prompt": PAIRS[2][0], "temperature": -1.0},
        {"prompt": PAIRS[3][0], "max_tokens": 1},
    ]
    table = predictor(
        pa.Table.from_pylist([{"temperature": None, "max_tokens": None, "messages": None} | r for r in rows])
    )
    answers = table.to_pylist()
    assert [row["text"] for row in answers[:2]] == [PAIRS[0][1], PAIRS[1][1]]
    codes = [None, None, "missing_field", "invalid_request", "invalid_value", None]
    assert [row["error_code"] for row in answers] == codes
    assert "512" in answers[3]["error_message"]
    assert answers[5]["num_output_tokens"] == 1
    assert [row["prompt"] for row in answers] == [row.get("prompt") for row in rows]


def test_arrays_are_as_good_as_tables(predictor):
    questions = np.array([question for question, _ in PAIRS[:20]], dtype=object)
    limits = np.array([40.0] * 19 + [np.nan])
    table = predictor({"prompt": questions, "max_tokens": limits})
    assert table["text"].to_pylist() == [answer for _, answer in PAIRS[:20]]
    assert predictor({"prompt": np.array([], dtype=object)}).num_rows == 0
    ids = predictor({"prompt": np.array([[5, 6, 7], [8, 9, 10]]), "ignore_eos": np.array([True, True])})
    assert ids["num_output_tokens"].to_pylist() == [40, 40]


def test_pandas_has_its_gaps_and_its_types(predictor):
    frame = pd.DataFrame(
        {"prompt": [PAIRS[0][0], None, float("nan")], "day": pd.Timestamp("2026-11-30")}, index=[7, 7, 3]
    )
    table = predictor(frame)
    assert table["error_code"].to_pylist() == [None, "missing_field", "missing_field"]
    assert table["text"].to_pylist()[0] == PAIRS[0][1]
    assert pa.types.is_timestamp(table.schema.field("day").type)
    same = predictor({name: frame[name].to_numpy() for name in frame})
    assert same["error_code"] == table["error_code"]
    assert pa.types.is_timestamp(same.schema.field("day").type)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (None, "the batch is of type NoneType"),
        ([{"prompt": "a"}], "the batch is of type list"),
        ({"prompt": "a"}, "column 'prompt' is 'a', and must be an array"),
        ({"prompt": np.array("a")}, "must be an array"),
        ({"prompt": ["a", 1]}, "column 'prompt': "),
        ({"prompt": ["\ud800"]}, "column 'prompt': .* surrogates"),
        ({"prompt": ["a"], "seed": [2**64]}, "column 'seed': "),
        ({"prompt": ["a", "b"], "other": [1]}, "expected length 2"),
        ({"prompt": ["a"], "text": ["t"], "input_text": ["i"]}, "'text' and 'input_text' would both be 'input_text'"),
        (pa.table([["a"], ["b"]], names=["prompt", "prompt"]), "'prompt' and 'prompt' would both"),
    ],
)
def test_what_is_no_table_is_refused_as_a_whole(predictor, batch, words):
    with pytest.raises(RequestError, match=words):
        predictor(batch)


def test_settings_that_are_none_are_refused_before_anything_starts():
    with pytest.raises(RequestError, match="sampling_params=3 must be a SamplingParams"):
        Predictor(MODEL, sampling_params=3)
