"""What a caller may ask of sampling, its ranges, and how a checkpoint's defaults fill what the caller left unset.

`SamplingParams` is the public, partly filled form; `resolve` turns it into `ResolvedSampling`, where nothing is unset.
Called by `raytp.llm` at admission. Knows nothing of text: stop strings are carried here but acted on by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from scheduler.errors import RequestError

MAX_LOGPROBS = 100
DEFAULT_MAX_TOKENS = 256
MAX_SEED = 2**63 - 1


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
    """Divide (multiply, if negative) the logits of tokens seen in prompt or output; above 0, 1 is none."""
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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return SamplingParams(**(values | changes))


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


_RANGES: dict[str, _Range] = {
    "temperature": _Range(lambda v: v >= 0, "at least 0 (0 is greedy)"),
    "top_k": _Range(lambda v: v >= 0, "at least 0 (0 keeps all)", integral=True),
    "top_p": _Range(lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "min_p": _Range(lambda v: 0 <= v <= 1, "between 0 and 1"),
    "repetition_penalty": _Range(lambda v: v > 0, "above 0 (1 is none)"),
    "presence_penalty": _Range(lambda v: -2 <= v <= 2, "between -2 and 2"),
    "frequency_penalty": _Range(lambda v: -2 <= v <= 2, "between -2 and 2"),
    "seed": _Range(lambda v: 0 <= v <= MAX_SEED, f"between 0 and {MAX_SEED}", integral=True),
    "max_tokens": _Range(lambda v: v >= 1, "at least 1", integral=True),
    "min_tokens": _Range(lambda v: v >= 0, "at least 0", integral=True),
    "logprobs": _Range(lambda v: 0 <= v <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}", integral=True),
    "n": _Range(lambda v: 1 <= v <= 1024, "between 1 and 1024", integral=True),
}


def validate(params: SamplingParams) -> None:
    """Raises RequestError for the first field of `params` that is out of its range or of the wrong type."""
    for name, allowed in _RANGES.items():
        value = getattr(params, name)
        if value is None and name != "n":
            continue
        kinds = (int,) if allowed.integral else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not allowed.check(value):
            kind = "an integer " if allowed.integral else "a number "
            raise RequestError(f"{name}={value!r} is out of range: it must be {kind}{allowed.text}")
    if params.stop is not None:
        _checked_stop(params.stop)
    for token_id in params.stop_token_ids or ():
        if not isinstance(token_id, int) or token_id < 0:
            raise RequestError(f"stop_token_ids holds {token_id!r}: each must be a token id of at least 0")


def _checked_stop(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"stop holds {string!r}: each stop string must be a non-empty str")
    return strings


def resolve(
    params: SamplingParams, generation_config: Mapping[str, Any], eos_token_ids: tuple[int, ...], fresh_seed: int
) -> ResolvedSampling:
    """Fill what `params` leaves unset from a checkpoint's generation_config, then from the defaults.

    `fresh_seed` is used when the caller names no seed. Raises RequestError if a value is out of range.
    """
    validate(params)
    samples = bool(generation_config.get("do_sample"))

    def pick(name: str, default: Any, of_sampling: bool = False) -> Any:
        value = getattr(params, name)
        if value is None and (samples or not of_sampling):
            value = generation_config.get(name)
        return default if value is None else value

    max_tokens = params.max_tokens if params.max_tokens is not None else generation_config.get("max_new_tokens")
    resolved = ResolvedSampling(
        temperature=float(pick("temperature", 1.0 if samples else 0.0, of_sampling=True)),
        top_k=pick("top_k", 0, of_sampling=True),
        top_p=float(pick("top_p", 1.0, of_sampling=True)),
        min_p=float(pick("min_p", 0.0, of_sampling=True)),
        repetition_penalty=float(pick("repetition_penalty", 1.0)),
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
        seed=fresh_seed if params.seed is None else params.seed,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        min_tokens=params.min_tokens or 0,
        stop=() if params.stop is None else _checked_stop(params.stop),
        stop_token_ids=tuple(
            sorted(set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos_token_ids)))
        ),
        logprobs=params.logprobs,
        n=params.n,
    )
    if resolved.min_tokens > resolved.max_tokens:
        raise RequestError(f"min_tokens={resolved.min_tokens} exceeds max_tokens={resolved.max_tokens}")
    return resolved
