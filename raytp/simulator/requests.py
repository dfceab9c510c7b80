"""What arrives: a trace from a file, a Poisson process, or everything at once. Read by `raytp.simulator.cluster`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raytp.errors import ConfigError
from raytp.simulator.plain_steps import SimulatedSequence
from raytp.simulator.seconds import check_seconds
from scheduler.errors import shown
from scheduler.sampling_params import ResolvedSampling
from scheduler.step import IntArray

_MAX_TOKENS = 10**7
_FIELDS = {"arrival_s", "prompt_tokens", "output_tokens", "prefix_id", "prefix_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One row of a trace. Times in seconds since its beginning."""

    arrival_s: float
    prompt_tokens: int
    """The prefix included."""
    output_tokens: int
    prefix_id: str | None = None
    """Requests of the same id begin with the same tokens."""
    prefix_tokens: int = 0
    """How many tokens they have in common."""

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_TOKENS:
                raise ConfigError(f"{name}={shown(value)} must be an integer from {least} to {_MAX_TOKENS}")
        check_seconds("arrival_s", self.arrival_s)
        if not isinstance(self.prefix_id, str | None):
            raise ConfigError(f"prefix_id={shown(self.prefix_id)} must be a text")
        if self.prefix_tokens > self.prompt_tokens:
            raise ConfigError(f"prefix_tokens={self.prefix_tokens} exceeds prompt_tokens={self.prompt_tokens}")
        if (self.prefix_tokens > 0) != (self.prefix_id is not None):
            raise ConfigError("prefix_id and prefix_tokens belong together: give both or neither")


class SequenceMaker:
    """Makes the scheduler's sequences of requests, with token ids that agree exactly where their prefixes do."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._prefixes: dict[tuple[str, int], int] = {}

    def make(self, seq_id: int, request: SimulatedRequest) -> SimulatedSequence:
        """A fresh sequence; `seq_id` tells its own tokens from those of all others."""
        prompt: IntArray = np.zeros(request.prompt_tokens, dtype=np.int32)
        self._sign(prompt[request.prefix_tokens :], seq_id)
        if request.prefix_id is not None:
            number = self._prefixes.setdefault((request.prefix_id, request.prefix_tokens), len(self._prefixes))
            self._sign(prompt[: request.prefix_tokens], number)
        sampling = ResolvedSampling(max_tokens=request.output_tokens)
        return SimulatedSequence(seq_id, prompt, sampling)

    def _sign(self, tokens: IntArray, number: int) -> None:
        """Write a number into the first tokens, in digits of the vocabulary; short tokens hold a part of it."""
        for index in range(min(3, len(tokens))):
            number, tokens[index] = divmod(number, self._vocab_size)


def read_trace(path: Path) -> list[SimulatedRequest]:
    """The requests of a file of JSON lines, by arrival. Raises ConfigError that names the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # a name with a zero byte, or what is no text
        raise ConfigError(f"the trace {path} cannot be read: {error}") from None
    requests = [_parse(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not requests:
        raise ConfigError(f"the trace {path} holds no request")
    return sorted(requests, key=lambda request: request.arrival_s)


def poisson(
    num_requests: int, rate: float, prompt_tokens: int, output_tokens: int, seed: int
) -> list[SimulatedRequest]:
    """Requests that arrive independently, `rate` a second; lengths as `draw_length` draws them."""
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"rate={rate:g} must be a number of requests a second above 0")
    rng = random.Random(seed)
    return [_drawn(rng, now, prompt_tokens, output_tokens) for now in _arrivals(rng, num_requests, rate)]


def batch(num_requests: int, prompt_tokens: int, output_tokens: int, seed: int) -> list[SimulatedRequest]:
    """Requests that are all there at once; lengths as `draw_length` draws them."""
    rng = random.Random(seed)
    return [_drawn(rng, 0.0, prompt_tokens, output_tokens) for _ in range(num_requests)]


def draw_length(rng: random.Random, mean: int) -> int:
    """Uniform from a fifth of the mean to nine fifths of it, as nano-vLLM's benchmark has them, roughly."""
    return rng.randint(max(1, mean // 5), max(1, 2 * mean - mean // 5))


def _arrivals(rng: random.Random, num_requests: int, rate: float) -> Iterator[float]:
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        yield now


def _drawn(rng: random.Random, now: float, prompt_tokens: int, output_tokens: int) -> SimulatedRequest:
    prompt, output = draw_length(rng, prompt_tokens), draw_length(rng, output_tokens)
    return SimulatedRequest(arrival_s=now, prompt_tokens=prompt, output_tokens=output)


def _parse(path: Path, number: int, line: str) -> SimulatedRequest:
    try:
        fields: Any = json.loads(line)
        if not isinstance(fields, dict):
            raise ConfigError("it is no JSON object")
        if unknown := sorted(set(fields) - _FIELDS):
            raise ConfigError(f"{unknown[0]!r} is not known; a request has {', '.join(sorted(_FIELDS))}")
        missing = sorted({"arrival_s", "prompt_tokens", "output_tokens"} - set(fields))
        if missing:
            raise ConfigError(f"{missing[0]!r} is missing")
        return SimulatedRequest(**fields)
    except RecursionError:
        raise ConfigError(f"the trace {path}, line {number}: it is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and ConfigError
        raise ConfigError(f"the trace {path}, line {number}: {error}") from None
