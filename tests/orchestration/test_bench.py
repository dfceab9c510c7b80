"""`raytp bench`: its workloads, its floor against brute force, and the command itself with a real engine on the CPU."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch

import raytp.bench
from raytp.bench.floor import Floor, Hardware, compute_floor, hardware_of
from raytp.bench.plan import make_plan
from raytp.bench.record import append_records, read_records
from raytp.bench.workloads import WORKLOADS, Case, make_cases
from raytp.errors import ConfigError
from workers.device_profile import summarize_kernels
from workers.model_config import kv_bytes_per_token, load_model_config, num_parameters

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
SHAPES = Path(raytp.bench.__file__).parent / "shapes"
H200 = hardware_of(("NVIDIA H200",), "bfloat16")
TIMEOUT_S = 180


def test_throughput_is_nano_vllms_workload():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    (case,) = make_cases("throughput", None, vocab_size=151_936)
    assert (case.prompts, case.output_lens) == (prompts, lengths)
    assert (case.num_prompt_tokens, case.num_output_tokens) == (142_827, 133_966)


def test_the_other_workloads_have_the_promised_sizes():
    latency = make_cases("latency", None, 151_936)
    assert [len(case.prompts) for case in latency] == [1, 8, 64, 256]
    for case in latency:
        assert {len(prompt) for prompt in case.prompts} == {128}
        assert set(case.output_lens) == {129}
    (shared,) = make_cases("shared-prefix", None, 151_936)
    assert {len(prompt) for prompt in shared.prompts} == {2100}
    assert len({tuple(prompt[:2000]) for prompt in shared.prompts}) == 1
    assert len({tuple(prompt[2000:2016]) for prompt in shared.prompts}) == len(shared.prompts) == 256
    (prefill,) = make_cases("prefill", None, 151_936)
    assert [len(prompt) for prompt in prefill.prompts] == [2048] * 64
    assert prefill.output_lens == [1] * 64


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_smaller_workload_fits_a_smaller_vocabulary(workload):
    for case in make_cases(workload, 3, vocab_size=50):
        assert len(case.prompts) <= 3
        assert max(max(prompt) for prompt in case.prompts) < 50
        assert case.longest_sequence <= 4096


def brute_force_floor(model, case: Case, hardware: Hardware, max_num_seqs: int) -> Floor:
    """Step by step, token by token, in a schedule that needs the fewest steps: the longest requests first."""
    left = {index: n - 1 for index, n in enumerate(case.output_lens)}
    lengths = {index: len(prompt) for index, prompt in enumerate(case.prompts)}
    kv_bytes = kv_bytes_per_token(model, model.num_key_value_heads, 2)
    num_steps = num_live = 0
    while any(left.values()):
        rows = sorted((i for i in left if left[i]), key=lambda i: -left[i])[:max_num_seqs]
        num_steps += 1
        num_live += case.num_shared_tokens
        for index in rows:
            left[index] -= 1
            lengths[index] += 1
            num_live += lengths[index] - case.num_shared_tokens
    flop = 0
    for index, prompt in enumerate(case.prompts):
        for position in range(0 if index == 0 else case.num_shared_tokens, len(prompt)):
            flop += 2 * num_parameters(model)
            flop += model.num_hidden_layers * model.num_attention_heads * (position + 1) * 2 * 2 * model.head_dim
    return Floor(
        weights_s=num_steps * 2 * num_parameters(model) / hardware.bytes_per_s,
        kv_cache_s=num_live * kv_bytes / hardware.bytes_per_s,
        prefill_s=flop / hardware.flop_per_s,
    )


@pytest.mark.parametrize("max_num_seqs", [2, 5])
@pytest.mark.parametrize("num_shared_tokens", [0, 7])
def test_floor_is_what_counting_each_step_and_token_gives(max_num_seqs, num_shared_tokens):
    model = load_model_config(MODEL)
    lengths = [(9, 4), (12, 1), (30, 6), (8, 3), (11, 6)]
    case = Case(
        prompts=[list(range(n)) for n, _ in lengths],
        output_lens=[n for _, n in lengths],
        num_shared_tokens=num_shared_tokens,
    )
    hardware = Hardware(bytes_per_s=1e9, flop_per_s=3e9)
    counted = brute_force_floor(model, case, hardware, max_num_seqs)
    for num_ranks in (1, 4):
        floor = compute_floor(
            model, case, hardware=hardware, dtype="bfloat16", num_ranks=num_ranks, max_num_seqs=max_num_seqs
        )
        for part in ("weights_s", "kv_cache_s", "prefill_s", "total_s"):
            assert getattr(floor, part) * num_ranks == pytest.approx(getattr(counted, part))


def test_floor_of_the_throughput_workload_on_an_h200():
    """Against figures worked out by hand for nano-vLLM's benchmark: 142,827 tokens in, 133,966 out, 1,023 decodes."""
    (case,) = make_cases("throughput", None, 151_936)
    settings = {"hardware": H200, "dtype": "bfloat16", "num_ranks": 1, "max_num_seqs": 256}
    large = compute_floor(load_model_config(SHAPES / "qwen3-8b"), case, **settings)
    assert large.total_s == pytest.approx(11.0, rel=0.03)
    small = compute_floor(load_model_config(SHAPES / "qwen3-0.6b"), case, **settings)
    assert small.kv_cache_s + small.prefill_s == pytest.approx(3.4, rel=0.03)
    assert small.weights_s == pytest.approx(1023 * 2 * 596e6 / 4.3e12, rel=0.01)


def test_no_floor_for_what_was_not_measured():
    assert hardware_of(("CPU",), "float32") is None
    assert hardware_of(("NVIDIA H200",), "float32") is None
    assert hardware_of(("NVIDIA H200", "NVIDIA L4"), "bfloat16") is None


def test_busy_time_counts_overlapping_kernels_once():
    rng = random.Random(1)
    kernels = []
    for _ in range(60):
        start = rng.randrange(1000)
        kernels.append((rng.choice("abc"), float(start), float(start + rng.randrange(1, 30))))
    busy = {us for _, start, end in kernels for us in range(int(start), int(end))}
    profile = summarize_kernels(kernels)
    assert profile.busy_s == pytest.approx(len(busy) / 1e6)
    assert profile.window_s == pytest.approx((max(busy) + 1 - min(busy)) / 1e6)
    total = sum(end - start for _, start, end in kernels)
    shares = {name: sum(e - s for n, s, e in kernels if n == name) / total for name in "abc"}
    assert dict(profile.top_kernels) == pytest.approx(shares)
    assert [share for _, share in profile.top_kernels] == sorted(shares.values(), reverse=True)


def test_records_are_appended_and_nothing_else_is_overwritten(tmp_path):
    file = tmp_path / "results.json"
    append_records(file, [{"run": 1}])
    append_records(file, [{"run": 2}, {"run": 3}])
    assert read_records(file) == [{"run": 1}, {"run": 2}, {"run": 3}]
    assert list(tmp_path.iterdir()) == [file]
    for content in ('{"run": 1}', "no json"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="cannot be added to"):
            append_records(file, [{"run": 4}])
        assert file.read_text() == content


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"RAY_AUTH_MODE": "disabled", "COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "raytp.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIMEOUT_S, check=False)


def test_the_command_measures_and_records(tmp_path):
    file = tmp_path / "results.json"
    file.write_text('[{"workload": "of before"}]')
    options = ["--num-prompts", "8", "--runs", "2", "--profile", "--device", "cpu", "--json", str(file)]
    start = datetime.now(timezone.utc)
    done = bench(str(MODEL), "--workload", "latency", *options)
    assert done.returncode == 0, done.stderr
    assert "tiny-qwen3-trivia on 1 x CPU" in done.stdout
    assert "run 2 of 2" in done.stderr
    before, record = json.loads(file.read_text())
    assert before == {"workload": "of before"}
    check_latency_record(record)
    assert timedelta(0) < datetime.fromisoformat(record["date"]) - start + timedelta(seconds=1)
    assert record["command"].startswith("raytp bench ")


def check_latency_record(record) -> None:
    assert (record["workload"], record["model"]) == ("latency", "tiny-qwen3-trivia")
    assert (record["tensor_parallel_size"], record["gpu"]) == (1, ["CPU"])
    assert record["engine"]["max_model_len"] == 512
    num_seqs = 1 + 8
    assert record["num_prompt_tokens"] == 128 * num_seqs
    assert record["num_output_tokens"] == 129 * num_seqs
    runs = record["seconds_of_runs"]
    assert len(runs) == 2
    assert record["seconds"] == pytest.approx(sum(runs) / 2)
    assert record["output_tokens_per_s"] == pytest.approx(129 * num_seqs / record["seconds"])
    assert set(record["step_ms"]) == {"1", "8"}
    assert sum(record["step_ms"].values()) * 129 / 1e3 == pytest.approx(record["seconds"])
    assert record["cached_share"] == 0  # no run takes anything from the one before
    assert record["num_scheduler_steps"] >= 2 * 129
    assert 0 < record["driver_us_per_step"] < record["seconds"] / record["num_scheduler_steps"] * 1e6
    for name in ("floor_s", "floor_step_ms", "ratio", "gpu_idle_share", "top_kernels"):
        assert record[name] is None  # there is no GPU
    assert 0 < record["startup_s"] < TIMEOUT_S
    assert {"raytp", "python", "ray", "torch"} <= set(record["versions"])
    assert record["commit"] is None or len(record["commit"].rstrip("+")) == 40


def test_a_shared_prefix_is_computed_once_in_each_run(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(config))
    file = tmp_path / "results.json"
    options = ["--num-prompts", "4", "--runs", "2", "--device", "cpu", "--json", str(file)]
    done = bench(str(model), "--workload", "shared-prefix", *options)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(file.read_text())
    assert record["cached_share"] == pytest.approx(3 * 2000 / (4 * 2100))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_knows_the_idle_share_and_stays_above_the_floor(tmp_path):
    file = tmp_path / "results.json"
    options = ["--num-prompts", "1", "--runs", "1", "--profile", "--json", str(file)]
    done = bench("qwen3-0.6b", "--workload", "latency", *options)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(file.read_text())
    assert 0 <= record["gpu_idle_share"] < 1
    assert 0 < sum(share for _, share in record["top_kernels"]) <= 1.0001
    assert record["ratio"] is None or record["ratio"] > 1


def test_a_shape_gets_random_weights_and_nano_vllms_context():
    plan = make_plan("qwen3-0.6b", "all", None, 2, {"device": "cpu"})
    assert (plan.name, plan.tensor_parallel_size, list(plan.cases)) == ("qwen3-0.6b", 2, list(WORKLOADS))
    assert plan.options == {"device": "cpu", "max_model_len": 4096, "load_format": "dummy"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "sideways"], "workload='sideways' must be one of throughput, latency"),
        ([str(MODEL)], "the workload throughput has sequences of .* more than max_model_len=512"),
        (["no/such/model"], "there is no model at no/such/model|neither a folder"),
        ([str(MODEL), "-w", "latency", "--json", "no/such/folder/results.json"], "there is no folder no/such/folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments, message):
    done = bench(*arguments)
    assert (done.returncode, done.stdout) == (1 if "no/such/model" in arguments else 2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line)
