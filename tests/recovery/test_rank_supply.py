"""Which failures of new ranks are tried again, with groups that do as they are told; and what is said of a death."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from raytp import rank_supply
from raytp.autopsy import describe_death
from raytp.config import EngineConfig
from raytp.errors import (
    ConfigError,
    EngineClosedError,
    KVCacheMemoryError,
    ModelNotFoundError,
    PlacementError,
    RankDiedError,
    RankFailedError,
    RaytpError,
    RendezvousError,
    RendezvousTimeoutError,
    StartTimeoutError,
)
from raytp.rank_supply import RankSupply
from workers.config import LoadReport, WorkerConfig

REPORT = LoadReport(
    rank=0, device_name="", attention_backend="", num_kv_blocks=7, weight_bytes=1, peak_host_bytes=1, load_s=1.0
)


class FakeGroups:
    """Makes groups whose starts fail as listed, one after another, and then succeed."""

    def __init__(self, *failures: RaytpError | None) -> None:
        self.failures = list(failures)
        self.num_started = 0
        self.num_closed = 0
        self.placement_group = None
        self.made: list[tuple[int, float]] = []
        """(ranks, how long they may wait for room) of each group."""

    def __call__(self, config: EngineConfig, worker_config: WorkerConfig, *args: Any, **options: Any) -> FakeGroups:
        self.made.append((worker_config.world_size, config.placement_timeout_s))
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


def make_supply(monkeypatch: pytest.MonkeyPatch, groups: FakeGroups, **options: Any) -> RankSupply:
    monkeypatch.setattr(rank_supply, "RankGroup", groups)
    config = EngineConfig(**{"max_restarts": 2} | options)
    worker_config = WorkerConfig(
        model_path="", world_size=config.tensor_parallel_size, device="cpu", dtype="", load_format="", block_size=16,
        attention_backend="", enforce_eager=False, num_kv_blocks=None, memory_fraction=1.0, cpu_kv_cache_bytes=1,
        max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1, num_valid_tokens=None, num_threads=1, timeout_s=1.0,
    )  # fmt: skip
    return RankSupply(config, worker_config, on_status=lambda *_: None)


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


def test_a_group_shrinks_to_what_there_is_room_for_and_grows_when_there_is_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first wait is for the autoscaler, the last for anything at all; those in between only look."""
    no_room = PlacementError("no room")
    room = 1
    monkeypatch.setattr(rank_supply, "has_room", lambda num_ranks, *_: num_ranks <= room)
    groups = FakeGroups(None, no_room, no_room)
    supply = make_supply(monkeypatch, groups, tensor_parallel_size=3, min_tensor_parallel_size=1)
    supply.start()
    supply.rebuild("a node was lost")
    assert groups.made == [(3, 900), (3, 900), (2, 10), (1, 900)]
    assert supply.room_for_more() is None
    supply.rebuild("killed")
    room = 2
    report = supply.room_for_more()
    assert report == "there is room for 2 ranks, where 1 are at work: they are built again"
    supply.rebuild(report)
    assert supply.room_for_more() is None
    room = 3
    supply.rebuild("killed")
    assert groups.made[4:] == [(1, 900), (2, 10), (3, 10)]
    assert [recovery.num_ranks for recovery in supply.recoveries] == [1, 1, 2, 3]
    groups.failures = [no_room, no_room]
    supply.rebuild("killed")
    assert groups.made[7:] == [(3, 900), (2, 10), (1, 900)]


def test_ranks_that_cannot_be_more_go_on_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has joined that lacks the model, say. It is left alone for some minutes."""
    monkeypatch.setattr(rank_supply, "has_room", lambda *_: True)
    groups = FakeGroups(PlacementError("no room"))
    supply = make_supply(monkeypatch, groups, tensor_parallel_size=2, min_tensor_parallel_size=1)
    supply.start()
    groups.failures = [ModelNotFoundError("there is no /models/x on this node")]
    supply.rebuild(str(supply.room_for_more()))
    assert groups.made == [(2, 900), (1, 900), (2, 10), (1, 900)]
    assert supply.room_for_more() is None
    monkeypatch.setattr(rank_supply, "_GROW_AGAIN_S", 0.0)
    supply._grow_not_before = 0.0
    groups.failures = [RankDiedError("and it is lost again")]
    supply.rebuild(str(supply.room_for_more()))
    assert groups.made[4:] == [(2, 10), (1, 900)]


def test_a_retry_waits_for_room_as_long_as_the_first_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_supply, "has_room", lambda *_: False)
    no_room, died = PlacementError("no room"), RankDiedError("died")
    groups = FakeGroups(None, no_room, died, no_room)
    supply = make_supply(monkeypatch, groups, tensor_parallel_size=3, min_tensor_parallel_size=1)
    supply.start()
    supply.rebuild("a node was lost")
    assert groups.made == [(3, 900), (3, 900), (2, 10), (2, 10), (1, 900)]


@pytest.mark.parametrize(
    ("failure", "is_tried_again"),
    [
        (RankDiedError("killed"), True),
        (RendezvousError("a peer has died"), True),
        (RendezvousTimeoutError("no way to rank 0"), False),
        (StartTimeoutError("stopped while loading"), False),
    ],
)
def test_what_a_first_start_tries_again(
    monkeypatch: pytest.MonkeyPatch, failure: RaytpError, is_tried_again: bool
) -> None:
    """However long it has waited for its place. A rebuild tries all of it again."""
    groups = FakeGroups(failure)
    supply = make_supply(monkeypatch, groups)
    with nullcontext() if is_tried_again else pytest.raises(type(failure)):
        supply.start()
    assert groups.num_started == 1 + is_tried_again
    groups.failures = [None, failure, failure]
    supply.start()
    supply.rebuild("killed")
    assert groups.num_started == 5 + is_tried_again


def test_less_than_the_least_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = FakeGroups(None, *[PlacementError("no room")] * 2)
    supply = make_supply(monkeypatch, groups, tensor_parallel_size=3, min_tensor_parallel_size=2)
    supply.start()
    with pytest.raises(PlacementError):
        supply.rebuild("killed")
    assert [num_ranks for num_ranks, _ in groups.made] == [3, 3, 2]


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
        (
            "The actor died unexpectedly. Worker exit detail: Worker exits with an exit code 3.",
            "it ended with exit code 3",
        ),
    ],
)
def test_a_death_is_told_as_far_as_it_is_known(death: str, cause: str) -> None:
    assert describe_death(death, log="").startswith(cause)


@pytest.mark.parametrize(
    ("least", "said"), [(3, "exceeds tensor_parallel_size=2"), (0, "at least 1"), (1.5, "integer")]
)
def test_the_least_number_of_ranks_is_checked(least: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"min_tensor_parallel_size={least} .*{said}"):
        EngineConfig(tensor_parallel_size=2, min_tensor_parallel_size=least)
