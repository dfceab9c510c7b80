"""Carries steps to every rank and rank 0's results back.

`Transport` is the interface; `SocketTransport` the one in daily use, over the connections of `workers.channel`. The
other, over plain actor calls, is `raytp.ray_transport`. Called by `raytp.engine`, from one thread. Next hop of a
request: `workers.worker`.
"""

from __future__ import annotations

import contextlib
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection

from raytp.errors import RankFailedError, StepTimeoutError
from scheduler.step import Step, StepResult
from workers.channel import set_timeouts
from workers.frames import (
    ERROR,
    SHUTDOWN,
    STEP,
    ErrorReport,
    Frame,
    FrameDecoder,
    encode,
    read_error,
    read_result,
    step_body,
)

GRACE_S = 0.5
"""After a first failure, how long to listen for what the other ranks have to say: the first is not always the cause."""


class Transport(ABC):
    """Sends steps in order and receives their results in the same order; several may be on their way."""

    @abstractmethod
    def send(self, step: Step) -> None:
        """Hand the step to every rank. Raises RankFailedError or StepTimeoutError."""

    @abstractmethod
    def receive(self) -> StepResult:
        """The oldest result not yet received. Raises RankFailedError or StepTimeoutError."""

    @abstractmethod
    def close(self) -> None:
        """Tell the ranks to end; never raises for a rank that is already gone."""


class SocketTransport(Transport):
    """One stream connection for each rank; waits on all of them at once, so that any rank's end is noticed."""

    def __init__(self, connections: Sequence[Connection], names: Sequence[str], epoch: int, timeout_s: float) -> None:
        """`names` say what to call each rank in an error."""
        self._connections = connections
        self._names = names
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._decoder = FrameDecoder(epoch)
        self._poller = select.poll()
        self._rank_of_fd = {connection.fileno(): rank for rank, connection in enumerate(connections)}
        for connection in connections:
            self._poller.register(connection.fileno(), select.POLLIN)
            set_timeouts(connection, receive_s=timeout_s, send_s=timeout_s)

    def send(self, step: Step) -> None:
        """See `Transport.send`."""
        data = encode(Frame(self._epoch, step.step_id, STEP, step_body(step)))
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(data)
            except BlockingIOError:
                raise StepTimeoutError(
                    f"{self._names[rank]} did not take step {step.step_id} ({len(data)} bytes) within "
                    f"step_timeout_s={self._timeout_s:g}"
                ) from None
            except OSError:
                raise RankFailedError(self._failures({})) from None

    def receive(self) -> StepResult:
        """See `Transport.receive`."""
        ready = self._poll(self._timeout_s)
        if not ready:
            raise StepTimeoutError(
                f"no rank answered within step_timeout_s={self._timeout_s:g}. One of {', '.join(self._names)} is "
                f"stuck, or the step needs longer: then raise the time-out, or lower max_num_batched_tokens"
            )
        failures = {}
        result = None
        for rank in ready:
            outcome = self._read(rank)
            if isinstance(outcome, StepResult):
                result = outcome
            else:
                failures[rank] = outcome
        if failures or result is None:
            raise RankFailedError(self._failures(failures))
        return result

    def close(self) -> None:
        """See `Transport.close`."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                set_timeouts(connection, receive_s=1, send_s=1)
                connection.send_bytes(encode(Frame(self._epoch, 0, SHUTDOWN, None)))
            connection.close()

    def _poll(self, timeout_s: float) -> list[int]:
        return [self._rank_of_fd[fd] for fd, _ in self._poller.poll(timeout_s * 1000)]

    def _read(self, rank: int) -> StepResult | ErrorReport | None:
        """What a rank that is ready to read has sent; None if its connection has ended."""
        try:
            frame = self._decoder.decode(self._connections[rank].recv_bytes())
        except BlockingIOError:
            raise StepTimeoutError(
                f"{self._names[rank]} stopped in the middle of an answer for step_timeout_s={self._timeout_s:g}"
            ) from None
        except (EOFError, OSError):
            self._poller.unregister(self._connections[rank].fileno())
            return None
        return read_error(frame) if frame.kind == ERROR else read_result(frame)

    def _failures(self, failures: dict[int, ErrorReport | None]) -> str:
        """What is wrong with which rank, with what arrives within the grace period; each rank once."""
        deadline = time.monotonic() + GRACE_S
        while len(failures) < len(self._connections) and (left := deadline - time.monotonic()) > 0:
            for rank in self._poll(left):
                outcome = self._read(rank)
                if not isinstance(outcome, StepResult) and failures.get(rank) is None:
                    failures[rank] = outcome
        return describe_failures(failures, self._names)


def describe_failures(failures: dict[int, ErrorReport | None], names: Sequence[str]) -> str:
    """One text for all failed ranks; None stands for a rank that died without a word."""
    if not failures:
        return "a rank failed, and no rank said why"
    lines = []
    for rank, report in sorted(failures.items()):
        if report is None:
            lines.append(f"{names[rank]} died without a word: killed from outside, or out of memory?")
        else:
            lines.append(f"{names[rank]} raised {report.type}: {report.message}\n{report.traceback}")
    return "\n".join(lines)
