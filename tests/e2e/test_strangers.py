"""Whoever can reach an engine's ports, and is none of its ranks, changes nothing: at start, at work, in recovery."""

from __future__ import annotations

import contextlib
import glob
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private.state import actors

from raytp import LLM, SamplingParams
from tests.e2e.checkpoints import TRIVIA

SEED = int(os.environ.get("RAYTP_FUZZ_SEED", "20261130"))
PROMPTS = [f"The story of {name} begins" for name in ("a cat", "the sea", "one king", "two kings", "rain", "bread")]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PAUSE_S = 0.01
"""Between two visits of one stranger."""
NUM_ROUNDS = 5
"""Of all ports, until they are looked for again."""
_LISTENING = "0A"


def pids_of_engines() -> dict[int, str]:
    """Processes of drivers and ranks that live."""
    return {
        actor["Pid"]: actor["ActorClassName"]
        for actor in actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] in ("Driver", "RankActor")
    }


def ports_of(pid: int) -> set[int]:
    """TCP ports that a process listens on."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()
    ]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == _LISTENING and line[9] in sockets}


class Stranger:
    """Goes from port to port, says something wrong, and hangs up or not, until it is told to end."""

    def __init__(self, others: set[int]) -> None:
        """`others`: processes to leave alone."""
        self._others = others
        self._rng = random.Random(SEED)
        self._is_over = threading.Event()
        self._kept: list[socket.socket] = []
        self.num_port_visits = 0
        self._threads = [threading.Thread(target=visit) for visit in (self._visit_ports, self._visit_unix_sockets)]

    def __enter__(self) -> Stranger:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        for raw in self._kept:
            raw.close()

    def _visit_ports(self) -> None:
        host = ray.util.get_node_ip_address()
        while not self._is_over.is_set():
            ports: set[int] = set()
            for pid in set(pids_of_engines()) - self._others:
                with contextlib.suppress(OSError):
                    ports |= ports_of(pid)
            for port in sorted(ports) * NUM_ROUNDS or [0]:
                self._is_over.wait(PAUSE_S)
                with contextlib.suppress(OSError):
                    self._visit(socket.create_connection((host, port), timeout=1))
                    self.num_port_visits += 1

    def _visit_unix_sockets(self) -> None:
        """Those that are found: each is there for a moment only. The channel's own tests visit them for certain."""
        while not self._is_over.wait(PAUSE_S):
            for path in glob.glob(f"{tempfile.gettempdir()}/raytp-*/ranks"):
                raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                raw.settimeout(1)
                with contextlib.suppress(OSError):
                    raw.connect(path)
                    self._visit(raw)

    def _visit(self, raw: socket.socket) -> None:
        rng = self._rng
        with contextlib.suppress(OSError):
            raw.sendall(
                rng.choice([b"", b"\x7f\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(rng.randint(1, 3000))])
            )
        if rng.random() < 0.02:
            self._kept.append(raw)
        else:
            raw.close()


@pytest.fixture
def stranger(ray_session: None) -> Iterator[Stranger]:
    print(f"RAYTP_FUZZ_SEED={SEED}")
    with Stranger(set(pids_of_engines())) as stranger:
        yield stranger


def test_an_engine_starts_works_and_recovers_among_strangers(stranger: Stranger) -> None:
    others = set(pids_of_engines())
    with LLM(TRIVIA, 2, device="cpu") as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        ranks = [pid for pid, name in pids_of_engines().items() if name == "RankActor" and pid not in others]
        assert len(ranks) == 2
        for _ in range(3):
            assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        assert llm.recoveries() == []
        os.kill(ranks[0], signal.SIGKILL)
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        deadline = time.monotonic() + 60
        while not llm.recoveries():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        assert len(llm.recoveries()) == 1
    assert stranger.num_port_visits > 100
