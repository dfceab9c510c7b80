"""How many replicas there are, and may be, in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raytp.errors import ConfigError
from raytp.replicas.crew import Crew, crew_of
from raytp.replicas.replica import State
from raytp.scaling.limits import read_limits


def test_a_crew_in_words():
    crew = Crew(num_ready=2, num_starting=1, num_waiting=3, num_leaving=0, num_nodes=1)
    assert crew.as_text() == "2 replicas on 1 node, 1 starting, 3 waiting for room"
    assert crew.num_pending == 4
    assert Crew(num_ready=0, num_starting=0, num_waiting=0, num_leaving=0, num_nodes=0).as_text() == "0 replicas"


def test_nodes_of_one_host_are_several_nodes():
    engines = [SimpleNamespace(info=SimpleNamespace(hostnames=("host",), node_ids=ids)) for ids in (("a", "b"), ("b",))]
    replicas = [SimpleNamespace(state=State.READY, takes_rows=True, engine=engine) for engine in engines]
    assert crew_of(replicas).as_text() == "2 replicas on 2 nodes"


@pytest.mark.parametrize(
    ("text", "limits"), [("2", (2, 2)), ("1:4", (1, 4)), (3, (3, 3)), ((1, 2), (1, 2)), ([2, 5], (2, 5))]
)
def test_limits_as_users_write_them(text, limits):
    assert read_limits(text, "replicas", 100, least=1) == limits


@pytest.mark.parametrize("text", ["", "0", "2:1", "0:3", "1:2:3", "-1", "many", "1:101", 0, True, (1,), (1, 2.0), None])
def test_limits_that_are_none(text):
    with pytest.raises(ConfigError, match="replicas"):
        read_limits(text, "replicas", 100, least=1)
