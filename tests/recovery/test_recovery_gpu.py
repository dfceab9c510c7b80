"""Ranks on real GPUs are killed in the midst of their work."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from ray._private.state import actors

import raytp.bench
from raytp import LLM, SamplingParams

SHAPE = Path(raytp.bench.__file__).parent / "shapes" / "qwen3-8b"
PROMPTS = [[(7 * i + 3 * j) % 9973 for j in range(50 + 9 * i)] for i in range(16)]
GREEDY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
MEMORY_SLACK = 2**28

pytestmark = [pytest.mark.usefixtures("ray_session")]


def free_bytes() -> list[int]:
    return [torch.cuda.mem_get_info(index)[0] for index in range(2)]


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_rank_killed_while_it_decodes() -> None:
    """In float32, where a recomputed token's logits differ too little to change the choice."""
    baseline = free_bytes()
    with LLM(SHAPE, 2, load_format="dummy", dtype="float32", max_model_len=2048, memory_fraction=0.5) as llm:
        start = time.monotonic()
        undisturbed = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        took = time.monotonic() - start
        for victim in (0, 1):
            killed_at: list[float] = []

            def kill(victim: int = victim, killed_at: list[float] = killed_at) -> None:
                pids = [
                    a["Pid"] for a in actors().values() if a["ActorClassName"] == "RankActor" and a["State"] == "ALIVE"
                ]
                os.kill(sorted(pids)[victim], signal.SIGKILL)
                killed_at.append(time.time())

            threading.Timer(took / 2, kill).start()
            assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == undisturbed
            recovery = llm.recoveries()[victim]
            print(
                f"undisturbed {took:.2f} s; noticed {recovery.noticed_at - killed_at[0]:.3f} s after the kill, "
                f"ready again {recovery.rebuild_s:.2f} s after that"
            )
    deadline = time.monotonic() + 15
    while any(now < before - MEMORY_SLACK for now, before in zip(free_bytes(), baseline, strict=True)):
        assert time.monotonic() < deadline, (free_bytes(), baseline)
        time.sleep(0.2)
