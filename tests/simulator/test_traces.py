"""Traces, arrival processes, and the least number of replicas that meets a target."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytp.errors import ConfigError
from raytp.simulator.capacity import Target, fixed_cluster, least_replicas, make_replica
from raytp.simulator.cluster import simulate
from raytp.simulator.measured import find_gpu
from raytp.simulator.requests import (
    SequenceMaker,
    SimulatedRequest,
    batch,
    poisson,
    read_trace,
)
from raytp.simulator.setup import load_model
from tests.simulator.small import small_replica

EXAMPLES = Path(__file__).parents[2] / "examples" / "autoscaling"


def test_the_example_is_what_its_script_writes(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "make_trace.py"), run_name="__main__")
    assert capsys.readouterr().out == (EXAMPLES / "bursts.jsonl").read_text()


def test_a_trace_is_read_by_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [{"arrival_s": at, "prompt_tokens": 3, "output_tokens": 2} for at in (5, 1.5, 0)]
    lines.append({"arrival_s": 2, "prompt_tokens": 9, "output_tokens": 1, "prefix_id": "p", "prefix_tokens": 4})
    file.write_text("\n\n".join(map(json.dumps, lines)))
    requests = read_trace(file)
    assert [one.arrival_s for one in requests] == [0, 1.5, 2, 5]
    assert requests[2] == SimulatedRequest(**lines[3])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ("[]", "no JSON object"),
        ('{"arrival_s": 0, "prompt_tokens": 1}', "'output_tokens' is missing"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "tokens": 1}', "'tokens' is not known"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s=-1"),
        ('{"arrival_s": 1770000000, "prompt_tokens": 1, "output_tokens": 1}', "at most 1e+08"),
        (f'{{"arrival_s": 1{"0" * 400}, "prompt_tokens": 1, "output_tokens": 1}}', "an integer of over 100 digits"),
        ('{"arrival_s": true, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s=True"),
        (
            '{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "prefix_id": [1], "prefix_tokens": 2}',
            "prefix_id=[1] must be a text",
        ),
        ("[" * 100_000, "nested too deeply"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens=0"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": true}', "output_tokens=True"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_id": "p"}', "belong together"),
        (
            '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_id": "p", "prefix_tokens": 2}',
            "exceeds prompt_tokens=1",
        ),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f'{{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_trace(file)
    assert words in str(caught.value)


def test_any_line_break_but_that_of_lines_may_stand_in_a_prefix_id(tmp_path: Path) -> None:
    """As JSON has it; and what Windows puts before the first line and after each is not in the way."""
    file = tmp_path / "trace.jsonl"
    line = {"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "prefix_id": "a\u2028b\x85c", "prefix_tokens": 2}
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(line, ensure_ascii=False).encode() + b"\r\n")
    assert read_trace(file) == [SimulatedRequest(**line)]  # type: ignore[arg-type]


def test_a_run_without_end_is_refused() -> None:
    once = SimulatedRequest(arrival_s=9e7, prompt_tokens=1, output_tokens=1)
    with pytest.raises(ConfigError, match="more than 1,000,000 times"):
        simulate(fixed_cluster(small_replica(), 1), [once])


def test_a_trace_that_is_empty_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no request"):
        read_trace(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "no\0name")


def test_arrivals_at_random_have_the_rate_and_the_spread_of_poisson() -> None:
    requests = poisson(20_000, 50.0, 100, 100, seed=3)
    gaps = np.diff([one.arrival_s for one in requests])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)  # of an exponential distribution: its mean
    lengths = [one.output_tokens for one in requests]
    assert np.mean(lengths) == pytest.approx(100, rel=0.02)
    assert (min(lengths), max(lengths)) == (20, 180)
    assert poisson(50, 50.0, 100, 100, seed=3) == poisson(50, 50.0, 100, 100, seed=3) != poisson(50, 50.0, 100, 100, 4)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 100), st.integers(2, 300))
def test_prompts_agree_exactly_where_their_prefixes_do(own: int, shared: int, others_own: int, vocab_size: int) -> None:
    maker = SequenceMaker(vocab_size)
    prefix = {"prefix_id": "p", "prefix_tokens": shared} if shared else {}
    one, other = (
        maker.make(index, SimulatedRequest(arrival_s=0, prompt_tokens=shared + tail, output_tokens=1, **prefix))  # type: ignore[arg-type]
        for index, tail in ((1, own), (2, max(1, others_own)))
    )
    assert (one.token_ids[:shared] == other.token_ids[:shared]).all()
    assert vocab_size < 3 or one.token_ids[shared] != other.token_ids[shared]


@pytest.mark.parametrize("target", [Target(finish_s=0.4), Target(ttft_s=0.2), Target(finish_s=0.4, per_token_s=0.0014)])
def test_the_least_number_of_replicas_is_the_least(target: Target) -> None:
    replica, requests = small_replica(max_num_seqs=8), batch(80, 100, 80, seed=0)
    meets = [target.is_met(simulate(fixed_cluster(replica, count), requests)) for count in range(1, 13)]
    told: list[tuple[int, float]] = []
    count, results = least_replicas(replica, requests, target, 12, lambda count, share: told.append((count, share)))
    assert count == meets.index(True) + 1 > 1
    assert target.is_met(results)
    assert {count for count, _ in told} >= {1, count}
    assert told[0] == (1, 0.0)
    assert all(0 <= share <= 1 for _, share in told)


def test_a_target_that_no_number_meets_is_an_error() -> None:
    with pytest.raises(ConfigError, match="4 replicas do not meet the target"):
        least_replicas(small_replica(), batch(10, 100, 80, seed=0), Target(finish_s=1e-6), 4)


def test_limits_of_an_engine_are_those_that_are_named() -> None:
    model, coefficients = load_model("qwen3-0.6b"), find_gpu("h200").coefficients
    plain = make_replica(model, coefficients, 1, []).scheduler
    assert (plain.max_num_seqs, plain.max_num_batched_tokens, plain.block_size) == (256, 8192, 16)
    limits = {"max_num_seqs": 3, "block_size": 32, "num_kv_blocks": 40, "max_model_len": 100}
    named = make_replica(model, coefficients, 1, [], limits=limits)
    assert {name: getattr(named.scheduler, name) for name in limits} == limits
    with pytest.raises(ConfigError, match=r"num_kv_blocks=99999999 exceeds the \d+ blocks"):
        make_replica(model, coefficients, 1, [], limits={"num_kv_blocks": 99_999_999})


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise the tensor-parallel size"):
        make_replica(load_model("qwen3-8b"), find_gpu("cpu").coefficients, 1, [])
