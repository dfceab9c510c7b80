"""Which replica takes the next row, against a search through all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raytp.simulator.fleet import Member, ReplicaState
from raytp.simulator.replica import SimulatedReplica
from raytp.simulator.router import Router
from tests.simulator.small import small_replica

ROWS = 12
STATES = (ReplicaState.READY, ReplicaState.READY, ReplicaState.DRAINING)


def make_members(states: list[ReplicaState]) -> list[Member]:
    config = small_replica()
    members = []
    for number, state in enumerate(states):
        member = Member(number)
        member.engine = SimulatedReplica(config.scheduler, config.times, 0.0, takes_plain_steps=True)
        member.state = state
        members.append(member)
    return members


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(STATES), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 4), st.integers(0, 5)), max_size=60),
)
def test_the_emptiest_with_room_or_one_that_has_the_prefix(
    states: list[ReplicaState], operations: list[tuple[str | None, int, int]]
) -> None:
    """After each choice a replica gets the row, and another one ends some of its own."""
    members, router = make_members(states), Router(ROWS)
    holders: dict[str, set[int]] = {"a": set(), "b": set()}
    for member in members:
        router.changed(member)
    for prefix, ending, num_ended in operations:
        chosen = router.choose(prefix)
        having_room = [one for one in members if one.state is ReplicaState.READY and one.num_rows < ROWS]
        if not having_room:
            assert chosen is None
        else:
            assert chosen is not None
            emptiest = min(having_room, key=lambda one: (one.num_rows, one.member_id))
            near = [one for one in having_room if prefix and one.member_id in holders[prefix]]
            near = [one for one in near if one.num_rows <= max(1.5 * emptiest.num_rows, emptiest.num_rows + 8)]
            assert chosen is min(near or [emptiest], key=lambda one: (one.num_rows, one.member_id))
            if prefix:
                holders[prefix].add(chosen.member_id)
            change(router, chosen, 1)
        ended = members[ending % len(members)]
        change(router, ended, -min(num_ended, ended.num_rows))


def change(router: Router, member: Member, rows: int) -> None:
    assert member.engine is not None
    member.engine.num_rows += rows
    router.changed(member)


def test_prompts_that_begin_alike_go_to_the_same_replicas() -> None:
    """Four prefixes in turn over four replicas: each stays with one, as long as they are equally busy."""
    members, router = make_members([ReplicaState.READY] * 4), Router(1000)
    for member in members:
        router.changed(member)
    homes: dict[str, set[int]] = {}
    for index in range(400):
        prefix = f"system-{index % 4}"
        chosen = router.choose(prefix)
        assert chosen is not None
        homes.setdefault(prefix, set()).add(chosen.member_id)
        change(router, chosen, 1)
    assert sorted(map(sorted, homes.values())) == [[0], [1], [2], [3]]
