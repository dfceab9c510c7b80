"""Which failures of new ranks are tried again, with groups that do as they are told; and what is said of a death."""

from __future__ import annotations

from typing import Any

import pytest

from raytp import rank_supply
from raytp.autopsy import describe_death
from raytp.config import EngineConfig
from raytp.errors import EngineClosedError, KVCacheMemoryError, RankDiedError, RankFailedError, RaytpError
from raytp.rank_supply import RankSupply
from workers.config import LoadReport

REPORT = LoadReport(
    rank=0, device_name="", attention_backend="", num_kv_blocks=7, weight_bytes=1, peak_host_bytes=1, load_s=1.0
)


class FakeGroups:
    """Makes groups whose starts fail as listed, one after another, and then succeed."""

    def __init__(self, *failures: RaytpError | None) -> None:
        self.failures = list(failures)
        self.num_started = 0
        self.num_closed = 0

    def __call__(self, *args: Any, **options: Any) -> FakeGroups:
        return self

    def start(self, on_status: Any) -> Any:
        self.num_started += 1
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return None, [REPORT]

    def kill_ranks(self) -> None:
        pass

    def give_away_placement(self) -> None:
        pass

    def close(self) -> None:
        self.num_closed += 1


def make_supply(monkeypatch: pytest.MonkeyPatch, groups: FakeGroups, max_restarts: int = 2) -> RankSupply:
    monkeypatch.setattr(rank_supply, "RankGroup", groups)
    config: Any = EngineConfig(max_restarts=max_restarts)
    return RankSupply(config, worker_config=None, on_status=lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [RankFailedError("out of memory"), KVCacheMemoryError("no memory is left")])
def test_what_a_rank_raises_ends_the_first_start_but_not_a_rebuild(
    monkeypatch: pytest.MonkeyPatch, failure: RaytpError
) -> None:
    """The dead ranks' memory may not have been free yet; at the first start there are no dead ranks."""
    with pytest.raises(type(failure)):
        make_supply(monkeypatch, FakeGroups(failure)).start()
    groups = FakeGroups(None, failure, failure)
    supply = make_supply(monkeypatch, groups)
    supply.start()
    assert supply.rebuild("killed")[1] == 7
    assert groups.num_started == 4
    assert [recovery.report for recovery in supply.recoveries] == ["killed"]


def test_a_rebuild_that_never_succeeds_tells_every_cause_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = FakeGroups(None, RankDiedError("first"), RankFailedError("second"), RankDiedError("third"))
    supply = make_supply(monkeypatch, groups)
    supply.start()
    with pytest.raises(RankDiedError, match=r"(?s)3 times.*attempt 1: first.*attempt 2: second.*attempt 3: third"):
        supply.rebuild("killed")
    assert groups.num_closed == 1


def test_no_ranks_are_built_for_an_engine_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = FakeGroups()
    supply = make_supply(monkeypatch, groups)
    supply.close()
    with pytest.raises(EngineClosedError):
        supply.rebuild("killed")
    assert groups.num_started == 0


@pytest.mark.parametrize(
    ("death", "cause"),
    [
        (
            "The actor died unexpectedly before finishing this task.\nThe actor is dead because its worker process has "
            "died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection "
            "error code 2. End of file. There are some potential root causes.",
            "killed from outside (SIGKILL), or ended without a word",
        ),
        (
            "The actor died unexpectedly before finishing this task.",
            "killed from outside (SIGKILL), or ended without a",
        ),
        ("The actor is temporarily unavailable: RPC error", "The actor is temporarily unavailable: RPC error"),
        ("The actor is dead because its node has died. Node Id: f00", "its node was lost"),
    ],
)
def test_a_death_is_told_as_far_as_it_is_known(death: str, cause: str) -> None:
    assert describe_death(death, log="").startswith(cause)
