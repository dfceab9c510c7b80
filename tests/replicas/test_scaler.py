"""What becomes of policies that are no policies: errors that name them, whatever they raise or answer."""

from __future__ import annotations

import signal
import statistics
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from raytp import termination
from raytp.errors import ConfigError
from raytp.scaling import QueuePolicy, Scaler, load_policy
from tests.simulator import small

SEEN = replace(
    small.SEEN,
    rows_waiting=3,
    tokens_per_row=None,
    tokens_per_s_per_replica=None,
    num_ready=0,
    target=0,
    max_replicas=9,
)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero ("),
        ("1 / 0", ".py, line 1: 1 / 0)"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def g(seen): return 1", ".py, has no f; if another file was meant"),
        ("f = 3", "is no function"),
        ("def __getattr__(name): raise OSError(name)", "OSError: f"),
    ],
)
def test_a_module_that_cannot_be_used_is_an_error_that_names_the_policy(tmp_path, monkeypatch, source, told):
    monkeypatch.syspath_prepend(tmp_path)
    name = tmp_path.name
    (tmp_path / f"{name}.py").write_text(source)
    with pytest.raises(ConfigError, match=f"policy '{name}:f' ") as caught:
        load_policy(f"{name}:f")
    assert told in str(caught.value)


def test_a_module_is_found_in_the_current_folder_and_else_it_is_said_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(ConfigError, match=r"no module own_policy in the current folder.* PYTHONPATH.*queue:SEC"):
        load_policy("own_policy:f")
    (tmp_path / "own_policy.py").write_text("def f(seen):\n    return 2\n")
    monkeypatch.chdir(tmp_path)
    assert Scaler(load_policy("own_policy:f"), 0, 3).decide(SEEN) == 2


@pytest.mark.parametrize("text", [":f", ".x:f", "a..b:f", "a.:f", "..:f", "queues:", ":", "quue:30", "dedline:6e2"])
def test_a_text_that_names_no_module_is_told_what_a_policy_is(text):
    with pytest.raises(ConfigError, match="is not known; a policy is fixed, fixed:COUNT"):
        load_policy(text)


def test_a_policy_that_raises_is_an_error_that_names_it_and_what_it_raised():
    def hasty(seen):
        return 1 // (seen.rows_running * 0)

    with pytest.raises(ConfigError, match=r"policy tests\S+hasty raised ZeroDivisionError: integer") as caught:
        Scaler(hasty, 0, 3).decide(SEEN)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    line = hasty.__code__.co_firstlineno + 1
    assert str(caught.value).endswith(f"({__file__}, line {line}: return 1 // (seen.rows_running * 0))")

    def careless(seen):
        return statistics.mean([])  # raises deep in the library

    with pytest.raises(ConfigError, match=r"raised StatisticsError.*test_scaler\.py, line \d+: return statistics"):
        Scaler(careless, 0, 3).decide(SEEN)
    with pytest.raises(ConfigError, match=r"policy QueuePolicy\(drain_s=5\) raised AttributeError"):
        Scaler(QueuePolicy(5), 0, 3).decide(None)


@pytest.mark.parametrize("status_of_ray", [None, 1])
def test_a_policy_cannot_end_the_command_but_a_signal_can(monkeypatch, status_of_ray):
    monkeypatch.setattr(termination, "_has_come", False)
    with pytest.raises(ConfigError, match=r"quits raised SystemExit: 143"):
        Scaler(quits, 0, 3).decide(SEEN)

    def is_ended(seen):
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            sys.exit(status_of_ray or termination.EXIT_STATUS)

    before = signal.signal(signal.SIGTERM, termination.terminate)
    try:
        with pytest.raises(SystemExit):
            Scaler(is_ended, 0, 3).decide(SEEN)
    finally:
        signal.signal(signal.SIGTERM, before)


def quits(seen):
    sys.exit(143)


class OddIndex:
    def __index__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("answer", [2, np.int64(2), np.uint8(2), np.array(2)])
def test_any_integer_is_a_count(answer):
    target = Scaler(lambda seen: answer, 0, 3).decide(SEEN)
    assert (target, type(target)) == (2, int)


@pytest.mark.parametrize("answer", [True, np.True_, 2.0, np.float64(2), "2", None, Fraction(2), [2], OddIndex()])
def test_what_is_no_integer_is_no_count(answer):
    with pytest.raises(
        ConfigError, match=r"policy .*<lambda> answered .*, which is no integer: it must return a count"
    ):
        Scaler(lambda seen: answer, 0, 3).decide(SEEN)
