"""Asks a policy, keeps its answer within the limits, and remembers when the answer last changed.

Called by whoever owns the replicas, every few seconds: `raytp.simulator.cluster` in a simulation.
"""

from __future__ import annotations

from raytp.errors import ConfigError
from raytp.scaling.observation import Observation, Policy


class Scaler:
    """The present target, and the policy that moves it."""

    def __init__(self, policy: Policy, min_replicas: int, max_replicas: int) -> None:
        """Raises ConfigError if the limits contradict each other."""
        if not 0 <= min_replicas <= max_replicas or max_replicas < 1:
            raise ConfigError(
                f"replicas {min_replicas}:{max_replicas}: MIN must be at least 0 and at most MAX, and MAX at least 1"
            )
        self.min_replicas = min_replicas
        self.max_replicas = max_replicas
        self.target = min_replicas
        self._policy = policy
        self._changed_s = 0.0

    def seconds_since_change(self, now_s: float) -> float:
        """Since the target last changed, or since the job began."""
        return now_s - self._changed_s

    def decide(self, seen: Observation) -> int:
        """The new target. Raises ConfigError if the policy answers with anything but an integer."""
        answer = self._policy(seen)
        if not isinstance(answer, int) or isinstance(answer, bool):
            raise ConfigError(
                f"the policy answered {answer!r}, which is no integer: it must return a count of replicas"
            )
        target = min(max(answer, self.min_replicas), self.max_replicas)
        if target != self.target:
            self.target = target
            self._changed_s = seen.now_s
        return target
