"""The bytes between driver and ranks: msgpack frames, checked before anything in them is believed.

A frame is the xxh3-64 digest of its payload (8 bytes, big-endian), then the payload: msgpack of
`[protocol version, epoch, step id, kind, body]`. Arrays travel as packed little-endian int32 or float32 buffers.
A frame that is damaged, of another version or epoch, or out of turn is a `FrameError`, never a guess. There is no size
limit, and nothing is ever unpickled.

Called by both transports of `raytp`, by `workers.channel` and by `workers.worker`. Knows nothing of sockets.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any

import msgpack
import numpy as np
import xxhash

from scheduler.errors import shown
from scheduler.step import FloatArray, IntArray, SlotSampling, Step, StepLogprobs, StepResult
from workers.errors import FrameError

PROTOCOL_VERSION = 1

HELLO, STEP, RESULT, ERROR, HEARTBEAT, SHUTDOWN = "hello", "step", "result", "error", "heartbeat", "shutdown"
_KINDS = frozenset((HELLO, STEP, RESULT, ERROR, HEARTBEAT, SHUTDOWN))
_NUMBERED = frozenset((STEP, RESULT))
_DIGEST_BYTES = 8

assert sys.byteorder == "little", "frames carry arrays as they lie in memory, which is little-endian"


@dataclass(frozen=True, slots=True)
class Frame:
    """One checked message. `step_id` counts steps from 0 within an epoch; it is 0 where it means nothing."""

    epoch: int
    step_id: int
    kind: str
    body: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """What a rank that raised has to say."""

    rank: int
    node: str
    pid: int
    type: str
    message: str
    traceback: str


def encode(frame: Frame) -> bytes:
    """The bytes of a frame."""
    payload = msgpack.packb([PROTOCOL_VERSION, frame.epoch, frame.step_id, frame.kind, frame.body])
    return xxhash.xxh3_64_digest(payload) + payload


class FrameDecoder:
    """Turns received bytes into frames of one epoch and one direction, and insists on an unbroken count of steps."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_step_id = 0

    def decode(self, data: bytes) -> Frame:
        """Raises FrameError that says what is wrong with `data`."""
        frame = _parse(data)
        if frame.epoch != self._epoch:
            raise FrameError(f"frame of epoch {frame.epoch}, expected epoch {self._epoch}")
        if frame.kind in _NUMBERED:
            if frame.step_id != self._next_step_id:
                raise FrameError(f"frame of step {frame.step_id}, expected step {self._next_step_id}")
            self._next_step_id += 1
        return frame


def _parse(data: bytes) -> Frame:
    payload = memoryview(data)[_DIGEST_BYTES:]
    if xxhash.xxh3_64_digest(payload) != data[:_DIGEST_BYTES]:
        raise FrameError(f"damaged frame of {len(data)} bytes: its digest does not match")
    try:
        version, *rest = msgpack.unpackb(payload)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"frame of {len(data)} bytes is not msgpack of a list: {error}") from error
    if version != PROTOCOL_VERSION:
        raise FrameError(
            f"frame of protocol version {shown(version)}, expected {PROTOCOL_VERSION}: install one version"
        )
    if len(rest) != 4:
        raise FrameError(f"frame with {len(rest) + 1} fields, expected 5")
    epoch, step_id, kind, body = rest
    if type(epoch) is not int or type(step_id) is not int or not isinstance(kind, str) or kind not in _KINDS:
        raise FrameError(f"frame with epoch {shown(epoch)}, step {shown(step_id)}, kind {shown(kind)}")
    return Frame(epoch, step_id, kind, body)


_SLOT_FIELDS = tuple(field.name for field in fields(SlotSampling))
_SLOT_ARRAYS = frozenset(("stop_token_ids", "history"))
_SLOT_TYPES = tuple({"int": int, "float": float, "IntArray": bytes}[str(field.type)] for field in fields(SlotSampling))
_REPORT_TYPES = {field.name: {"int": int, "str": str}[str(field.type)] for field in fields(ErrorReport)}
_STEP_ARRAYS = tuple(field.name for field in fields(Step) if field.name not in ("step_id", "new_slots"))


def step_body(step: Step) -> Any:
    """The body of a STEP frame."""
    return [[getattr(step, name).tobytes() for name in _STEP_ARRAYS], [_slot_body(slot) for slot in step.new_slots]]


def read_step(frame: Frame) -> Step:
    """The step in a STEP frame; its arrays are read-only views of the frame. Raises FrameError."""
    try:
        arrays, slots = frame.body
        columns = dict(zip(_STEP_ARRAYS, map(_ints, arrays), strict=True))
        step = Step(step_id=frame.step_id, new_slots=tuple(map(_read_slot, slots)), **columns)
        _check_lengths(step)
        return step
    except (ValueError, TypeError) as error:
        raise FrameError(f"step {frame.step_id} cannot be read: {error}") from error


def result_body(result: StepResult) -> Any:
    """The body of a RESULT frame."""
    logprobs = result.logprobs
    if logprobs is None:
        return [result.token_ids.tobytes(), None]
    arrays = (logprobs.rows, logprobs.chosen, logprobs.top_ids, logprobs.top)
    return [result.token_ids.tobytes(), [array.tobytes() for array in arrays]]


def read_result(frame: Frame) -> StepResult:
    """The step result in a RESULT frame. Raises FrameError."""
    try:
        token_ids, arrays = frame.body
        return StepResult(
            step_id=frame.step_id,
            token_ids=_ints(token_ids),
            logprobs=None if arrays is None else _read_logprobs(*arrays),
        )
    except (ValueError, TypeError) as error:
        raise FrameError(f"result of step {frame.step_id} cannot be read: {error}") from error


def error_body(report: ErrorReport) -> Any:
    """The body of an ERROR frame."""
    return {field.name: getattr(report, field.name) for field in fields(report)}


def read_error(frame: Frame) -> ErrorReport:
    """The report in an ERROR frame. Raises FrameError."""
    body = frame.body
    if not isinstance(body, dict) or {name: type(value) for name, value in body.items()} != _REPORT_TYPES:
        raise FrameError(f"error report cannot be read: {shown(body)}")
    return ErrorReport(**body)


def _check_lengths(step: Step) -> None:
    """The arrays must fit each other, since each rank indexes its memory with them. Raises ValueError."""
    rows, changes = {len(step.slots)}, {len(step.block_slots)}
    rows |= {len(column) for column in (step.num_scheduled_tokens, step.seq_lens, step.samples)}
    changes |= {len(column) for column in (step.block_starts, step.block_counts)}
    sums = int(step.num_scheduled_tokens.sum()), int(step.block_counts.sum())
    if len(rows) > 1 or len(changes) > 1 or sums != (len(step.token_ids), len(step.block_ids)):
        raise ValueError("its arrays do not fit each other")


def _ints(data: bytes) -> IntArray:
    return np.frombuffer(data, dtype=np.int32)


def _floats(data: bytes) -> FloatArray:
    return np.frombuffer(data, dtype=np.float32)


def _slot_body(slot: SlotSampling) -> list[Any]:
    values = ((name, getattr(slot, name)) for name in _SLOT_FIELDS)
    return [value.tobytes() if name in _SLOT_ARRAYS else value for name, value in values]


def _read_slot(values: list[Any]) -> SlotSampling:
    if tuple(map(type, values)) != _SLOT_TYPES:
        raise TypeError(f"a slot cannot have {shown(values)}")
    columns = dict(zip(_SLOT_FIELDS, values, strict=True))
    return SlotSampling(**columns | {name: _ints(columns[name]) for name in _SLOT_ARRAYS})


def _read_logprobs(rows: bytes, chosen: bytes, top_ids: bytes, top: bytes) -> StepLogprobs:
    num_rows = len(_ints(rows))
    likeliest = _ints(top_ids).reshape(num_rows, -1)
    return StepLogprobs(
        rows=_ints(rows),
        chosen=_floats(chosen).reshape(num_rows),
        top_ids=likeliest,
        top=_floats(top).reshape(likeliest.shape),
    )
