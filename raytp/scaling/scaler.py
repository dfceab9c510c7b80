"""Asks a policy, keeps its answer within the limits, and remembers when the answer last changed.

Called by whoever owns the replicas, every few seconds: `raytp.simulator.cluster` in a simulation.
"""

from __future__ import annotations

import logging
import operator

from raytp.errors import ConfigError
from raytp.scaling.blame import raised
from raytp.scaling.observation import Observation, Policy
from raytp.termination import is_termination
from scheduler.errors import shown

logger = logging.getLogger(__name__)


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
        """The new target. Raises ConfigError if the policy raises, or answers with anything but an integer."""
        target = min(max(self._ask(seen), self.min_replicas), self.max_replicas)
        if target != self.target:
            self.target = target
            self._changed_s = seen.now_s
        return target

    def _ask(self, seen: Observation) -> int:
        try:
            answer = self._policy(seen)
        except (Exception, SystemExit) as error:  # it may be anybody's code
            if is_termination(error):  # it has come while the policy thought
                raise
            raise ConfigError(f"policy {self._name()} {raised(error)}") from error
        try:
            if not isinstance(answer, bool):
                return operator.index(answer)
        except Exception:  # it may be anybody's class
            logger.debug("the answer is no integer", exc_info=True)
        raise ConfigError(
            f"policy {self._name()} answered {shown(answer)}, which is no integer: it must return a count of replicas"
        )

    def _name(self) -> str:
        """MODULE:FUNCTION, as users give it, or what it is."""
        module, name = (getattr(self._policy, each, None) for each in ("__module__", "__qualname__"))
        return f"{module}:{name}" if module and name else shown(self._policy)
