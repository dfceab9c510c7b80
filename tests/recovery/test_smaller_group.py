"""With less hardware than before: the ranks are fewer, and as many as ever when it is back. On real raylets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRIVIA = ROOT / "tests" / "models" / "tiny-qwen3-trivia"


def test_a_lost_node_makes_the_group_smaller_until_there_is_another() -> None:
    """The model's answers are known, and so are the same on two ranks, on one, and on two again."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, ROOT / "tests" / "recovery" / "lost_nodes.py"],
        capture_output=True,
        text=True,
        timeout=240,
        env=clean | {"PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    told = result["told"]
    answers = [each["answer"] for each in json.loads((TRIVIA / "questions.json").read_text())[:60]]
    assert told["whole"] == told["lost"] == told["grown"] == answers
    too_long, short = told["outgrown"]
    assert short is None
    assert "the prompt has 200 tokens, but the KV cache holds" in too_long
    assert told["fits"] == [None]
    (smaller, lost), (grown, room) = result["recoveries"]
    assert (smaller, grown) == (1, 2)
    assert "its node was lost" in lost or "died" in lost
    assert room == "there is room for 2 ranks, where 1 are at work: they are built again"
