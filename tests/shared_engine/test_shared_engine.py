"""An engine that several jobs share: what they get of it, what they see of it, and what they leave behind in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import raytp
from raytp import LLM, SamplingParams
from raytp.errors import BatchError, ConfigError, EngineClosedError, EngineNotFoundError
from raytp.shared_engines import check_name
from tests.shared_engine.conftest import MODEL, TIMEOUT_S, Cluster, wait_until

QUESTIONS = [pair["question"] for pair in json.loads((MODEL / "questions.json").read_text())][:60]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
GREEDY = SamplingParams(temperature=0)
ENDLESS = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)

_SCRIPT = """
import json, sys
from raytp import LLM, SamplingParams
with LLM.connect(sys.argv[1]) as llm:
    outputs = llm.chat(json.load(sys.stdin), SamplingParams(temperature=0))
print(json.dumps([output.text for output in outputs]))
"""
_ENDLESS_SCRIPT = """
import sys
from raytp import LLM, SamplingParams
llm = LLM.connect(sys.argv[1])
endless = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)
print("connected", flush=True)
llm.generate([[5 + i % 1000] for i in range(4000)], endless)
"""


def is_idle(llm: LLM) -> bool:
    """Nothing waits or runs, and every block is free."""
    stats = llm.stats()
    return (stats.num_waiting, stats.num_running, stats.num_free_blocks) == (0, 0, llm.info.num_kv_blocks)


@pytest.fixture(scope="module")
def private_answers(cluster: Cluster) -> list[str]:
    """What an engine of one's own answers."""
    with LLM(MODEL, 2) as llm:
        return [output.text for output in llm.chat(CHATS, GREEDY)]


def test_three_jobs_at_once_get_the_answers_of_a_private_engine(
    cluster: Cluster, private_answers: list[str], trivia: str, tmp_path: Path
) -> None:
    rows = [{"id": i, "messages": chat} for i, chat in enumerate(CHATS)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows))
    batch = cluster.start_raytp("batch", source, target, "--engine", trivia, "--temperature", 0, "--ordered")
    with (tmp_path / "chats.json").open("w+") as chats:
        chats.write(json.dumps(CHATS))
        chats.seek(0)
        script = cluster.start("-c", _SCRIPT, trivia, stdin=chats)
    with LLM.connect(trivia) as llm:
        assert llm.model_name == "trivia"
        assert len(llm.info.hostnames) == 2
        assert [output.text for output in llm.chat(CHATS, GREEDY)] == private_answers
    out, errors = script.communicate(timeout=TIMEOUT_S)
    assert script.returncode == 0, errors
    assert json.loads(out) == private_answers
    _, errors = batch.communicate(timeout=TIMEOUT_S)
    assert batch.returncode == 0, errors
    assert [json.loads(line)["text"] for line in target.read_text().splitlines()] == private_answers


def test_a_batch_goes_on_with_the_model_that_it_began_with(trivia: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"id": 1, "messages": CHATS[0]}))
    first = raytp.batch(source, tmp_path / "out.jsonl", engine=trivia, sampling_params=GREEDY)
    assert (first.status, first.num_rows) == ("complete", 1)
    same = shutil.copytree(MODEL, tmp_path / "trivia")  # a model has the name of its folder
    again = raytp.batch(source, tmp_path / "out.jsonl", model=same, sampling_params=GREEDY)
    assert again.status == "complete"
    with pytest.raises(BatchError, match="model"):
        raytp.batch(source, tmp_path / "out.jsonl", model=MODEL, sampling_params=GREEDY)
    with pytest.raises(ConfigError, match="trivia runs already, with its own model"):
        raytp.batch(source, tmp_path / "other.jsonl", engine=trivia, model=MODEL)


def test_one_prompt_from_the_command(cluster: Cluster, private_answers: list[str], trivia: str) -> None:
    status, out, errors = cluster.raytp("generate", QUESTIONS[0], "--engine", trivia, "--temperature", 0)
    assert (status, out) == (0, private_answers[0] + "\n"), errors
    status, _, errors = cluster.raytp("generate", "x", "--engine", trivia, "-t", 2)
    assert (status, "leave out all others" in errors) == (2, True)


def test_the_list_of_engines_with_their_load(cluster: Cluster, trivia: str) -> None:
    with LLM.connect(trivia) as llm:
        wait_until(lambda: is_idle(llm))
        streams = [llm.stream([5 + i], ENDLESS) for i in range(3)]
        for stream in streams:
            next(stream)
        running = json.loads(cluster.raytp("engines", "--json")[1])
        hosts = list(llm.info.hostnames)
    assert (running["name"], running["model_name"], running["stage"]) == (trivia, "trivia", "ready")
    assert (running["num_ranks"], running["info"]["hostnames"]) == (2, hosts)
    wait_until(lambda: json.loads(cluster.raytp("engines", "--json")[1])["stats"]["num_running"] == 0)
    heading, row = cluster.raytp("engines")[1].splitlines()
    assert heading.split() == ["name", "model", "ranks", "nodes", "state", "load"]
    assert row.split() == f"trivia trivia 2 {hosts[0]} ready 0 running, 0 waiting, KV cache 0%".split()


def test_shutdown_ends_what_this_caller_has_running_and_no_more(trivia: str) -> None:
    with LLM.connect(trivia) as other:
        one = LLM.connect(trivia)
        ours, theirs = one.stream([5], ENDLESS), other.stream([6], ENDLESS)
        num_tokens = len(next(ours).token_ids) and len(next(theirs).token_ids)
        assert other.stats().num_running == 2
        one.shutdown()
        one.shutdown()
        wait_until(lambda: other.stats().num_running == 1)
        with pytest.raises(EngineClosedError, match="connection to engine trivia has been shut down: connect again"):
            list(ours)
        with pytest.raises(EngineClosedError):
            one.stats()
        assert num_tokens + sum(len(chunk.token_ids) for chunk in theirs) == 450
        assert is_idle(other)


def test_a_killed_caller_is_forgotten_and_one_that_pauses_is_not(cluster: Cluster, trivia: str) -> None:
    with LLM.connect(trivia) as llm:
        script = cluster.start("-c", _ENDLESS_SCRIPT, trivia)
        wait_until(lambda: llm.stats().num_waiting, TIMEOUT_S)
        os.killpg(script.pid, signal.SIGKILL)
        script.communicate()
        start = llm.stats()
        assert start.num_running == 256
        paused = llm.stream([7], ENDLESS)
        num_tokens = len(next(paused).token_ids)
        wait_until(lambda: is_idle(llm), 60)
        num_computed = llm.stats().num_computed_tokens - start.num_computed_tokens
        assert num_computed < 1024 * 450 / 2, "they were ended before their time"
        assert num_tokens + sum(len(chunk.token_ids) for chunk in paused) == 450


def test_names_that_there_are_not(cluster: Cluster, trivia: str) -> None:
    with pytest.raises(EngineNotFoundError, match="no engine is called 'nobody' in this cluster: there are trivia"):
        LLM.connect("nobody")
    status, out, errors = cluster.raytp("stop", "nobody")
    assert (status, out) == (1, "")
    assert "no engine is called 'nobody' in this cluster: there are trivia" in errors


def test_names_that_cannot_be_had(cluster: Cluster, trivia: str) -> None:
    status, out, errors = cluster.raytp("serve-engine", trivia, "--model", MODEL)
    assert (status, out) == (2, "")
    assert "there is an engine trivia already: choose another name, or end it with raytp stop trivia" in errors
    for name in ("", "-x", "a b", "a/b", "a" * 65):
        with pytest.raises(ConfigError, match="cannot be called"):
            check_name(name)
