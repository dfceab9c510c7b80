"""Batch jobs with a real engine, through the command and from Python, on the tiny model that knows its answers."""

from __future__ import annotations

import json
import math
import os
import signal
import time

import jsonschema
import pyarrow.parquet as pq
import pytest

import raytp
from raytp import LLM, SamplingParams
from raytp.errors import BatchError
from tests.batch.commands import MODEL, PAIRS, SCHEMA, chat_request, read, run, start, write

BAD = {
    "invalid_utf8": lambda i: b'{"custom_id": "\xff"}',
    "invalid_json": lambda i: json.dumps(chat_request(f"bad-{i}", "cut off")).encode()[:-9],
    "missing_field": lambda i: {"custom_id": f"bad-{i}", "method": "POST", "url": "/v1/chat/completions"},
    "unsupported_method": lambda i: chat_request(f"bad-{i}", "x") | {"method": "GET"},
    "unsupported_url": lambda i: chat_request(f"bad-{i}", "x") | {"url": "/v1/embeddings"},
    "unsupported_field": lambda i: chat_request(f"bad-{i}", "x", tools=[{"type": "function"}]),
    "invalid_value": lambda i: chat_request(f"bad-{i}", "x", temperature=-1),
    "duplicate_id": lambda i: chat_request("good-0", "x"),
    "invalid_request": lambda i: chat_request(f"bad-{i}", "too long " * 600),
    "not an object": lambda i: [i],
}


def interrupt_at_the_first_record(process, target):
    """As Ctrl-C at a terminal does, to all of its foreground."""
    first_record = target.with_name(f"{target.name}.parts") / "_raytp/.output.raytp-partial"
    while not first_record.exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)


def test_an_interrupt_lets_what_is_in_flight_finish_for_a_few_seconds(tmp_path):
    short = [{"id": i, "messages": [{"role": "user", "content": PAIRS[i][0]}]} for i in range(50)]
    endless = [{"id": f"endless {i}", "prompt": [1], "max_tokens": 450, "ignore_eos": True} for i in range(5000)]
    target, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    process = start(write(tmp_path / "in.jsonl", short + endless), target, "--model", MODEL, "--summary", summary)
    interrupt_at_the_first_record(process, target)
    start_s = time.monotonic()
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), errors
    assert (
        errors.index("starting Ray\n") < errors.index("starting ranks\n") < errors.index("what is finished is saved\n")
    )
    assert "the same command again does the rows that are left" in errors
    stopped = json.loads(summary.read_text())
    assert stopped["status"] == "interrupted"
    parts = (tmp_path / "out.jsonl.parts").glob("part-*.jsonl")
    texts = {each["id"]: each["text"] for part in parts for each in read(part)}
    assert len(texts) == stopped["num_rows"] < 5050
    assert {i: texts[i] for i in range(50)} == {i: PAIRS[i][1] for i in range(50)}
    assert time.monotonic() - start_s < 30


def test_a_thousand_rows_of_which_thirty_are_bad_interrupted_and_resumed(tmp_path):
    lines, expected, codes = [], {}, {}
    for i in range(1000):
        kind = list(BAD)[i // 33 % 10] if i % 33 == 32 else None
        if kind is None:
            question, expected[f"good-{i}"] = PAIRS[i % len(PAIRS)]
            lines.append(chat_request(f"good-{i}", question))
        else:
            lines.append(BAD[kind](i))
            codes[i + 1] = "invalid_json" if kind == "not an object" else kind
    assert (len(expected), len(codes)) == (970, 30)
    arguments = [write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", "--model", MODEL, "-t", 2]
    arguments += ["--summary", tmp_path / "summary.json"]
    process = start(*arguments)
    interrupt_at_the_first_record(process, tmp_path / "out.jsonl")
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert not (tmp_path / "out.jsonl").exists()

    code, out, errors = run(*arguments)
    assert (code, out) == (3, ""), errors
    assert "1,000 rows, 30 failed, " in errors
    assert " done earlier; " in errors
    records = read(tmp_path / "out.jsonl")
    answers = {each["custom_id"]: each["response"]["body"] for each in records if each["error"] is None}
    assert {custom_id: body["choices"][0]["message"]["content"] for custom_id, body in answers.items()} == expected
    failed = [each["error"] for each in records if each["error"] is not None]
    assert {error["line"]: error["code"] for error in failed} == codes
    assert len(records) == 1000
    assert len({each["id"] for each in records}) == 1000
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["num_succeeded"], summary["num_failed"]) == ("complete", 970, 30)
    assert summary["error_codes"]["invalid_json"] == 6
    assert summary["num_output_tokens"] > 0


@pytest.fixture(scope="module")
def llm(ray_session):
    with LLM(MODEL) as llm:
        yield llm


def test_from_python_with_logprobs_and_several_choices(ray_session, tmp_path):
    completion = {
        "custom_id": "completion",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "The", "max_tokens": 3, "logprobs": 2, "n": 2},
    }
    chat = chat_request("chat", PAIRS[0][0], logprobs=True, top_logprobs=3)
    source = write(tmp_path / "in.jsonl", [completion, chat])
    summary = raytp.batch(source, tmp_path / "out.jsonl", model=MODEL, show_progress=False)
    assert (summary.status, summary.num_succeeded, summary.num_failed) == ("complete", 2, 0)
    records = {record["custom_id"]: record for record in read(tmp_path / "out.jsonl")}
    for record in records.values():
        jsonschema.validate(record, SCHEMA)
    choices = records["completion"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [3, 3]
    assert "".join(choices[0]["logprobs"]["tokens"]) == choices[0]["text"]
    [choice] = records["chat"]["response"]["body"]["choices"]
    tokens = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens).startswith(PAIRS[0][1])
    for each in tokens:
        assert each["top_logprobs"][0]["token"] == each["token"]  # greedy
        assert math.isclose(each["top_logprobs"][0]["logprob"], each["logprob"], abs_tol=1e-5)


def test_lines_of_text_become_parquet_in_order(ray_session, tmp_path):
    source = tmp_path / "questions.txt"
    source.write_text("\n".join(question for question, _ in PAIRS[:20]) + "\n" + "too long " * 600)
    greedy = SamplingParams(temperature=0)
    options = {"model": MODEL, "sampling_params": greedy, "ordered": True, "show_progress": False}
    summary = raytp.batch(source, tmp_path / "out", output_format="parquet", **options)
    assert (summary.num_succeeded, summary.error_codes) == (20, {"invalid_request": 1})
    *answered, failed = pq.read_table(tmp_path / "out").to_pylist()
    assert [(row["prompt"], row["text"]) for row in answered] == PAIRS[:20]
    assert "512" in failed["error_message"]
    with pytest.raises(BatchError, match=r"sampling\.temperature was 0 and is 0\.5"):
        raytp.batch(
            source,
            tmp_path / "out",
            output_format="parquet",
            **options | {"sampling_params": SamplingParams(temperature=0.5)},
        )


def test_complete_takes_jobs_as_there_is_room_and_gives_outputs_as_they_finish(llm):
    num_jobs, num_taken, num_done, max_lead = 3000, 0, 0, 0
    window = max(1024, 4 * llm.info.max_num_seqs)

    def jobs():
        nonlocal num_taken
        for i in range(num_jobs):
            num_taken += 1
            yield f"job {i}", [1 + i % 2000], SamplingParams(temperature=0, max_tokens=1)

    keys = []
    for result in llm.complete(jobs()):
        if result is not None:
            keys.append(result[0])
            assert result[1].num_prompt_tokens == 1
            num_done += 1
            max_lead = max(max_lead, num_taken - num_done)
    assert sorted(keys) == sorted(f"job {i}" for i in range(num_jobs))
    assert max_lead <= window


def test_complete_serves_the_good_between_the_bad_and_waits_for_jobs_to_come(llm):
    question, answer = PAIRS[0]
    greedy = SamplingParams(temperature=0)

    def jobs():
        yield "chat", [{"role": "user", "content": question}], greedy
        yield "empty", "", greedy
        yield None
        yield None
        yield "bad sampling", "The", SamplingParams(top_p=9)
        yield "no message", [{"text": "?"}], None
        yield "long", [1] * 600, None
        yield "text", "The", None

    outputs = dict(each for each in llm.complete(jobs()) if each is not None)
    assert outputs["chat"].text == answer
    assert outputs["text"].finish_reason in ("stop", "length")
    errors = {key: output.error for key, output in outputs.items() if output.finish_reason == "error"}
    assert sorted(errors) == ["bad sampling", "empty", "long", "no message"]
    assert "top_p=9" in errors["bad sampling"]


def test_closing_complete_ends_what_is_on_its_way(llm):
    outputs = llm.complete((i, "The", SamplingParams(max_tokens=1 + 450 * (i > 0), ignore_eos=True)) for i in range(8))
    while next(outputs) is None:
        pass
    outputs.close()
    deadline = time.monotonic() + 20
    while (stats := llm.stats()).num_running or stats.num_waiting:
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.jsonl", "out.jsonl"], "there is no file at nothing.jsonl"),
        (["in.jsonl", "nosuch://bucket/out.jsonl"], "the output nosuch://bucket/out.jsonl cannot be used"),
        (["in.jsonl", "out.parquet"], "the output of requests in OpenAI's format is JSONL"),
        (["in.jsonl", "out.jsonl", "--output-format", "parquet"], "contradicts the name"),
        (["in.jsonl", "out.csv"], "out.csv cannot be written as csv: name a .jsonl or .parquet file"),
        (["in.jsonl", "out.jsonl", "--temperature", "-1"], "temperature=-1"),
        (["in.jsonl", "full", "--model", str(MODEL)], "full holds in.jsonl and no earlier run"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [chat_request("a", "b")])
    (tmp_path / "full").mkdir()
    write(tmp_path / "full/in.jsonl", [])
    code, out, errors = run(*arguments)
    assert (code, out) == (1 if "no earlier run" in message else 2, "")
    assert errors.startswith(f"error: {message}") or message in errors
    assert errors.count("\n") == 1
