"""Frames come back as they were sent, or are refused with a FrameError: whatever has happened to them on the way."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings

from scheduler.step import SlotSampling, Step, StepLogprobs, StepResult
from tests.control_plane.example_frames import a_step, assert_same, sealed
from workers.errors import FrameError
from workers.frames import (
    ERROR,
    HELLO,
    PROTOCOL_VERSION,
    RESULT,
    SHUTDOWN,
    STEP,
    ErrorReport,
    Frame,
    FrameDecoder,
    encode,
    error_body,
    read_error,
    read_result,
    read_step,
    result_body,
    step_body,
)

EPOCH = 3


int32s = st.integers(-(2**31), 2**31 - 1)


floats = st.floats(allow_nan=False)


def int_arrays(length: int | st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return hnp.arrays(np.int32, length, elements=int32s)


@st.composite
def slots(draw: st.DrawFn) -> SlotSampling:
    strategies = {"int": st.integers(-1, 2**63 - 1), "float": floats, "IntArray": int_arrays(st.integers(0, 5))}
    return SlotSampling(**{field.name: draw(strategies[str(field.type)]) for field in fields(SlotSampling)})


@st.composite
def steps(draw: st.DrawFn) -> Step:
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    block_counts = draw(st.lists(st.integers(1, 5), max_size=6))
    rows, changes = len(counts), len(block_counts)
    return Step(
        step_id=0,
        slots=draw(int_arrays(rows)),
        num_scheduled_tokens=np.array(counts, dtype=np.int32),
        seq_lens=draw(int_arrays(rows)),
        samples=draw(int_arrays(rows)),
        token_ids=draw(int_arrays(sum(counts))),
        block_slots=draw(int_arrays(changes)),
        block_starts=draw(int_arrays(changes)),
        block_counts=np.array(block_counts, dtype=np.int32),
        block_ids=draw(int_arrays(sum(block_counts))),
        new_slots=tuple(draw(st.lists(slots(), max_size=3))),
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    token_ids = draw(int_arrays(st.integers(0, 6)))
    if not draw(st.booleans()):
        return StepResult(step_id=0, token_ids=token_ids)
    shape = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    float32s = st.floats(width=32, allow_nan=False)
    return StepResult(
        step_id=0,
        token_ids=token_ids,
        logprobs=StepLogprobs(
            rows=draw(int_arrays(shape[0])),
            chosen=draw(hnp.arrays(np.float32, shape[0], elements=float32s)),
            top_ids=draw(hnp.arrays(np.int32, shape, elements=int32s)),
            top=draw(hnp.arrays(np.float32, shape, elements=float32s)),
        ),
    )


def decode(data: bytes) -> Frame:
    return FrameDecoder(EPOCH).decode(data)


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_steps_come_back(step: Step) -> None:
    assert_same(read_step(decode(encode(Frame(EPOCH, 0, STEP, step_body(step))))), step)


@settings(max_examples=60, deadline=None)
@given(result=results())
def test_results_come_back(result: StepResult) -> None:
    assert_same(read_result(decode(encode(Frame(EPOCH, 0, RESULT, result_body(result))))), result)


@given(st.builds(ErrorReport, rank=st.integers(0, 99), pid=st.integers(0, 2**31)))
def test_error_reports_come_back(report: ErrorReport) -> None:
    assert_same(read_error(decode(encode(Frame(EPOCH, 0, ERROR, error_body(report))))), report)


@pytest.mark.parametrize(("kind", "body"), [(HELLO, 7), (SHUTDOWN, None)])
def test_small_messages_come_back(kind: str, body: Any) -> None:
    assert decode(encode(Frame(EPOCH, 0, kind, body))) == Frame(EPOCH, 0, kind, body)


def test_a_frame_of_16_mb_passes() -> None:
    step = a_step(4 * 2**20)
    data = encode(Frame(EPOCH, 0, STEP, step_body(step)))
    assert len(data) > 16 * 2**20
    assert_same(read_step(decode(data)), step)


def test_a_frame_truncated_at_any_byte_is_refused() -> None:
    data = encode(Frame(EPOCH, 0, STEP, step_body(a_step())))
    for length in range(len(data)):
        with pytest.raises(FrameError, match="damaged"):
            decode(data[:length])


def test_a_frame_with_any_bit_flipped_is_refused() -> None:
    data = encode(Frame(EPOCH, 0, STEP, step_body(a_step())))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError, match="damaged"):
            decode(bytes(flipped))


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1, 0])
def test_a_frame_of_another_epoch_is_refused(epoch: int) -> None:
    with pytest.raises(FrameError, match=f"epoch {epoch}, expected epoch {EPOCH}"):
        decode(encode(Frame(epoch, 0, HELLO, 0)))


@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, 0, None, "1", [1]])
def test_a_frame_of_another_version_is_refused(version: Any) -> None:
    with pytest.raises(FrameError, match="protocol version"):
        decode(sealed([version, EPOCH, 0, HELLO, 0]))


@pytest.mark.parametrize("step_ids", [[1], [0, 2], [0, 0], [0, 1, 0], [-1]])
@pytest.mark.parametrize("kind", [STEP, RESULT])
def test_a_gap_in_the_step_ids_is_refused(kind: str, step_ids: list[int]) -> None:
    decoder = FrameDecoder(EPOCH)
    for step_id in step_ids[:-1]:
        decoder.decode(encode(Frame(EPOCH, step_id, kind, None)))
    with pytest.raises(FrameError, match=f"frame of step {step_ids[-1]}, expected step"):
        decoder.decode(encode(Frame(EPOCH, step_ids[-1], kind, None)))


@pytest.mark.parametrize(
    "payload",
    [
        None,
        5,
        "hello",
        {"version": 1},
        [],
        [PROTOCOL_VERSION],
        [PROTOCOL_VERSION, EPOCH, 0, HELLO],
        [PROTOCOL_VERSION, EPOCH, 0, HELLO, 0, 0],
        [PROTOCOL_VERSION, "3", 0, HELLO, 0],
        [PROTOCOL_VERSION, 3.0, 0, HELLO, 0],
        [PROTOCOL_VERSION, EPOCH, None, HELLO, 0],
        [PROTOCOL_VERSION, EPOCH, False, HELLO, 0],
        [PROTOCOL_VERSION, EPOCH, 0, "reboot", 0],
        [PROTOCOL_VERSION, EPOCH, 0, ["hello"], 0],
        [PROTOCOL_VERSION, EPOCH, 0, {"hello": 1}, 0],
        [PROTOCOL_VERSION, EPOCH, 0, None, 0],
        [PROTOCOL_VERSION, EPOCH, 0, HELLO, {"a": {1: 2}}],
    ],
    ids=repr,
)
def test_another_shape_is_refused(payload: Any) -> None:
    with pytest.raises(FrameError):
        decode(sealed(payload))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_bytes_that_are_no_msgpack_of_ours_are_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        decode(sealed(payload, pack=bytes))


class _Bomb:
    """Leaves a file behind if anybody unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path) -> None:
    bomb = pickle.dumps(_Bomb(tmp_path / "loaded"))
    for data in (bomb, sealed(bomb, pack=bytes), sealed([PROTOCOL_VERSION, EPOCH, 0, STEP, bomb])):
        with pytest.raises(FrameError):
            read_step(decode(data))
    assert list(tmp_path.iterdir()) == []
    pickle.loads(bomb)
    assert [path.name for path in tmp_path.iterdir()] == ["loaded"], "the bomb works"


json_like = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3), st.binary(max_size=9)),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(body=json_like, reader=st.sampled_from([read_step, read_result, read_error]))
def test_any_other_body_is_refused(body: Any, reader: Any) -> None:
    if reader is read_result and _is_result(body):
        return
    with pytest.raises(FrameError):
        reader(Frame(EPOCH, 0, "any", body))


def _is_result(body: Any) -> bool:
    return isinstance(body, list) and len(body) == 2 and isinstance(body[0], bytes) and len(body[0]) % 4 == 0


def _mutants(body: Any) -> list[Any]:
    """The body with one of its parts, at any depth, missing, doubled, or of another type."""
    if not isinstance(body, list):
        other = ["text", None, [1], {"a": 1}, True]
        if isinstance(body, bytes):
            return [*other, 5, 1.5, body + b"x", body + b"xxxx", body + b"xxxxxxxx"]
        return [*other, b"\0\0\0\0", 1.5 if isinstance(body, int) else 2]
    mutants: list[Any] = [None, 5]
    for index, part in enumerate(body):
        mutants.append(body[:index] + body[index + 1 :])
        mutants.append([*body[:index], part, *body[index:]])
        mutants += [[*body[:index], mutant, *body[index + 1 :]] for mutant in _mutants(part)]
    return mutants


def _accepted_mutants(body: Any, read: Callable[[Frame], Any]) -> list[Any]:
    """Those that can be read, as the body itself can."""
    read(Frame(EPOCH, 0, "any", body))
    accepted = []
    for mutant in _mutants(body):
        with contextlib.suppress(FrameError):
            read(Frame(EPOCH, 0, "any", mutant))
            accepted.append(mutant)
    return accepted


def test_a_step_with_anything_missing_doubled_or_of_another_type_is_refused() -> None:
    body = msgpack.unpackb(msgpack.packb(step_body(a_step())))
    arrays, new_slots = body
    # A slot may come twice or not at all, and its lists of ids may have any length: nothing else passes.
    for mutant in _accepted_mutants(body, read_step):
        assert mutant[0] == arrays
        assert all(len(slot) == len(new_slots[0]) for slot in mutant[1])


def test_a_result_with_anything_missing_doubled_or_of_another_type_is_refused() -> None:
    logprobs = StepLogprobs(
        rows=np.array([0, 1], dtype=np.int32),
        chosen=np.array([-1, -2], dtype=np.float32),
        top_ids=np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32),
        top=np.zeros((2, 3), dtype=np.float32),
    )
    body = result_body(StepResult(step_id=0, token_ids=np.array([1, 2], dtype=np.int32), logprobs=logprobs))
    for mutant in _accepted_mutants(body, read_result):  # more tokens, or no log probabilities, is still a result
        assert mutant[1] in (None, body[1])
