"""Which sampling settings are accepted, and how a checkpoint's generation_config fills what the caller left unset."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.errors import RequestError
from scheduler.sampling_params import (
    DEFAULT_MAX_TOKENS,
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_SEED,
    ResolvedSampling,
    SamplingParams,
    fit_to_model,
    resolve,
    validate,
)

FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
INTEGERS = ["top_k", "seed", "max_tokens", "min_tokens", "logprobs", "n"]
EOS = (2, 7)
SAMPLING_CHECKPOINT = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "eos_token_id": [2, 7],
}


def resolved(params: SamplingParams | None = None, config: dict[str, Any] | None = None) -> ResolvedSampling:
    return resolve(params or SamplingParams(), config or {}, EOS, fresh_seed=99)


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, True, False, "1", b"1", [1], 1j, 10**400, -(10**400), 10**5000],
    ids=lambda value: repr(value) if not isinstance(value, int) or isinstance(value, bool) else "huge",
)
def test_values_that_are_no_finite_number_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}="):
        validate(SamplingParams(**{name: value}))


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_may_not_be_floats(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name}=1.0 .* an integer"):
        validate(SamplingParams().replace(**{name: 1.0}))


BOUNDARIES = [
    # name, accepted, refused, what the message says of the limit
    ("temperature", [0, 0.0, -0.0, 1e-45, 5e-324, 1, 1e300], [-1e-9, -1], "at least 0"),
    ("top_k", [0, 1, MAX_COUNT], [-1, MAX_COUNT + 1], f"between 0 .*{MAX_COUNT}"),
    ("top_p", [1e-9, 0.9999999, 1, 1.0], [0, 0.0, -0.1, 1.0000001], "above 0 and at most 1"),
    ("min_p", [0, 0.5, 1], [-0.1, 1.1], "between 0 and 1"),
    ("repetition_penalty", [0.01, 1, 100.0], [0, -1.0, 0.009, 101], "between 0.01 and 100"),
    ("presence_penalty", [-2, 0, 2.0], [-2.1, 2.1], "between -2 and 2"),
    ("frequency_penalty", [-2, 0, 2.0], [-2.1, 2.1], "between -2 and 2"),
    ("seed", [0, MAX_SEED], [-1, MAX_SEED + 1], f"between 0 and {MAX_SEED}"),
    ("max_tokens", [1, MAX_COUNT], [0, -1, MAX_COUNT + 1], f"between 1 and {MAX_COUNT}"),
    ("min_tokens", [0, MAX_COUNT], [-1, MAX_COUNT + 1], f"between 0 and {MAX_COUNT}"),
    ("logprobs", [0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1], f"between 0 and {MAX_LOGPROBS}"),
    ("n", [1, 1024], [0, -1, 1025, None], "between 1 and 1024"),
]


@pytest.mark.parametrize(("name", "accepted", "refused", "limit"), BOUNDARIES, ids=[row[0] for row in BOUNDARIES])
def test_boundaries(name: str, accepted: list[Any], refused: list[Any], limit: str) -> None:
    for value in accepted:
        validate(SamplingParams(**{name: value}))
    for value in refused:
        with pytest.raises(RequestError, match=f"^{name}={value} is out of range: .*{limit}"):
            validate(SamplingParams(**{name: value}))


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], 5, 0, False, {"a": 1}, b"x"])
def test_stop_must_be_strings_that_are_not_empty(stop: Any) -> None:
    with pytest.raises(RequestError, match=r"^stop"):
        validate(SamplingParams(stop=stop))


@pytest.mark.parametrize("ids", [[-1], [2, None], [True], [1.0], ["2"], [2**31], [10**5000], 5, 0, "12"])
def test_stop_token_ids_must_be_token_ids(ids: Any) -> None:
    with pytest.raises(RequestError, match=r"^stop_token_ids"):
        validate(SamplingParams(stop_token_ids=ids))


def test_nothing_set_anywhere_is_greedy() -> None:
    assert resolved() == ResolvedSampling(seed=99, max_tokens=DEFAULT_MAX_TOKENS, stop_token_ids=EOS)
    assert resolved().temperature == 0


def test_a_checkpoint_that_samples_gives_the_defaults() -> None:
    sampling = resolved(config=SAMPLING_CHECKPOINT)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.95, 0.01)
    assert (sampling.repetition_penalty, sampling.max_tokens) == (1.05, 2048)


@pytest.mark.parametrize("do_sample", [False, None])
def test_a_checkpoint_that_does_not_sample_is_greedy_but_keeps_its_penalty_and_length(do_sample: bool | None) -> None:
    sampling = resolved(config=SAMPLING_CHECKPOINT | {"do_sample": do_sample})
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.max_tokens) == (1.05, 2048)


def test_a_checkpoint_that_samples_without_a_temperature_has_temperature_one() -> None:
    assert resolved(config={"do_sample": True, "temperature": None}).temperature == 1.0


@pytest.mark.parametrize("config", [{}, SAMPLING_CHECKPOINT, SAMPLING_CHECKPOINT | {"do_sample": False}])
def test_what_the_caller_sets_wins_even_if_it_is_zero(config: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "seed": 0,
        "max_tokens": 1,
        "min_tokens": 0,
        "logprobs": 0,
        "n": 1,
    }
    sampling = resolved(SamplingParams(**values), config)
    assert {name: getattr(sampling, name) for name in values} == values
    assert not sampling.has_penalties
    assert all(isinstance(getattr(sampling, name), float) for name in FLOATS)


@given(
    temperature=st.none() | st.floats(0, 5),
    top_k=st.none() | st.integers(0, 100),
    top_p=st.none() | st.floats(0.01, 1),
    do_sample=st.booleans(),
    config_temperature=st.none() | st.floats(0, 5),
    config_top_k=st.none() | st.integers(0, 100),
)
def test_precedence_is_caller_then_sampling_checkpoint_then_default(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    do_sample: bool,
    config_temperature: float | None,
    config_top_k: int | None,
) -> None:
    def first_set(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    config = {"do_sample": do_sample, "temperature": config_temperature, "top_k": config_top_k}
    sampling = resolved(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p), config)
    if do_sample:
        assert sampling.temperature == first_set(temperature, config_temperature, 1.0)
        assert sampling.top_k == first_set(top_k, config_top_k, 0)
    else:
        assert sampling.temperature == first_set(temperature, 0.0)
        assert sampling.top_k == first_set(top_k, 0)
    assert sampling.top_p == first_set(top_p, 1.0)


@pytest.mark.parametrize(
    ("name", "key", "bad", "good"),
    [
        ("temperature", "temperature", math.nan, 0.5),
        ("top_k", "top_k", -1, 5),
        ("top_p", "top_p", "0.9", 0.9),
        ("repetition_penalty", "repetition_penalty", 0, 1.1),
        ("max_tokens", "max_new_tokens", 0, 7),
    ],
)
def test_a_bad_value_of_the_checkpoint_is_an_error_unless_the_caller_sets_it(
    name: str, key: str, bad: Any, good: Any
) -> None:
    config = {"do_sample": True, key: bad}
    with pytest.raises(RequestError, match=f"generation_config .*{name}="):
        resolved(config=config)
    assert getattr(resolved(SamplingParams(**{name: good}), config), name) == good


def test_a_checkpoint_that_does_not_sample_may_carry_unusable_warpers() -> None:
    assert resolved(config={"do_sample": False, "temperature": -1, "top_p": 0}).temperature == 0


def test_every_eos_id_stops_beside_the_callers_own() -> None:
    assert resolved(SamplingParams(stop_token_ids=[9, 2])).stop_token_ids == (2, 7, 9)
    assert resolved(SamplingParams(stop_token_ids=[9, 2], ignore_eos=True)).stop_token_ids == (2, 9)
    assert resolved(SamplingParams(ignore_eos=True)).stop_token_ids == ()


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert resolved(SamplingParams(stop="ab")).stop == ("ab",)
    assert resolved(SamplingParams(stop=["ab", "c"])).stop == ("ab", "c")


def test_seed_is_the_callers_or_the_fresh_one() -> None:
    assert resolved().seed == 99
    assert resolved(SamplingParams(seed=5)).seed == 5


def test_min_tokens_may_not_exceed_max_tokens_wherever_that_comes_from() -> None:
    assert resolved(SamplingParams(min_tokens=8, max_tokens=8)).min_tokens == 8
    with pytest.raises(RequestError, match="min_tokens=9 exceeds max_tokens=8"):
        resolved(SamplingParams(min_tokens=9, max_tokens=8))
    with pytest.raises(RequestError, match="min_tokens=9 exceeds max_tokens=8"):
        resolved(SamplingParams(min_tokens=9), {"max_new_tokens": 8})


def test_numbers_larger_than_the_model_are_cut_to_it() -> None:
    params = SamplingParams(
        top_k=MAX_COUNT, max_tokens=MAX_COUNT, min_tokens=MAX_COUNT, logprobs=100, stop_token_ids=[49]
    )
    fitted = fit_to_model(resolved(params), vocab_size=50, max_model_len=64)
    assert (fitted.top_k, fitted.max_tokens, fitted.min_tokens, fitted.logprobs) == (50, 64, 64, 50)
    assert fitted.stop_token_ids == (2, 7, 49)
    small = resolved(SamplingParams(top_k=5, max_tokens=6, min_tokens=1))
    assert fit_to_model(small, vocab_size=50, max_model_len=64) == small


def test_a_stop_token_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match=r"stop_token_ids holds 50, .* 0 to 49"):
        fit_to_model(resolved(SamplingParams(stop_token_ids=[50])), vocab_size=50, max_model_len=64)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_penalty_is_a_penalty(name: str) -> None:
    assert resolved(SamplingParams().replace(**{name: 0.5})).has_penalties


def test_replace_changes_a_copy() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"])
    changed = params.replace(seed=3)
    assert (changed.temperature, changed.stop, changed.seed, params.seed) == (0.5, ["x"], 3, None)
    with pytest.raises(TypeError):
        params.replace(temprature=1)
