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
from raytp.transport import GRACE_S, MAX_PAUSE_S, Transport, describe_failures, describe_silence
from scheduler.step import Step, StepResult
from workers.frames import ERROR, STEP, ErrorReport, Frame, FrameDecoder, encode, read_error, read_result, step_body

_PING_S = 1.0


class RayTransport(Transport):
    """Calls `execute` on every rank for every step; Ray keeps the calls of one caller in order."""

    def __init__(
        self, ranks: Sequence[Any], names: Sequence[str], epoch: int, timeout_s: float, heartbeat_timeout_s: float
    ) -> None:
        """`ranks`: the actor handles, in rank order."""
        self._ranks = ranks
        self._names = names
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._decoder = FrameDecoder(epoch)
        self._in_flight: deque[list[Any]] = deque()
        self._pings = [(rank.status.remote(), time.monotonic()) for rank in ranks]
        """The question to each rank whether it is there, and when it was put."""
        self._checked_at = time.monotonic()

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
            done, pending = ray.wait(pending, num_returns=1, timeout=min(left, _PING_S), fetch_local=False)
            if not done and not failures:
                self.check()
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
            raise StepTimeoutError(
                f"no answer within step_timeout_s={self._timeout_s:g} from {late}: raise it if steps are so slow"
            )
        return result

    def check(self) -> None:
        """See `Transport.check`."""
        now = time.monotonic()
        excess = max(0.0, now - self._checked_at - MAX_PAUSE_S)  # in which nobody looked: see `SocketTransport`
        self._pings = [(ping, asked_at + excess) for ping, asked_at in self._pings]
        self._checked_at = now
        silent = []
        for rank, (ping, asked_at) in enumerate(self._pings):
            if ray.wait([ping], timeout=0, fetch_local=False)[0]:
                try:
                    ray.get(ping)
                except ray.exceptions.RayActorError:
                    raise RankFailedError(describe_failures({rank: None}, self._names)) from None
                except ray.exceptions.RayError as error:
                    raise RankFailedError(f"{self._names[rank]} cannot be asked: {error}") from error
                if now - asked_at > _PING_S:
                    self._pings[rank] = (self._ranks[rank].status.remote(), now)
            elif now - asked_at > self._heartbeat_timeout_s:
                silent.append(self._names[rank])
        if silent:
            raise RankFailedError(describe_silence(silent, self._heartbeat_timeout_s))

    def close(self) -> None:
        """See `Transport.close`; nothing to do, since the ranks end with their actors."""

    def _read(self, rank: int, ref: Any) -> StepResult | ErrorReport | Literal["silent"] | None:
        """A rank's answer: a result, an error, None if it died, or "silent" if it has nothing to say."""
        try:
            data = ray.get(ref, timeout=self._timeout_s)  # it may have to come from another node
        except ray.exceptions.RayActorError:
            return None
        except ray.exceptions.RayError as error:  # the way to an object is cut, say
            raise RankFailedError(f"{self._names[rank]} did a step, and its answer is lost: {error}") from error
        if data is None:
            return "silent"
        # Only rank 0's results are numbered; another rank answers only to say that it has failed.
        frame = (self._decoder if rank == 0 else FrameDecoder(self._epoch)).decode(data)
        return read_error(frame) if frame.kind == ERROR else read_result(frame)
