"""Batch jobs as people run them on Ray: `ray job submit`, from a folder that has nothing but the input."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.batch.commands import check_chats, write_chats
from tests.cluster.commands import ROOT, shell_blocks
from tests.cluster.local_cluster import BIN, LocalCluster

MODEL = ROOT / "tests" / "models" / "tiny-qwen3-trivia"
DOCUMENT = (ROOT / "docs" / "clusters.md").read_text()
PAIRS = [(pair["question"], pair["answer"]) for pair in json.loads((MODEL / "questions.json").read_text())]
TIMEOUT_S = 180
RESERVED = """
import json, time, ray
from ray.util import placement_group_table
ray.init(log_to_driver=False, logging_level=40)
while True:
    total, free = ray.cluster_resources(), ray.available_resources()
    if total != ray.cluster_resources():
        continue  # a node has come or gone in the meantime
    taken = {each: total.get(each, 0) - free.get(each, 0) for each in ("CPU", "GPU")}
    groups = [(g["state"], list(g["bundles"].values())) for g in placement_group_table().values()]
    nodes = sorted(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
    print(json.dumps({"taken": taken, "groups": groups, "gpus": nodes}), flush=True)
    time.sleep(0.05)
"""
"""Says what the cluster has given away, many times a second."""


def ray(cluster: LocalCluster, *arguments: Any, cwd: Path | None = None) -> tuple[int, str]:
    """Exit status and output of the `ray` command."""
    return run(cluster, BIN / "ray", *arguments, cwd=cwd)


def run(cluster: LocalCluster, *command: Any, cwd: Path | None) -> tuple[int, str]:
    """Exit status and output of a command on a node of the cluster."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout


def submit(cluster: LocalCluster, folder: Path, job: str, *entrypoint: Any, wait: bool = True) -> tuple[int, str]:
    options = ["--submission-id", job, "--working-dir", "."] + ([] if wait else ["--no-wait"])
    return ray(cluster, "job", "submit", *options, "--", *entrypoint, cwd=folder)


def write_input(folder: Path, num_rows: int) -> Path:
    """A folder with in.jsonl and nothing else."""
    folder.mkdir()
    with open(folder / "in.jsonl", "w") as opened:
        for row in range(num_rows):
            question = PAIRS[row % len(PAIRS)][0]
            opened.write(json.dumps({"id": f"row-{row}", "prompt": question, "temperature": 0}) + "\n")
    return folder


def check_answers(output: Path, num_rows: int) -> None:
    """Every row once, answered as the model knows it."""
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert Counter(record["id"] for record in records) == Counter(f"row-{row}" for row in range(num_rows))
    for record in records:
        assert record["text"] == PAIRS[int(record["id"][4:]) % len(PAIRS)][1]


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return value


def log(cluster: LocalCluster, job: str) -> str:
    with urllib.request.urlopen(f"{cluster.dashboard}/api/jobs/{job}/logs") as answer:
        return json.load(answer)["logs"]


def is_running(cluster: LocalCluster, job: str) -> bool:
    with urllib.request.urlopen(f"{cluster.dashboard}/api/jobs/{job}") as answer:
        return json.load(answer)["status"] in ("PENDING", "RUNNING")


def left_behind(cluster: LocalCluster) -> list[str]:
    """Processes of jobs and engines."""
    kinds = ("raytp batch", "ray::RankActor", "ray::Driver", "ray::JobSupervisor")
    return [title for title in cluster.processes().values() if any(kind in title for kind in kinds)]


class Watch:
    """What has been reserved in the cluster since it was made."""

    def __init__(self, cluster: LocalCluster) -> None:
        command = [BIN / "python", "-c", RESERVED]
        self._process = subprocess.Popen(command, env=cluster.env, stdout=subprocess.PIPE, text=True)
        self.states: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        until(lambda: self.states, "nothing is known of the cluster")

    def close(self) -> list[dict[str, Any]]:
        self._process.kill()
        self._thread.join()
        return self.states

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("}\n"):
                self.states.append(json.loads(line))


def test_a_job_is_stopped_and_submitted_again(cluster: LocalCluster, tmp_path: Path) -> None:
    num_rows = 15 * len(PAIRS)
    folder, output = write_input(tmp_path / "job", num_rows), tmp_path / "out.jsonl"
    batch = ["raytp", "batch", "in.jsonl", output, "--model", MODEL, "-t", 2, "--device", "cpu"]
    code, said = submit(cluster, folder, "first", *batch, wait=False)
    assert code == 0, said
    has_begun = re.compile(r"\d of about [\d,]+ rows \(\d+%\), 0 failed \| [\d,]+ tok/s in, .* left\n")
    until(lambda: has_begun.search(log(cluster, "first")) or not is_running(cluster, "first"), "no line of progress")
    assert sum("RankActor" in each for each in left_behind(cluster)) == 2, log(cluster, "first")
    code, said = ray(cluster, "job", "stop", "first")
    assert "was stopped" in said, said
    until(lambda: not left_behind(cluster), "the stopped job left processes")
    num_done = sum(len(part.read_text().splitlines()) for part in (tmp_path / "out.jsonl.parts").glob("part-*"))
    assert 0 < num_done < num_rows
    assert not output.exists()

    (folder / "notes.txt").write_text("The folder need not be what it was; only the input must.")
    code, said = submit(cluster, folder, "second", *batch)
    assert code == 0, said
    assert f"{num_rows:,} rows, 0 failed, {num_done:,} done earlier; " in said
    check_answers(output, num_rows)
    until(lambda: not left_behind(cluster), "the finished job left processes")


def test_the_real_model_answers_real_questions_in_a_job(
    cluster: LocalCluster, real_chats: list[tuple[str, Any]], tmp_path: Path
) -> None:
    """In OpenAI's format; the job's log has the summary."""
    folder, output = tmp_path / "job", tmp_path / "out.jsonl"
    folder.mkdir()
    write_chats(folder / "in.jsonl", real_chats)
    code, said = submit(cluster, folder, "real", "raytp", "batch", "in.jsonl", output, "-t", 2, "--device", "cpu")
    assert code == 0, said
    assert "200 rows, 0 failed; " in said
    check_chats([json.loads(line) for line in output.read_text().splitlines()], real_chats)
    until(lambda: not left_behind(cluster), "the finished job left processes")


def test_a_head_without_cpus_waits_for_the_gpus_of_the_job_and_not_one_more(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    until(lambda: "cpu_worker" not in ray(cluster, "status")[1], "the idle workers did not go")
    folder = write_input(tmp_path / "job", 1)
    with closing(Watch(cluster)) as watch:
        batch = ["raytp", "batch", "in.jsonl", tmp_path / "out.jsonl", "--model", MODEL, "-t", 2]
        code, said = submit(cluster, folder, "gpus", *batch)
        until(lambda: not left_behind(cluster), "the failed job left processes")
        until(lambda: not any(watch.states[-1]["taken"].values()), "the failed job left what it had reserved")
        states = watch.close()
    # The GPUs of the node that the autoscaler has added are only a count, so that is how far the job can come.
    assert code != 0
    assert "can use none there: install the NVIDIA driver and a CUDA build of torch" in said
    assert max(state["taken"]["GPU"] for state in states) == 2
    assert max(state["taken"]["CPU"] for state in states) == 0
    created = [bundles for state in states for status, bundles in state["groups"] if status == "CREATED"]
    assert created
    assert all(bundles == [{"GPU": 1.0}, {"GPU": 1.0}] for bundles in created)
    assert max(len(state["gpus"]) for state in states) == 2  # the head and one worker


def test_the_commands_of_the_document_do_what_it_says(cluster: LocalCluster, tmp_path: Path) -> None:
    [block] = [each for each in shell_blocks(DOCUMENT) if "--submission-id answers-2" in each]
    here = {
        "http://127.0.0.1:8265": cluster.dashboard,
        "/shared": str(tmp_path),
        "Qwen/Qwen3-8B": str(MODEL),
        "-t 4 --device cuda": "-t 2 --device cpu",
    }
    for theirs, ours in here.items():
        assert theirs in block
        block = block.replace(theirs, ours)
    folder = write_input(tmp_path / "job", 50)
    code, said = run(cluster, "bash", "-c", block, cwd=folder)
    assert code == 0, said
    first, second = said.split("answers-2' submitted successfully")
    assert "50 rows, 0 failed; " in first
    assert "50 rows, 0 failed, 50 done earlier; " in second
    check_answers(tmp_path / "answers.jsonl", 50)


def test_the_script_for_ray_submit_runs_alone_on_the_head(cluster: LocalCluster, tmp_path: Path) -> None:
    folder, output = write_input(tmp_path / "job", 20), tmp_path / "out.jsonl"
    with open(folder / "in.jsonl", "a") as opened:
        opened.write('{"id": "row-20"}\n')
    script = shutil.copy(ROOT / "examples" / "submit_batch.py", tmp_path)
    arguments = [folder / "in.jsonl", output, "--model", MODEL, "-t", 2, "--device", "cpu"]
    code, said = run(cluster, BIN / "python", script, *arguments, cwd=tmp_path)
    assert code == 3, said
    assert "21 rows, 1 failed; " in said
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["id"] for record in records if record["error_code"]] == ["row-20"]
    until(lambda: not left_behind(cluster), "the script left processes")


def test_an_output_in_the_jobs_own_folder_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    folder = write_input(tmp_path / "job", 1)
    code, said = submit(cluster, folder, "lost", "raytp", "batch", "in.jsonl", "out.jsonl", "--model", MODEL)
    assert code != 0
    assert "out.jsonl would be written to the job's copy of --working-dir" in said
