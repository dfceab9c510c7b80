"""Who may import whom: read from the source, so that an import inside a function counts as well."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("scheduler", "workers", "raytp")
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

MAY_IMPORT = {
    "scheduler": {"scheduler"},
    "workers": {"workers", "scheduler"},
    "raytp": {"raytp", "workers", "scheduler"},
}
STEP_CONTRACT = {"scheduler.step", "scheduler.errors"}
PLACES_ACTORS = {
    "raytp/autopsy.py",
    "raytp/driver_actor.py",
    "raytp/driver_client.py",
    "raytp/experiment/fake_cluster.py",
    "raytp/experiment/real.py",
    "raytp/placement.py",
    "raytp/rank_actor.py",
    "raytp/rank_group.py",
    "raytp/ray_runtime.py",
    "raytp/ray_transport.py",
    "raytp/shared_engines.py",
}


def imports_of(path: Path) -> Iterator[str]:
    """Names of everything that a file imports; `from a import b` counts as a, and as a.b."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides what is imported"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers_of(module: str) -> set[str]:
    """Files that import a module or anything inside it."""
    return {
        str(path) for path in FILES if any(name == module or name.startswith(f"{module}.") for name in imports_of(path))
    }


def in_fresh_python(code: str) -> str:
    """What a script prints in a Python of its own that finds the packages here."""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_there_is_something_to_check() -> None:
    assert {path.parts[0] for path in FILES} == set(PACKAGES)
    assert len(FILES) > 30


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    forbidden = set(PACKAGES) - MAY_IMPORT[package]
    for path in FILES:
        if path.parts[0] == package:
            imported = {name.split(".")[0] for name in imports_of(path)}
            assert not imported & forbidden, path


def test_workers_see_of_the_scheduler_only_the_step_contract() -> None:
    for path in FILES:
        if path.parts[0] == "workers":
            seen = {".".join(name.split(".")[:2]) for name in imports_of(path) if name.startswith("scheduler")}
            assert seen <= STEP_CONTRACT, path


def test_ray_is_imported_only_where_actors_are_placed() -> None:
    assert importers_of("ray") == PLACES_ACTORS


def test_torch_distributed_has_one_home() -> None:
    assert importers_of("torch.distributed") == {"workers/parallel.py"}


def test_triton_stays_in_the_kernels() -> None:
    importers = importers_of("triton")
    assert "workers/kernels/store_kvcache.py" in importers
    assert all(path.startswith("workers/kernels/") for path in importers)


def test_flash_attention_has_one_home() -> None:
    importers = importers_of("flash_attn") | importers_of("flash_attn_interface")
    assert importers == {"workers/kernels/flash.py"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse((ROOT / path).read_text()))


def test_no_test_folder_shadows_a_package() -> None:
    assert not [path for package in PACKAGES for path in (ROOT / "tests").rglob(f"{package}/__init__.py")]
    assert not list((ROOT / "tests").rglob("__init__.py"))


_ONLY_NUMPY_AND_XXHASH = """
import importlib, pkgutil, sys

ALLOWED = sys.stdlib_module_names | {"numpy", "xxhash", "scheduler"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ALLOWED:
            raise ImportError(f"{name} is not allowed here")
        return None

sys.meta_path.insert(0, Refuse())
import scheduler
names = [module.name for module in pkgutil.walk_packages(scheduler.__path__, "scheduler.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_the_scheduler_needs_only_numpy_and_xxhash() -> None:
    num_modules = sum(path.parts[0] == "scheduler" for path in FILES) - 1
    assert int(in_fresh_python(_ONLY_NUMPY_AND_XXHASH)) == num_modules


@pytest.mark.parametrize("module", ["raytp", "raytp.cli", "raytp.driver", "raytp.rank_actor"])
@pytest.mark.parametrize("heavy", ["torch", "transformers"])
def test_the_control_plane_does_not_load_what_is_heavy(module: str, heavy: str) -> None:
    assert in_fresh_python(f"import sys, {module}; print({heavy!r} in sys.modules)").strip() == "False"
