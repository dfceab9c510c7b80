"""Real replicas, their ranks killed and their nodes lost: every row is answered once, and rightly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

import raytp
from raytp.config import EngineConfig
from raytp.errors import ConfigError
from raytp.replicas.pool import ReplicaPool
from raytp.replicas.starting import prepare_start
from raytp.scaling import Scaler
from scheduler.sampling_params import SamplingParams
from tests.batch.commands import ENV, MODEL, PAIRS, chat_request, read, run, write
from tests.replicas.leftovers import ours, wait_until_nothing_is_left

GREEDY = SamplingParams(temperature=0, max_tokens=40)
ROOT = Path(__file__).parents[2]


def test_ranks_killed_beyond_recovery_and_a_pool_that_shrinks_lose_and_repeat_nothing(ray_session):
    before = ours()
    config = EngineConfig(device="cpu", max_num_seqs=8, max_restarts=0, cpu_kv_cache_gib=0.1)
    wanted, is_enough = [2], []

    def jobs():
        for i in count():
            if is_enough:
                return
            yield i, [{"role": "user", "content": PAIRS[i % len(PAIRS)][0]}], GREEDY

    def changes(pool):
        """What is done to the pool, and when it is time for the next."""
        while not all(replica.num_done > 20 for replica in pool.replicas) or len(pool.replicas) < 2:
            yield
        first_two = set(pool.replicas)
        os.kill(min(ours("RankActor")[0] - before[0]), signal.SIGKILL)
        while first_two <= set(pool.replicas) or len(pool.replicas) < 2 or pool.replicas[1].num_done < 20:
            yield
        assert len(first_two & set(pool.replicas)) == 1
        wanted[0] = 1
        while len(pool.replicas) > 1:
            yield
        done = pool.replicas[0].num_done
        while pool.replicas[0].num_done < done + 20:
            yield
        is_enough.append(True)

    outputs = {}
    start = prepare_start(MODEL, config, num_replicas=2)
    with ReplicaPool(start, Scaler(lambda seen: wanted[0], 1, 2), show_progress=False) as pool:
        steps = changes(pool)
        for result in pool.complete(jobs()):
            if result is not None:
                assert result[0] not in outputs
                outputs[result[0]] = result[1]
            next(steps, None)
    assert is_enough
    assert sorted(outputs) == list(range(len(outputs)))
    assert all(output.text == PAIRS[i % len(PAIRS)][1] for i, output in outputs.items())
    wait_until_nothing_is_left(before)


def test_a_node_that_comes_gets_a_replica_and_its_rows_are_done_elsewhere_when_it_goes():
    command = [sys.executable, "-m", "tests.replicas.node_comes_and_goes"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    told = json.loads(line)
    assert told["num_ready"][0] == 1
    assert max(told["num_ready"]) == 2
    assert told["num_lost"] > 0, "the node had no rows when it was lost"
    texts = told["texts"]
    assert [text for _, text in sorted(texts)] == [PAIRS[i % len(PAIRS)][1] for i in range(len(texts))]


def test_a_job_of_two_replicas_by_a_policy(ray_session, tmp_path):
    before = ours()
    source = write(tmp_path / "in.jsonl", [chat_request(f"q-{i}", PAIRS[i % len(PAIRS)][0]) for i in range(200)])
    seen = []
    settings = {"model": MODEL, "show_progress": False, "cpu_kv_cache_gib": 0.1}
    summary = raytp.batch(
        source, tmp_path / "out.jsonl", replicas="1:2", policy=lambda now: seen.append(now) or 2, **settings
    )
    assert (summary.status, summary.num_succeeded) == ("complete", 200)
    assert (summary.max_replicas, summary.max_nodes) in ((1, 1), (2, 1))
    assert f"at most {summary.max_replicas} replica" in summary.as_text()
    answers = {each["custom_id"]: each["response"]["body"] for each in read(tmp_path / "out.jsonl")}
    for i in range(200):
        assert answers[f"q-{i}"]["choices"][0]["message"]["content"] == PAIRS[i % len(PAIRS)][1]
    assert (seen[0].min_replicas, seen[0].max_replicas, seen[0].num_ready) == (1, 2, 0)
    wait_until_nothing_is_left(before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": "2:1"}, "replicas is '2:1': MIN must be at least 1"),
        ({"replicas": 2, "engine": "qwen"}, "leave out replicas"),
        ({"policy": "queue:10"}, "give replicas too"),
        ({"replicas": 2, "policy": "often"}, "policy 'often' is not known"),
    ],
)
def test_settings_that_contradict_one_another_are_refused_before_anything_starts(tmp_path, settings, message):
    source = write(tmp_path / "in.jsonl", [chat_request("a", "b")])
    with pytest.raises(ConfigError, match=message):
        raytp.batch(source, tmp_path / "out.jsonl", **settings)


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    code, out, errors = run(write(tmp_path / "in.jsonl", [chat_request("a", "b")]), tmp_path / "out", "--replicas", "x")
    assert (code, out) == (2, "")
    assert errors == "error: replicas is 'x', and must be COUNT or MIN:MAX, such as 4 or 1:16\n"
