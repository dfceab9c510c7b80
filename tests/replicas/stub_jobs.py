"""Jobs for a pool of stubs, and the stubs' start."""

from __future__ import annotations

import threading
import time

from raytp.replicas.pool import ReplicaPool
from raytp.scaling import FixedPolicy, Scaler
from scheduler.sampling_params import SamplingParams

PARAMS = SamplingParams()


def fixed(most, least=1):
    return Scaler(FixedPolicy(), least, most)


class Starter:
    """Starts the given engines one after another; an exception among them is a start that fails."""

    def __init__(self, engines):
        self.engines = engines
        self.lock = threading.Lock()
        self.started = []

    def __call__(self, number, on_progress):
        with self.lock:
            engine = next(self.engines)
            if isinstance(engine, Exception):
                raise engine
            self.started.append(engine)
        return engine


def jobs_of(prompts):
    return ((i, prompt, PARAMS) for i, prompt in enumerate(prompts))


def answer_all(starter, scaler, prompts, **settings):
    """Every prompt's text, and that each was answered once."""
    with ReplicaPool(starter, scaler, show_progress=False, **settings) as replicas:
        results = [each for each in replicas.complete(jobs_of(prompts)) if each is not None]
    keys = [key for key, _ in results]
    assert sorted(keys) == list(range(len(prompts)))
    assert all(engine.is_shut_down for engine in starter.started)
    return {key: output.text for key, output in results}


class Arrivals:
    """Rows that come at moments, in seconds from now; `pool.complete` reads `jobs`."""

    def __init__(self, moments):
        self.start_s = time.monotonic()
        self.moments = moments
        self.num_read = 0

    def num_arrived(self):
        return sum(moment <= time.monotonic() - self.start_s for moment in self.moments)

    def num_unread(self):
        return self.num_arrived() - self.num_read

    def jobs(self):
        for i, moment in enumerate(self.moments):
            while time.monotonic() - self.start_s < moment:
                yield None
            self.num_read += 1
            yield i, f"prompt {i}", PARAMS
