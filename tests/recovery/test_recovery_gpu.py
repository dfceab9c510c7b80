"""Ranks on real GPUs are killed in the midst of their work."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

import raytp.bench
from raytp import LLM, SamplingParams
from workers.faults import Fault

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
    settings = {"load_format": "dummy", "dtype": "float32", "max_model_len": 2048, "memory_fraction": 0.5}
    with LLM(SHAPE, 2, **settings) as llm:
        undisturbed = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    kills = tuple(Fault(kind="kill", rank=rank, point="decode", nth=100, epoch=rank) for rank in range(2))
    with LLM(SHAPE, 2, faults=kills, **settings) as llm:
        for rank in range(2):
            assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == undisturbed
            recovery = llm.recoveries()[rank]
            told = re.search(rf"rank {rank} in epoch {rank} at decode, as was asked for, ([\d.]+)", recovery.report)
            assert told is not None, recovery.report
            print(
                f"rank {rank}: noticed {recovery.noticed_at - float(told[1]):.3f} s after the kill, "
                f"ready again {recovery.rebuild_s:.2f} s after that"
            )
    deadline = time.monotonic() + 15
    while any(now < before - MEMORY_SLACK for now, before in zip(free_bytes(), baseline, strict=True)):
        assert time.monotonic() < deadline, (free_bytes(), baseline)
        time.sleep(0.2)
