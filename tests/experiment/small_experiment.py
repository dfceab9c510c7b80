"""An experiment that takes a moment: the files that tests read, and outcomes for what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from raytp.experiment.reading import read_experiment
from raytp.experiment.running import Outcome, run_all
from raytp.experiment.spec import ExperimentSpec

CONTENT: Mapping[str, Any] = {
    "name": "small",
    "model": "qwen3-0.6b",
    "options": {"max_num_seqs": 8},
    "workload": {"num_requests": 150, "prompt_tokens": 60, "output_tokens": 200, "rate": 15},
    "cluster": {"gpus_per_node": 1, "provisioning_s": 2, "startup_s": 1, "idle_timeout_s": 1},
    "replicas": "1:3",
    "policies": ["fixed", "queue:2", "deadline:20"],
    "seeds": [0, 1],
    "decide_every_s": 0.5,
    "price_per_gpu_hour": 3.5,
}


def write(path: Path, **changes: Any) -> Path:
    """The experiment with other values, in a file; None leaves a key out."""
    content = {name: value for name, value in {**CONTENT, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(content))
    return path


def run(folder: Path, **changes: Any) -> tuple[ExperimentSpec, list[Outcome]]:
    """All of its outcomes."""
    spec, _ = read_experiment(write(folder / "small.yaml", **changes))
    return spec, list(run_all(spec, lambda text, share: None))
