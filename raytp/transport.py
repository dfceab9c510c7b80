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
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

from raytp.errors import FrameError, RankFailedError, StepTimeoutError
from scheduler.step import Step, StepResult
from workers.channel import receive, send, set_timeouts
from workers.frames import (
    ERROR,
    RESULT,
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

_LISTEN_S = 1.0
MAX_PAUSE_S = 2.0
"""Between two looks at what the ranks say. What goes beyond that is no silence of theirs: this process stood still."""
DIED = "died without a word"
"""Of a rank whose connection has ended; `raytp.rank_group` finds out more."""
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
    def check(self) -> None:
        """With nothing to receive: raises RankFailedError if a rank has ended or fallen silent. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Tell the ranks to end; never raises for a rank that is already gone."""


class SocketTransport(Transport):
    """One stream connection for each rank; waits on all of them at once, so that any rank's end is noticed."""

    def __init__(
        self,
        connections: Sequence[Connection],
        names: Sequence[str],
        epoch: int,
        timeout_s: float,
        heartbeat_timeout_s: float,
    ) -> None:
        """`names` say what to call each rank in an error."""
        self._connections = connections
        self._names = names
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._decoder = FrameDecoder(epoch)
        self._heard_at = [time.monotonic()] * len(connections)
        self._listened_at = time.monotonic()
        self._poller = select.poll()
        self._rank_of_fd = {connection.fileno(): rank for rank, connection in enumerate(connections)}
        self._results: deque[StepResult] = deque()
        """That came while a step was being sent."""
        for connection in connections:
            self._poller.register(connection.fileno(), select.POLLIN)
            set_timeouts(connection, receive_s=min(timeout_s, heartbeat_timeout_s), send_s=min(timeout_s, _LISTEN_S))

    def send(self, step: Step) -> None:
        """See `Transport.send`."""
        data = encode(Frame(self._epoch, step.step_id, STEP, step_body(step)))
        deadline = time.monotonic() + self._timeout_s
        for rank, connection in enumerate(self._connections):

            def wait(name: str = self._names[rank]) -> None:
                """A rank that is in a long step reads nothing, but says that it lives."""
                if time.monotonic() > deadline:
                    raise StepTimeoutError(
                        f"{name} did not take step {step.step_id} ({len(data)} bytes) within "
                        f"step_timeout_s={self._timeout_s:g}: it is stuck, or its step needs longer; then raise it"
                    )
                result = self._listen(0)
                if result is not None:
                    self._results.append(result)

            try:
                send(connection, data, wait)
            except OSError:
                raise RankFailedError(self._failures({})) from None

    def receive(self) -> StepResult:
        """See `Transport.receive`."""
        if self._results:
            return self._results.popleft()
        deadline = time.monotonic() + self._timeout_s
        while (left := deadline - time.monotonic()) > 0:
            result = self._listen(min(left, _LISTEN_S))
            if result is not None:
                return result
        raise StepTimeoutError(
            f"no rank answered within step_timeout_s={self._timeout_s:g}. One of {', '.join(self._names)} is "
            f"stuck, or the step needs longer: then raise the time-out, or lower max_num_batched_tokens"
        )

    def check(self) -> None:
        """See `Transport.check`."""
        while self._poll(0):
            self._listen(0)
        self._listen(0)

    def _listen(self, timeout_s: float) -> StepResult | None:
        """Read what each rank has sent; the result, if it came. Raises RankFailedError for the dead and the silent."""
        failures = {}
        result = None
        readable = self._poll(timeout_s)
        self._forgive_pause()
        for rank in readable:
            frame = self._read(rank)
            self._heard_at[rank] = time.monotonic()
            if frame is None or frame.kind == ERROR:
                failures[rank] = None if frame is None else read_error(frame)
            elif frame.kind == RESULT:
                result = read_result(frame)
        if failures:
            raise RankFailedError(self._failures(failures))
        silent_since = time.monotonic() - self._heartbeat_timeout_s
        silent = [name for name, heard_at in zip(self._names, self._heard_at, strict=True) if heard_at < silent_since]
        if silent:
            raise RankFailedError(describe_silence(silent, self._heartbeat_timeout_s))
        return result

    def _forgive_pause(self) -> None:
        """Silence counts only while somebody listened: a machine that was frozen has no silent ranks when it wakes."""
        now = time.monotonic()
        excess = max(0.0, now - self._listened_at - MAX_PAUSE_S)
        self._heard_at = [heard_at + excess for heard_at in self._heard_at]
        self._listened_at = now

    def close(self) -> None:
        """See `Transport.close`."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                set_timeouts(connection, receive_s=1, send_s=1)
                connection.send_bytes(encode(Frame(self._epoch, 0, SHUTDOWN, None)))
            connection.close()

    def _poll(self, timeout_s: float) -> list[int]:
        return [self._rank_of_fd[fd] for fd, _ in self._poller.poll(timeout_s * 1000)]

    def _read(self, rank: int) -> Frame | None:
        """The next of what a rank has sent; None if its connection has ended."""
        try:
            return self._decoder.decode(receive(self._connections[rank]))
        except BlockingIOError:
            silent_s = min(self._timeout_s, self._heartbeat_timeout_s)
            raise RankFailedError(
                f"{self._names[rank]} stopped in the middle of an answer, and said no more for {silent_s:g} s (the "
                f"lesser of step_timeout_s and heartbeat_timeout_s): stopped, or cut off from the network"
            ) from None
        except FrameError as error:
            raise FrameError(f"{self._names[rank]} sent what cannot be read: {error}") from error
        except (EOFError, OSError):
            self._poller.unregister(self._connections[rank].fileno())
            return None

    def _failures(self, failures: dict[int, ErrorReport | None]) -> str:
        """What is wrong with which rank, with what arrives within the grace period; each rank once."""
        deadline = time.monotonic() + GRACE_S
        while len(failures) < len(self._connections) and (left := deadline - time.monotonic()) > 0:
            for rank in self._poll(left):
                frame = self._read(rank)
                if (frame is None or frame.kind == ERROR) and failures.get(rank) is None:
                    failures[rank] = None if frame is None else read_error(frame)
        return describe_failures(failures, self._names)


def describe_silence(names: Sequence[str], heartbeat_timeout_s: float) -> str:
    """These ranks' processes do not even say that they are alive."""
    return (
        f"nothing was heard of {', '.join(names)} for heartbeat_timeout_s={heartbeat_timeout_s:g}: stopped, swapped "
        f"out, or cut off from the network; raise heartbeat_timeout_s if such pauses are to be expected"
    )


def describe_failures(failures: dict[int, ErrorReport | None], names: Sequence[str]) -> str:
    """One text for all failed ranks; None stands for a rank that died without a word.

    Where one died, what the others raised is most likely its consequence, for which a line is enough. What several
    raised alike is said once.
    """
    if not failures:
        return "a rank failed, and no rank said why"
    lines = [f"{names[rank]} {DIED}" for rank, report in sorted(failures.items()) if report is None]
    is_consequence = bool(lines)
    ranks_of: dict[tuple[str, str, str], list[str]] = {}
    for rank, report in sorted(failures.items()):
        if report is not None:
            ranks_of.setdefault((report.type, report.message, report.traceback), []).append(names[rank])
    for (kind, message, traceback), some in ranks_of.items():
        what = f"{' and '.join(some)} raised {kind}: "
        lines.append(what + message.partition("\n")[0] if is_consequence else f"{what}{message}\n{traceback}")
    return "\n".join(lines)
