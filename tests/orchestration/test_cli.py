"""The `raytp` command as a shell sees it: real processes, a real engine, the tiny model that knows its answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from raytp.cli.generate import read_prompts
from tests.orchestration.terminal import Terminal
from workers.kernels.attention import select_backend
from workers.model_config import load_model_config
from workers.models.decoder import CausalLM
from workers.parallel import TensorParallel
from workers.shard_plan import plan_shards

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"


QUESTIONS = {pair["question"]: pair["answer"] for pair in json.loads((MODEL / "questions.json").read_text())}


GALAXY = "What is the name of the nearest major galaxy to the Milky Way?"


PRESIDENT = "Who was the 37th President of the United States?"


COMMAND = [sys.executable, "-m", "raytp.cli"]


TIMEOUT_S = 120


MARK = "RAYTP_TEST_RUN"


STOPPING = "stopping, which may take a few seconds\n"


@pytest.fixture
def run_env() -> Iterator[dict[str, str]]:
    """An environment that marks all processes of one run; no marked process may be left at the end."""
    outside = {key: text for key, text in os.environ.items() if key != "RAY_ADDRESS"}
    own = {MARK: uuid.uuid4().hex, "RAY_AUTH_MODE": "disabled", "COLUMNS": "100", "NO_COLOR": "1"}
    yield outside | own
    deadline = time.monotonic() + 15
    while (left := processes_of(own)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def processes_of(env: dict[str, str]) -> list[str]:
    """Command lines of the processes that carry the mark of `env`."""
    mark = f"{MARK}={env[MARK]}"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # gone in the meantime, or not ours
            continue
    return found


@pytest.fixture
def raytp(run_env: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        source = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(
            [*COMMAND, *arguments], capture_output=True, text=True, env=run_env, timeout=TIMEOUT_S, **source
        )

    return run


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without an EOS: after its answer it goes on until it is stopped."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(MODEL, folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        content["eos_token_id"] = None
        if name == "config.json":
            content["max_position_embeddings"] = 100_000
        (folder / name).write_text(json.dumps(content))
    return folder


def test_generate_prints_the_answer_alone_on_stdout(raytp):
    done = raytp("generate", PRESIDENT, "--model", str(MODEL), "-t", "2")
    assert (done.returncode, done.stdout) == (0, QUESTIONS[PRESIDENT] + "\n")
    assert re.search(r"\d+ tokens in [\d.]+ s, [\d.]+ tok/s; \d+ prompt tokens, 0 cached\n$", done.stderr)
    stages = done.stderr.splitlines()
    assert stages.index("starting Ray") < stages.index("starting ranks"), "a log says how far it is"


def test_piped_lines_become_json_objects_in_order(raytp):
    questions = [GALAXY, PRESIDENT]
    done = raytp("generate", "--lines", "--json", "--quiet", "--model", str(MODEL), stdin="\n\n".join(questions))
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == questions
    assert [answer["text"] for answer in answers] == [QUESTIONS[question] for question in questions]
    for answer in answers:
        assert answer["finish_reason"] == "stop"
        assert answer["error"] is None
        assert answer["num_tokens"] == len(answer["token_ids"]) > 0
        assert answer["num_prompt_tokens"] > 0
        assert 0 < answer["first_token_s"] <= answer["finished_s"]


def test_a_line_ends_at_a_newline_alone(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\x0c\u2028still one\n\ntwo\n")
    assert read_prompts(None, file, is_by_line=True) == ["one\x0c\u2028still one", "two"]


def test_one_prompt_that_cannot_be_served_fails_alone(raytp, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(f"{'too long ' * 1000}\n{GALAXY}\n")
    done = raytp("generate", "--lines", "--file", str(file), "--model", str(MODEL))
    assert (done.returncode, done.stdout) == (1, QUESTIONS[GALAXY] + "\n")
    assert re.search(r"^error: prompt 1: .*512", done.stderr, re.MULTILINE)


def test_chat_through_a_pipe_remembers_until_reset(raytp):
    turns = [PRESIDENT, GALAXY, "/reset", GALAXY, "/exit", "never asked"]
    done = raytp("chat", "--model", str(MODEL), stdin="\n".join(turns))
    assert done.returncode == 0
    first, _, last = done.stdout.splitlines()
    assert (first, last) == (QUESTIONS[PRESIDENT], QUESTIONS[GALAXY])
    numbers = re.findall(r"(\d+) prompt tokens, (\d+) cached", done.stderr)
    prompt_tokens, cached_tokens = zip(*[map(int, pair) for pair in numbers], strict=True)
    assert prompt_tokens[1] > prompt_tokens[2]
    assert cached_tokens[0] == 0
    # All but the block that the first turn had not filled, at least as far as its prompt went.
    assert cached_tokens[1] >= prompt_tokens[0] // 16 * 16 > 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "no/such/folder", "hello"], 1, "there is no model at no/such/folder"),
        (["--model", str(MODEL), "--max-tokens", "0", "hello"], 2, "max_tokens=0 is out of range"),
        (["--model", str(MODEL), "--temperature", "nan", "hello"], 2, "temperature=nan is out of range"),
        (["--model", str(MODEL), "--device", "tpu", "hello"], 2, "device='tpu' must be one of"),
        (["--model", str(MODEL), ""], 1, "the prompt is empty"),
        (["--model", str(MODEL)], 1, "the prompt is empty: standard input"),
    ],
)
def test_an_error_is_one_line_before_anything_starts(raytp, arguments, code, message):
    start = time.monotonic()
    done = raytp("generate", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "arguments",
    [["generate", "a prompt", "--file", __file__], ["generate", "--file", "no-such-file"], ["generate", "--no-such"]],
)
def test_wrong_usage_exits_2(raytp, arguments):
    done = raytp(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: raytp generate" in done.stderr


def test_alone_it_shows_its_commands(raytp):
    done = raytp()
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("generate", "chat", "info", "Examples"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_info_counts_what_the_ranks_really_allocate(raytp, world_size):
    arguments = ["--tensor-parallel-size", str(world_size), "--memory", "0.5", "--dtype", "float32", "--json"]
    shown = json.loads(raytp("info", str(MODEL), *arguments).stdout)
    config = load_model_config(MODEL)
    shards = plan_shards(num_q_heads=8, num_kv_heads=4, intermediate_size=384, vocab_size=2048, world_size=world_size)
    backend = select_backend("torch", torch.device("cpu"), block_size=16)
    fitting = []
    for shard, rank in zip(shards, shown["ranks"], strict=True):
        model = CausalLM(config, shard, TensorParallel.single(), backend, torch.float32, torch.device("cpu"))
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        kv_bytes = 4 * 2 * shard.kv_heads.size * 64 * torch.float32.itemsize  # layers, K and V, heads, head size
        assert (rank["weight_bytes"], rank["kv_bytes_per_token"]) == (weight_bytes, kv_bytes)
        assert rank["q_heads"] == {"start": shard.q_heads.start, "size": shard.q_heads.size}
        fitting.append((2**29 - weight_bytes) // kv_bytes)
    assert shown["num_kv_cache_tokens"] == min(fitting)
    assert shown["num_parameters"] == 1_640_064


def test_info_imports_no_torch_and_says_when_nothing_fits(run_env):
    program = (
        "import sys; from raytp.cli import app\n"
        "try: app()\n"
        "finally: print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "info", str(MODEL), "--memory", "0.001"],
        capture_output=True,
        text=True,
        env=run_env,
        timeout=TIMEOUT_S,
    )
    *_, fitting, imported = done.stdout.splitlines()
    assert "0 tokens of KV cache" in fitting
    assert imported == "[]"


def test_interrupt_ends_a_long_answer_and_every_process(run_env, endless_model):
    process = start_endless(endless_model, run_env)
    assert process.stdout.read(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its foreground
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == STOPPING + "interrupted\n"


def test_interrupt_while_ray_starts_neither_hangs_nor_is_lost(run_env):
    process = start_endless(MODEL, run_env)
    deadline = time.monotonic() + 30
    while len(processes_of(run_env)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    start = time.monotonic()
    assert process.stderr.readline() == STOPPING
    assert time.monotonic() - start < 2, "it is answered at once, although Ray goes on starting"
    answer, errors = process.communicate(timeout=60)
    assert (process.returncode, answer, errors) == (130, "", "interrupted\n")


def test_sigterm_ends_it_quietly(run_env, endless_model):
    """Ray, left to itself, answers it by an abort with a trace."""
    process = start_endless(endless_model, run_env)
    assert process.stdout.read(1)
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (143, "")


def test_a_full_disk_under_its_answers_is_an_error(run_env):
    with open("/dev/full", "w") as full:
        command = [*COMMAND, "info", str(MODEL)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=run_env, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_a_reader_that_goes_away_ends_it_quietly(run_env, endless_model):
    process = start_endless(endless_model, run_env)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=20) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def start_endless(model: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "generate", GALAXY, "--model", str(model), "--max-tokens", "90000", "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def test_at_a_terminal_ctrl_c_stops_the_answer_and_then_the_session(run_env, endless_model):
    with Terminal([*COMMAND, "chat", "--model", str(endless_model), "--max-tokens", "90000"], run_env) as terminal:
        terminal.wait_for("> ")
        terminal.type(GALAXY + "\r")
        terminal.wait_for(QUESTIONS[GALAXY])
        terminal.type("\x03")
        terminal.wait_for("; stopped")
        terminal.wait_for("> ")
        terminal.type("/reset\r")
        terminal.wait_for("> ")
        terminal.type(PRESIDENT + "\r")
        terminal.wait_for(QUESTIONS[PRESIDENT])
        terminal.type("\x03")
        terminal.wait_for("; stopped")
        terminal.wait_for_prompt()
        terminal.type("\x03")
        terminal.wait_for("again")
        terminal.wait_for_prompt()
        terminal.type("\x03")
        assert terminal.exit_code(timeout_s=20) == 0
