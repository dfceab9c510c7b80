"""The example of a policy of one's own, and what the documentation says of the examples."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raytp.experiment.reading import read_experiment
from raytp.experiment.running import Outcome, run_all
from raytp.scaling import Policy
from tests.simulator import small

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "autoscaling"
DOCS = (ROOT / "docs" / "autoscaling.md").read_text()


def load_example() -> Policy:
    found = importlib.util.spec_from_file_location("example_policy", EXAMPLES / "my_policy.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    policy: Policy = module.one_to_spare
    return policy


ONE_TO_SPARE = load_example()
SEEN = replace(small.SEEN, rows_per_replica=10, startup_s=30.0, seconds_since_change=1000.0)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 60))
def test_the_example_keeps_one_to_spare_and_does_not_swing(running: int, waiting: int, target: int) -> None:
    seen = replace(SEEN, rows_running=running, rows_waiting=waiting, target=target)
    wanted = ONE_TO_SPARE(seen)
    assert (wanted - 2) * 10 < running + waiting <= (wanted - 1) * 10
    assert ONE_TO_SPARE(replace(seen, target=wanted)) == wanted
    soon = replace(seen, seconds_since_change=1.0)
    assert ONE_TO_SPARE(soon) == max(wanted, target)


def test_the_example_beats_the_queue_on_its_own_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller burst on engines that take fewer requests at once: nobody waits long once the first replica runs."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    spec, _ = read_experiment(
        EXAMPLES / "bursts.yaml",
        {"policies": ["queue:30", "my_policy:one_to_spare"], "seeds": [0], "options": {"max_num_seqs": 8}},
    )
    workload = replace(
        spec.workload,
        num_requests=1200,
        prompt_tokens=500,
        output_tokens=100,
        rate=0.5,
        burst_rate=15.0,
        burst_every_s=300,
    )
    queue, own = (longest_wait_s(each) for each in run_all(replace(spec, workload=workload), lambda text, share: None))
    assert own < queue / 2


def longest_wait_s(outcome: Outcome) -> float:
    """For a first token, of requests that come after the first minute."""
    assert outcome.results is not None
    return max((one.first_token_s or 0.0) - one.arrival_s for one in outcome.results.requests if one.arrival_s > 60)


def test_the_documentation_shows_the_example_as_it_is() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    example = (EXAMPLES / "bursts.yaml").read_text()
    assert shown == example.split("\n", 1)[1]  # but for the comment
    assert yaml.safe_load(shown)["policies"] == ["fixed", "queue:30", "deadline:1320"]
    source = (EXAMPLES / "my_policy.py").read_text()
    assert source.endswith(re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)[0])


def test_the_documentation_s_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"\]\((images/[^)]+)\)", DOCS)
    assert len(pictures) == 4
    assert all(10_000 < (ROOT / "docs" / picture).stat().st_size < 150_000 for picture in pictures)
