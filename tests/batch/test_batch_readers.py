"""What each reader makes of files as they come: in order, row by row, and never the end of the job for one bad row."""

from __future__ import annotations

import json
import os

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytp.batch_job.openai_request import parse_request
from raytp.batch_job.plain_format import PlainFormat
from raytp.batch_job.readers import Reader, find_files, find_format, table_schema
from raytp.batch_job.rows import BadRow, Place, Row
from raytp.errors import BatchError, ConfigError
from scheduler.sampling_params import SamplingParams

PLACE = Place(ordinal=0, source="file", line=1)
PLAIN = PlainFormat(SamplingParams(), use_chat=False)


def read(path, input_format=None, row_format=PLAIN):
    files = find_files(str(path))
    return list(Reader(files, find_format(files, input_format)).rows(row_format))


def written(tmp_path, content: bytes, name="rows.jsonl"):
    file = tmp_path / name
    file.write_bytes(content)
    return file


def test_bad_lines_are_errors_of_their_own_line(tmp_path):
    lines = {
        1: (b'\xef\xbb\xbf{"prompt": "after a byte order mark"}\r', None),
        2: (b"   \r", "blank"),
        3: (b'{"prompt": "\xff"}', "invalid_utf8"),
        4: (b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
        5: (b"[1, 2]", "invalid_json"),
        6: (b"[" * 100_000, "invalid_json"),
        7: (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        8: (b'{"text": "x"}', "missing_field"),
        9: (b'{"prompt": {"a": 1}}', "invalid_value"),
        10: (b'{"prompt": "x", "top_p": 7}', "invalid_value"),
        11: (b'{"prompt": "x", "messages": []}', "invalid_value"),
        12: (b'{"prompt": "x", "id": [1]}', "invalid_value"),
        13: (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', None),
        14: (b'{"prompt": "good"}', None),
        15: (b'{"prompt": "cut o', "invalid_json"),
    }
    rows = read(written(tmp_path, b"\n".join(line for line, _ in lines.values())))
    expected = [(line, code) for line, (_, code) in lines.items() if code != "blank"]
    assert [(row.place.line, getattr(row, "code", None)) for row in rows] == expected
    assert [row.place.ordinal for row in rows] == list(range(14))
    assert rows[0].request == "after a byte order mark"
    assert len(rows[11].request) == 10_000_000


def test_a_line_over_the_limit_does_not_end_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("raytp.batch_job.readers._MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("raytp.batch_job.readers._BUFFER_BYTES", 64)
    rows = read(written(tmp_path, b"a" * 5000 + b"\n" + b"b" * 999 + b"\n" + b"c" * 1000), input_format="text")
    assert [getattr(row, "code", None) for row in rows] == ["line_too_long", None, "line_too_long"]


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])), max_size=8), st.booleans()
)
def test_lines_of_text_are_prompts_word_for_word(tmp_path_factory, lines, is_crlf):
    end = "\r\n" if is_crlf else "\n"
    file = tmp_path_factory.mktemp("text") / "lines.txt"
    file.write_bytes(end.join(lines).encode())
    first, *rest = lines or [""]
    kept = [line for line in [first.removeprefix("\ufeff"), *rest] if line.encode().strip()]
    if lines:
        assert [row.request for row in read(file)] == kept
    else:
        assert read(file) == []


def test_a_plain_row_keeps_its_columns_and_sets_its_sampling(tmp_path):
    columns = {"id": 7, "prompt": [1, 2], "max_tokens": 5, "stop": ["."], "temperature": None, "note": {"a": [1]}}
    [row] = read(written(tmp_path, json.dumps(columns).encode()))
    assert (row.id, row.request, row.is_chat) == ("7", [1, 2], False)
    assert row.params == SamplingParams(max_tokens=5, stop=["."])
    assert row.columns == columns


def test_prompts_of_text_become_messages_if_asked():
    row = PlainFormat(SamplingParams(), use_chat=True).parse(PLACE, {"prompt": "hi"})
    assert (row.request, row.is_chat) == ([{"role": "user", "content": "hi"}], True)


def test_a_file_that_changes_while_it_is_read_is_no_whole_input(tmp_path):
    """Cut at the end of a line, nothing else would tell."""
    file = tmp_path / "rows.jsonl"
    line = json.dumps({"prompt": "x" * 1000}) + "\n"
    file.write_text(line * 4000)
    rows = Reader(find_files(str(file)), "jsonl").rows(PlainFormat(SamplingParams(), False))
    for _ in range(10):
        next(rows)
    with open(file, "r+b") as opened:
        opened.truncate(3000 * len(line))
    with pytest.raises(BatchError, match=rf"had {4000 * len(line)} bytes and has {3000 * len(line)}"):
        list(rows)


def test_what_cannot_be_read_twice_is_refused(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="is no regular file"):
        find_files(str(tmp_path / "rows.jsonl"))


def test_parquet_rows_come_with_their_types(tmp_path):
    messages = [[{"role": "user", "content": "a", "name": None}], [{"role": "user", "content": "b", "name": "x"}]]
    table = pa.table({"messages": messages, "max_tokens": [3.0, float("nan")], "id": [1, 2]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    first, second = read(tmp_path / "rows.parquet")
    assert first.request == [{"role": "user", "content": "a"}]
    assert second.request == messages[1]
    assert (first.params.max_tokens, second.params.max_tokens) == (3, None)
    assert (second.id, second.place.line) == ("2", 2)


@pytest.mark.parametrize("look", [lambda files: find_format(files, None), table_schema])
def test_a_file_that_goes_away_is_named(tmp_path, look):
    file = written(tmp_path, b"{}")
    files = find_files(str(file))
    file.unlink()
    with pytest.raises(ConfigError, match=r"rows\.jsonl cannot be read"):
        look(files)


def test_a_damaged_parquet_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rows\.parquet cannot be read as Parquet"):
        read(written(tmp_path, b"PAR1 no PAR1", "rows.parquet"))


def test_folders_and_globs_are_read_in_order_of_name(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "_hidden.jsonl", ".hidden.jsonl", "readme.md"):
        written(tmp_path, json.dumps({"prompt": name}).encode(), name)
    (tmp_path / "c.jsonl").mkdir()
    assert [row.request for row in read(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert [row.request for row in read(tmp_path / "?.jsonl")] == ["a.jsonl", "b.jsonl"]
    written(tmp_path, b'{"prompt": "brackets"}', "d[1].jsonl")
    assert [row.request for row in read(tmp_path / "d[1].jsonl")] == ["brackets"]


def test_urls_are_read_through_fsspec():
    with fsspec.open("memory://batch/rows.jsonl", "wb") as opened:
        opened.write(b'{"prompt": "from memory"}\n')
    [file] = find_files("memory://batch/*.jsonl")
    assert file.url == "memory:///batch/rows.jsonl"
    assert file.version
    assert [row.request for row in read("memory://batch/rows.jsonl")] == ["from memory"]


@pytest.mark.parametrize("name", ["nothing.jsonl", "*.jsonl", ""])
def test_no_input_is_an_error(tmp_path, name):
    with pytest.raises(ConfigError, match="there is no file"):
        find_files(str(tmp_path / name))


def test_formats_go_by_extension_and_first_line(tmp_path):
    def found(content, name):
        return find_format(find_files(str(written(tmp_path, content, name))), None)

    assert found(b"broken\n\n" + b'{"custom_id": "a", "body": {}}', "a.jsonl") == "openai"
    assert found(b'{"prompt": "a"}', "b.ndjson") == "jsonl"
    assert found(b"", "c.jsonl") == "jsonl"
    assert found(b"x", "d.txt") == "text"
    with pytest.raises(ConfigError, match="not clear"):
        found(b"x", "e.csv")
    with pytest.raises(ConfigError, match="not clear"):
        find_format(find_files(str(tmp_path)), None)
    with pytest.raises(ConfigError, match="'csv' must be one of"):
        find_format([], "csv")


def request(body, **changes):
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


MESSAGES = [{"role": "user", "content": "hi"}]


def test_an_openai_request_sets_all_it_can():
    body = {
        "model": "any",
        "messages": MESSAGES,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 9,
        "stop": ["x"],
        "seed": 3,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 4,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "stop_token_ids": [1],
        "ignore_eos": True,
        "logit_bias": None,
        "stream": False,
        "response_format": {"type": "text"},
        "user": "someone",
    }
    row = parse_request(PLACE, request(body), SamplingParams(max_tokens=1, temperature=1.0))
    assert isinstance(row, Row)
    assert (row.id, row.request, row.is_chat) == ("a", MESSAGES, True)
    assert row.params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        max_tokens=9,
        stop=["x"],
        seed=3,
        n=2,
        logprobs=4,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        top_k=5,
        min_p=0.01,
        repetition_penalty=1.1,
        min_tokens=1,
        stop_token_ids=[1],
        ignore_eos=True,
    )


@pytest.mark.parametrize("prompt", ["text", [1, 2], ["text"], [[1, 2]]])
def test_a_completion_has_one_prompt(prompt):
    row = parse_request(PLACE, request({"prompt": prompt, "logprobs": 2}, url="/v1/completions"), SamplingParams())
    assert row.request == ("text" if "text" in prompt else [1, 2])
    assert (row.params.logprobs, row.is_chat) == (2, False)


@pytest.mark.parametrize(
    ("record", "code", "word"),
    [
        (request({"messages": MESSAGES}, custom_id=None), "missing_field", "custom_id"),
        (request({"messages": MESSAGES}, custom_id=4), "invalid_value", "custom_id"),
        (request({"messages": MESSAGES}, method="GET"), "unsupported_method", "GET"),
        (request({"messages": MESSAGES}, url="/v1/embeddings"), "unsupported_url", "/v1/embeddings"),
        (request(None), "missing_field", "body"),
        (request([]), "invalid_value", "body"),
        (request({}), "missing_field", "messages"),
        (request({"prompt": "x"}, url="/v1/chat/completions"), "invalid_value", "prompt"),
        (request({"messages": MESSAGES}, url="/v1/completions"), "invalid_value", "messages"),
        (request({"messages": "hi"}), "invalid_value", "messages"),
        (request({"prompt": ["a", "b"]}, url="/v1/completions"), "invalid_value", "2 prompts"),
        (request({"messages": MESSAGES, "tools": [{}]}), "unsupported_field", "tools"),
        (request({"messages": MESSAGES, "stream": True}), "unsupported_field", "stream"),
        (request({"messages": MESSAGES, "tempurature": 1}), "unsupported_field", "tempurature"),
        (request({"messages": MESSAGES, "temperature": "hot"}), "invalid_value", "temperature"),
        (request({"messages": MESSAGES, "ignore_eos": 1}), "invalid_value", "ignore_eos"),
        (request({"messages": MESSAGES, "logprobs": 3}), "invalid_value", "logprobs"),
        (request({"messages": MESSAGES, "top_logprobs": 3}), "invalid_value", "top_logprobs"),
        (request({"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}), "invalid_value", "differ"),
    ],
)
def test_what_a_request_may_not_ask_is_named(record, code, word):
    row = parse_request(PLACE, record, SamplingParams())
    assert isinstance(row, BadRow)
    assert row.code == code
    assert word in row.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["custom_id", "method", "url", "body", "prompt", "messages", "id", "stop", "n", "temperature"])


@settings(deadline=None)
@given(st.dictionaries(names, json_values), st.dictionaries(names | st.text(max_size=3), json_values), st.booleans())
def test_no_record_raises(record, body, is_complete):
    if is_complete:
        record = request(body)
    for row in (parse_request(PLACE, record, SamplingParams()), PLAIN.parse(PLACE, record)):
        assert isinstance(row, (Row, BadRow))
