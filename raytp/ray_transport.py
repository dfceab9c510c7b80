"""A transport over plain Ray actor calls: slower, but it needs no port of its own, and it is the tests' oracle.

Same interface and same frames as `raytp.transport.SocketTransport`. Called by `raytp.engine`, from one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import ray

from raytp.errors import RankFailedError, StepTimeoutError
from raytp.transport import GRACE_S, Transport, describe_failures
from scheduler.step import Step, StepResult
from workers.frames import ERROR, STEP, ErrorReport, Frame, FrameDecoder, encode, read_error, read_result, step_body


class RayTransport(Transport):
    """Calls `execute` on every rank for every step; Ray keeps the calls of one caller in order."""

    def __init__(self, ranks: Sequence[Any], names: Sequence[str], epoch: int, timeout_s: float) -> None:
        """`ranks`: the actor handles, in rank order."""
        self._ranks = ranks
        self._names = names
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._decoder = FrameDecoder(epoch)
        self._in_flight: deque[list[Any]] = deque()

    def send(self, step: Step) -> None:
        """See `Transport.send`."""
        data = ray.put(encode(Frame(self._epoch, step.step_id, STEP, step_body(step))))
        self._in_flight.append([rank.execute.remote(data) for rank in self._ranks])

    def receive(self) -> StepResult:
        """See `Transport.receive`."""
        refs = self._in_flight.popleft()
        deadline = time.monotonic() + self._timeout_s
        failures: dict[int, ErrorReport | None] = {}
        pending, result = refs, None
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = ray.wait(pending, num_returns=1, timeout=left, fetch_local=False)
            for ref in done:
                outcome = self._read(refs.index(ref), ref)
                if isinstance(outcome, StepResult):
                    result = outcome
                elif outcome is None or isinstance(outcome, ErrorReport):
                    failures[refs.index(ref)] = outcome
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise RankFailedError(describe_failures(failures, self._names))
        if pending or result is None:
            late = ", ".join(self._names[refs.index(ref)] for ref in pending)
            raise StepTimeoutError(f"no answer within step_timeout_s={self._timeout_s:g} from {late}")
        return result

    def close(self) -> None:
        """See `Transport.close`; nothing to do, since the ranks end with their actors."""

    def _read(self, rank: int, ref: Any) -> StepResult | ErrorReport | Literal["silent"] | None:
        """A rank's answer: a result, an error, None if it died, or "silent" if it has nothing to say."""
        try:
            data = ray.get(ref)
        except ray.exceptions.RayActorError:
            return None
        if data is None:
            return "silent"
        # Only rank 0's results are numbered; another rank answers only to say that it has failed.
        frame = (self._decoder if rank == 0 else FrameDecoder(self._epoch)).decode(data)
        return read_error(frame) if frame.kind == ERROR else read_result(frame)
