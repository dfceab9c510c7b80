"""What a rank finds on its own node, where the caller's node has the model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from raytp.model_source import find_on_this_node, resolve_model

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "models" / "tiny-qwen3-trivia"
REVISION = "0123456789abcdef0123456789abcdef01234567"
SNAPSHOT = Path("models--raytp--tiny-2.5") / "snapshots" / REVISION
FIND = "import sys, pathlib, raytp.model_source as m; print(m.find_on_this_node(pathlib.Path(sys.argv[1])))"


def find_with_own_cache(hub: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """On a node whose Hugging Face cache is `hub`, and which reaches no network."""
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", FIND, str(path)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_hub_model_is_found_in_the_nodes_own_cache_in_the_callers_revision(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / SNAPSHOT)
    found = find_with_own_cache(tmp_path, Path("/home/caller/.cache/huggingface/hub") / SNAPSHOT)
    assert found.stdout.strip() == str(tmp_path / SNAPSHOT), found.stderr


def test_a_hub_model_that_the_node_lacks_is_asked_for_at_the_hub(tmp_path: Path) -> None:
    asked = find_with_own_cache(tmp_path, Path("/home/caller/.cache/huggingface/hub") / SNAPSHOT)
    assert asked.returncode != 0
    assert "ModelNotFoundError" in asked.stderr
    assert "hf download raytp/tiny-2.5" in asked.stderr


def test_a_snapshot_on_a_shared_disk_is_used_as_it_is_once_it_is_whole(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shutil.copytree(TINY, shared / SNAPSHOT)
    shutil.copytree(TINY, own / SNAPSHOT)
    assert find_with_own_cache(own, shared / SNAPSHOT).stdout.strip() == str(shared / SNAPSHOT)
    (shared / SNAPSHOT / "model.safetensors").unlink()  # as while another rank downloads it
    assert find_with_own_cache(own, shared / SNAPSHOT).stdout.strip() == str(own / SNAPSHOT)


def test_any_other_path_is_the_same_on_every_node(tmp_path: Path) -> None:
    assert find_on_this_node(TINY) == TINY
    assert find_on_this_node(tmp_path / "nothing") == tmp_path / "nothing"


def test_the_default_model_is_made_on_every_node() -> None:
    here = resolve_model(None).path
    assert find_on_this_node(Path("/home/caller/.cache/raytp") / here.name) == here
    other = Path("/home/caller/.cache/raytp") / "SmolLM2-135M-Instruct.Q4_1-of-another-version"
    assert find_on_this_node(other) == other
