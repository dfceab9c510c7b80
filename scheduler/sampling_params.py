"""What a caller may ask of sampling, its ranges, and how a checkpoint's defaults fill what the caller left unset.

`SamplingParams` is the public, partly filled form; `resolve` turns it into `ResolvedSampling`, where nothing is unset.
Called by `raytp.llm` at admission. Knows nothing of text: stop strings are carried here but acted on by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scheduler.errors import RequestError, shown

MAX_LOGPROBS = 100
DEFAULT_MAX_TOKENS = 256
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
"""The largest count of tokens and the largest token id: they travel as int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. `None` means: the checkpoint's generation_config, then the default.

    Values are checked when the request is admitted, so that one bad request among many fails alone.
    """

    temperature: float | None = None
    """0 is greedy. Default: generation_config's if it samples, else 0, as in transformers."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float | None = None
    """Keep the smallest set of likeliest tokens whose probability reaches top_p; in (0, 1]."""
    min_p: float | None = None
    """Drop tokens less likely than min_p times the likeliest; in [0, 1]."""
    repetition_penalty: float | None = None
    """Divide (multiply, if negative) the logits of tokens seen in prompt or output; in [0.01, 100], 1 is none."""
    presence_penalty: float | None = None
    """Subtracted once from the logit of each token in the output; in [-2, 2]."""
    frequency_penalty: float | None = None
    """Subtracted for each occurrence of a token in the output; in [-2, 2]."""
    seed: int | None = None
    """Same seed, same tokens, whatever else runs beside; None draws one."""
    max_tokens: int | None = None
    """Most tokens to generate; default generation_config's max_new_tokens, else 256."""
    min_tokens: int | None = None
    """No EOS and no stop token before so many tokens."""
    stop: str | tuple[str, ...] | list[str] | None = None
    """Strings that end the output; they are not part of the text."""
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    """Token ids that end the output, beside the checkpoint's EOS ids."""
    ignore_eos: bool = False
    """Go on past the checkpoint's EOS ids."""
    logprobs: int | None = None
    """Return the log probability of each chosen token and of the n likeliest; 0 is the chosen alone, None is none."""
    n: int = 1
    """Completions of the prompt; completion i uses its own noise."""

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """Sampling with nothing unset and everything in range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the output, the checkpoint's EOS ids included unless ignored."""
    logprobs: int | None = None
    n: int = 1

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on tokens already seen."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class _Range:
    check: Callable[[Any], bool]
    text: str
    integral: bool = False

    def holds(self, value: Any) -> bool:
        """Whether `value` is a finite number of the right kind, not a bool, and inside the range."""
        if isinstance(value, bool) or not isinstance(value, int if self.integral else int | float):
            return False
        try:
            as_float = float(value)
        except OverflowError:
            return False
        return math.isfinite(as_float) and self.check(value)


_RANGES: dict[str, _Range] = {
    "temperature": _Range(lambda v: v >= 0, "at least 0 (0 is greedy)"),
    "top_k": _Range(lambda v: 0 <= v <= MAX_COUNT, f"between 0 (keeps all) and {MAX_COUNT}", integral=True),
    "top_p": _Range(lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "min_p": _Range(lambda v: 0 <= v <= 1, "between 0 and 1"),
    "repetition_penalty": _Range(lambda v: 0.01 <= v <= 100, "between 0.01 and 100 (1 is none)"),
    "presence_penalty": _Range(lambda v: -2 <= v <= 2, "between -2 and 2"),
    "frequency_penalty": _Range(lambda v: -2 <= v <= 2, "between -2 and 2"),
    "seed": _Range(lambda v: 0 <= v <= MAX_SEED, f"between 0 and {MAX_SEED}", integral=True),
    "max_tokens": _Range(lambda v: 1 <= v <= MAX_COUNT, f"between 1 and {MAX_COUNT}", integral=True),
    "min_tokens": _Range(lambda v: 0 <= v <= MAX_COUNT, f"between 0 and {MAX_COUNT}", integral=True),
    "logprobs": _Range(lambda v: 0 <= v <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}", integral=True),
    "n": _Range(lambda v: 1 <= v <= 1024, "between 1 and 1024", integral=True),
}


def validate(params: SamplingParams) -> None:
    """Raises RequestError for the first field of `params` that is out of its range or of the wrong type."""
    for name, allowed in _RANGES.items():
        value = getattr(params, name)
        if value is None and name != "n":
            continue
        if not allowed.holds(value):
            kind = "an integer " if allowed.integral else "a number "
            raise RequestError(f"{name}={shown(value)} is out of range: it must be {kind}{allowed.text}")
    _checked_stop(params.stop)
    _checked_stop_token_ids(params.stop_token_ids)
    if not isinstance(params.ignore_eos, bool):
        raise RequestError(f"ignore_eos={shown(params.ignore_eos)} must be True or False")


def _checked_stop_token_ids(token_ids: Any) -> frozenset[int]:
    if token_ids is None:
        return frozenset()
    if not isinstance(token_ids, tuple | list):
        raise RequestError(f"stop_token_ids={shown(token_ids)} must be a list or tuple of token ids")
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id <= MAX_COUNT:
            raise RequestError(
                f"stop_token_ids holds {shown(token_id)}: each must be a token id between 0 and {MAX_COUNT}"
            )
    return frozenset(token_ids)


def _checked_stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if not isinstance(stop, str | tuple | list):
        raise RequestError(f"stop={shown(stop)} must be a str, or a list or tuple of str")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"stop holds {shown(string)}: each stop string must be a non-empty str")
    return strings


def resolve(
    params: SamplingParams, generation_config: Mapping[str, Any], eos_token_ids: tuple[int, ...], fresh_seed: int
) -> ResolvedSampling:
    """Fill what `params` leaves unset from a checkpoint's generation_config, then from the defaults.

    `fresh_seed` is used when the caller names no seed. Raises RequestError if a value is out of range, be it the
    caller's or the checkpoint's.
    """
    validate(params)
    samples = bool(generation_config.get("do_sample"))
    filled = _filled(params, generation_config, samples)

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    resolved = ResolvedSampling(
        temperature=float(given(filled.temperature, 1.0 if samples else 0.0)),
        top_k=given(filled.top_k, 0),
        top_p=float(given(filled.top_p, 1.0)),
        min_p=float(given(filled.min_p, 0.0)),
        repetition_penalty=float(given(filled.repetition_penalty, 1.0)),
        presence_penalty=float(given(filled.presence_penalty, 0.0)),
        frequency_penalty=float(given(filled.frequency_penalty, 0.0)),
        seed=given(filled.seed, fresh_seed),
        max_tokens=given(filled.max_tokens, DEFAULT_MAX_TOKENS),
        min_tokens=given(filled.min_tokens, 0),
        stop=_checked_stop(filled.stop),
        stop_token_ids=tuple(
            sorted(_checked_stop_token_ids(filled.stop_token_ids) | set(() if filled.ignore_eos else eos_token_ids))
        ),
        logprobs=filled.logprobs,
        n=filled.n,
    )
    if resolved.min_tokens > resolved.max_tokens:
        raise RequestError(
            f"min_tokens={resolved.min_tokens} exceeds max_tokens={resolved.max_tokens}: lower it, or raise max_tokens"
        )
    return resolved


def _filled(params: SamplingParams, generation_config: Mapping[str, Any], samples: bool) -> SamplingParams:
    """Take what is unset from the checkpoint; as in transformers, its warpers count only if it samples."""
    inherited = {"repetition_penalty": "repetition_penalty", "max_tokens": "max_new_tokens"}
    if samples:
        inherited |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
    filled = params.replace(
        **{name: generation_config.get(key) for name, key in inherited.items() if getattr(params, name) is None}
    )
    try:
        validate(filled)
    except RequestError as error:
        raise RequestError(
            f"the checkpoint's generation_config is out of range; set the value yourself: {error}"
        ) from None
    return filled


def fit_to_model(sampling: ResolvedSampling, vocab_size: int, max_model_len: int) -> ResolvedSampling:
    """The same request in numbers that fit the model, so that they fit int32 as well.

    Raises RequestError for a stop token id outside the vocabulary.
    """
    for token_id in sampling.stop_token_ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"stop_token_ids holds {token_id}, outside the vocabulary: ids go from 0 to {vocab_size - 1}"
            )
    return replace(
        sampling,
        top_k=min(sampling.top_k, vocab_size),
        max_tokens=min(sampling.max_tokens, max_model_len),
        min_tokens=min(sampling.min_tokens, max_model_len),
        logprobs=None if sampling.logprobs is None else min(sampling.logprobs, vocab_size),
    )
