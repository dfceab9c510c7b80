"""What is to do a batch job, as users name it: an engine of its own, several, or a shared one. Called by `api`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytp.config import check_shared_alone, make_engine_config
from raytp.errors import ConfigError
from raytp.model_files import model_digest
from raytp.progress import ProgressBar
from raytp.scaling import Policy, Scaler, load_policy
from raytp.scaling.limits import read_limits
from scheduler.errors import shown

if TYPE_CHECKING:
    from raytp.llm import LLM
    from raytp.replicas.pool import ReplicaPool

_MAX_REPLICAS = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What is to do it: arguments of `raytp.LLM`, or a shared engine; and how many. Raises ConfigError."""

    model: str | os.PathLike[str] | None
    tensor_parallel_size: int
    options: Mapping[str, Any]
    shared: str | None
    replicas: Any = None
    """None is one engine, without a policy."""
    policy: str | Policy = "fixed"

    def __post_init__(self) -> None:
        if self.shared is not None:
            check_shared_alone(self.shared, self.model, self.tensor_parallel_size, self.options)
        if self.shared is not None and self.replicas is not None:
            raise ConfigError(f"engine {self.shared} runs already, and is one: leave out replicas")
        if self.replicas is None and self.policy != "fixed":
            raise ConfigError(f"policy={shown(self.policy)} decides between MIN and MAX replicas: give replicas too")
        self.scaler()

    def scaler(self) -> Scaler | None:
        """What decides how many there are; None if there is one. Raises ConfigError."""
        if self.replicas is None:
            return None
        least, most = read_limits(self.replicas, "replicas", _MAX_REPLICAS, least=1)
        policy = load_policy(self.policy) if isinstance(self.policy, str) else self.policy
        return Scaler(policy, least, most)

    def identity(self, show_progress: bool | None) -> dict[str, str]:
        """What tells its model from others; it is downloaded for that. Raises RaytpError if there is none."""
        if self.shared is not None:
            from raytp.connection import describe_engine

            with ProgressBar("finding the cluster", show_progress, names_stages=True) as bar:
                engine = describe_engine(self.shared, bar.update)
            return {"name": engine.model_name, "digest": engine.model_digest}
        from raytp.model_source import resolve_model

        with ProgressBar("finding the model", show_progress, names_stages=True) as bar:
            source = resolve_model(self.model, bar.update)
        return {"name": source.name, "digest": model_digest(source.path)}

    def start(self, show_progress: bool | None, num_unread: Callable[[], int]) -> LLM | ReplicaPool:
        """The engine, ready when it is entered. Raises RaytpError."""
        from raytp.connection import start_engine
        from raytp.llm import LLM

        scaler = self.scaler()
        if scaler is not None:
            return self._start_replicas(scaler, show_progress, num_unread)
        if self.shared is not None:
            return LLM.connect(self.shared, show_progress=show_progress)
        config = make_engine_config(self.tensor_parallel_size, dict(self.options))
        with ProgressBar("starting Ray", show_progress, names_stages=True) as bar:
            return LLM.of(start_engine(self.model, config, bar.update), show_progress=show_progress)

    def _start_replicas(self, scaler: Scaler, show_progress: bool | None, num_unread: Callable[[], int]) -> ReplicaPool:
        from raytp.replicas.pool import ReplicaPool
        from raytp.replicas.starting import prepare_start

        config = make_engine_config(self.tensor_parallel_size, dict(self.options))
        with ProgressBar("starting Ray", show_progress, names_stages=True) as bar:
            start = prepare_start(self.model, config, scaler.min_replicas, on_progress=bar.update)
        return ReplicaPool(start, scaler, num_unread=num_unread, show_progress=show_progress)
