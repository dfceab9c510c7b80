"""The command as it is used: the real model with real questions, rows that keep failing, and parts of it killed."""

from __future__ import annotations

import json
import random

import pytest

import raytp
from tests.batch.commands import MODEL, PAIRS, chat_request, check_chats, read, run, write, write_chats
from tests.batch.kill_job import kill


def test_two_hundred_real_requests_to_the_real_model_are_answered_as_by_chat(real_chats, tmp_path):
    """In OpenAI's format, at tensor-parallel 2."""
    source = write_chats(tmp_path / "in.jsonl", real_chats)
    code, out, errors = run(source, tmp_path / "out", "--tensor-parallel-size", 2, "--ordered", "--quiet")
    assert (code, out, errors) == (0, "", ""), errors
    records = [record for part in sorted((tmp_path / "out").glob("part-*")) for record in read(part)]
    assert [record["custom_id"] for record in records] == [f"q-{i}" for i in range(200)]
    check_chats(records, real_chats)


@pytest.mark.timeout(900)
def test_command_driver_and_ranks_killed_at_random_moments_every_row_appears_once(tmp_path):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    kills = kill(tmp_path, num_kills=20, seed=seed)
    assert len(kills.names) == 20


def test_more_failures_than_allowed_end_the_job_and_a_larger_limit_goes_on(ray_session, tmp_path):
    lines = [chat_request(f"q-{i}", PAIRS[i][0]) | {"url": "/v1/embeddings"} for i in range(10)]
    lines += [chat_request(f"good-{i}", PAIRS[i][0]) for i in range(5)]
    arguments = [write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", "--model", MODEL]
    arguments += ["--summary", tmp_path / "summary.json", "--max-failures"]
    code, out, errors = run(*arguments, 4)
    assert (code, out) == (3, ""), errors
    assert "stopped: 5 rows have failed, more than --max-failures" in errors
    stopped = json.loads((tmp_path / "summary.json").read_text())
    assert (stopped["status"], stopped["num_failed"], stopped["num_succeeded"]) == ("too many failures", 5, 0)
    assert not (tmp_path / "out.jsonl").exists()
    summary = raytp.batch(*arguments[:2], model=MODEL, max_failures=10, show_progress=False)
    assert (summary.status, summary.num_rows, summary.num_failed) == ("complete", 15, 10)
    assert summary.num_done_earlier == 5
    answers = {each["custom_id"]: each for each in read(tmp_path / "out.jsonl")}
    for i in range(5):
        assert answers[f"good-{i}"]["response"]["body"]["choices"][0]["message"]["content"] == PAIRS[i][1]
    assert len(answers) == 15
