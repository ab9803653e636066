"""How tokens are chosen: vLLM's parameters, checked when they are made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from loraplex.errors import InvalidRequestError
from loraplex.structured.params import StructuredOutputsParams

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
"""Of all stop strings together."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**18
"""Of all tokens of a request's prompts: each has the `prompt_logprobs` best tokens and its own."""

MAX_OUTPUT_LOGPROBS = 2**18
"""Of all tokens of a request's completions, where there are several: each has its own and the `logprobs` best."""
UNBOUNDED_OUTPUT = 1024
"""Tokens that a completion without `max_tokens` counts for in that sum."""

MAX_LOGIT_BIAS = 1024
MAX_COMPLETIONS = 128
MAX_WHOLE = 2**31 - 1
MAX_COUNT = 2**63 - 1
_MAX_SHOWN_CHARS = 40
_MAX_KEY_DIGITS = 10


@dataclass(frozen=True, slots=True)
class _Kind:
    """What values a field takes, in words, and whether one is of them. Numbers of numpy are; a bool is no number."""

    wanted: str
    has: Callable[[Any], bool]

    def or_none(self) -> _Kind:
        return _Kind(f"{self.wanted} or None", lambda value: value is None or self.has(value))


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_number(value: Any) -> bool:
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def _is_list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, Collection) and not isinstance(value, str | Mapping) and all(map(is_one, value))
    )


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        (_is_whole(token) or (isinstance(token, str) and token.isdecimal() and len(token) <= _MAX_KEY_DIGITS))
        and _is_number(bias)
        for token, bias in value.items()
    )


_WHOLE, _NUMBER = _Kind("a whole number", _is_whole), _Kind("a number", _is_number)
_FLAG = _Kind("True or False", lambda value: isinstance(value, bool))
_STRINGS = _is_list_of(lambda value: isinstance(value, str))
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_KINDS = {
    **dict.fromkeys(("n", "top_k", "min_tokens"), _WHOLE),
    **dict.fromkeys(("max_tokens", "seed", "logprobs", "prompt_logprobs"), _WHOLE.or_none()),
    **dict.fromkeys(_NUMBERS, _NUMBER),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"), _FLAG),
    "stop": _Kind("a string or a list of strings", lambda value: isinstance(value, str) or _STRINGS(value)).or_none(),
    "stop_token_ids": _Kind("a list of token ids", _is_list_of(_is_whole)).or_none(),
    "logit_bias": _Kind("a mapping of token ids to numbers", _is_bias).or_none(),
    "structured_outputs": _Kind(
        "StructuredOutputsParams", lambda value: isinstance(value, StructuredOutputsParams)
    ).or_none(),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names, defaults and meaning are vLLM's; see docs/names.md for differences.

    logits -> structured_outputs -> penalties -> logit_bias -> min_tokens -> temperature -> top_k -> top_p -> min_p ->
    one draw. `temperature=0` is greedy. `seed` makes a request's draws independent of its batch: the n-th child of a
    request draws with `seed + n`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be {kind.wanted}, got {_shown(getattr(self, name))}"
            for name, kind in _KINDS.items()
            if not kind.has(getattr(self, name))
        ]
        if wrong:
            raise InvalidRequestError("sampling parameters are refused: " + "; ".join(wrong))
        for name in _NUMBERS:
            object.__setattr__(self, name, _as_plain(getattr(self, name)))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(() if self.stop_token_ids is None else self.stop_token_ids))
        object.__setattr__(self, "logit_bias", {int(k): _as_float(v) for k, v in (self.logit_bias or {}).items()})
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        refused = self._refused()
        if refused:
            reasons = "; ".join(reason for _, reason in refused)
            raise InvalidRequestError(f"sampling parameters are refused: {reasons}", param=refused[0][0])

    def check_prompt_logprobs(self, num_prompt_tokens: int) -> None:
        """Raises InvalidRequestError when so many tokens of prompts are too many to score at once."""
        num_entries = 0 if self.prompt_logprobs is None else num_prompt_tokens * (self.prompt_logprobs + 1)
        if num_entries > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"prompt_logprobs={self.prompt_logprobs} of {num_prompt_tokens} prompt tokens are {num_entries} "
                f"entries, at most {MAX_PROMPT_LOGPROBS} fit in a request: ask for fewer, or send less",
                param="prompt_logprobs",
            )

    def check_logprobs(self, num_completions: int) -> None:
        """Raises InvalidRequestError when the log probabilities of so many completions are too many for one answer."""
        num_tokens = UNBOUNDED_OUTPUT if self.max_tokens is None else self.max_tokens
        num_entries = 0 if self.logprobs is None else num_completions * num_tokens * (self.logprobs + 1)
        if num_completions > 1 and num_entries > MAX_OUTPUT_LOGPROBS:
            raise InvalidRequestError(
                f"logprobs={self.logprobs} of {num_completions} completions of up to {num_tokens} tokens are "
                f"{num_entries} entries, at most {MAX_OUTPUT_LOGPROBS} fit in a request: ask for fewer, or send "
                "several requests",
                param="logprobs",
            )

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on which tokens were there before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def _refused(self) -> list[tuple[str, str]]:
        """Each field that cannot be, with the reason."""
        outside = [
            (name, f"{name} must be in {limits}, got {_shown(getattr(self, name))}")
            for name, limits in _LIMITS.items()
            if getattr(self, name) is not None and not limits.has(getattr(self, name))
        ]
        longest, is_short = f"({_shown(self.min_tokens)}) must not be above max_tokens", self.max_tokens is None
        checks = [
            (
                "min_tokens",
                is_short or self.min_tokens <= (self.max_tokens or 0),
                f"{longest} ({_shown(self.max_tokens)})",
            ),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS, f"has {len(self.stop)} strings, at most {MAX_STOP_STRINGS}"),
            ("stop", _num_chars(self.stop) <= MAX_STOP_CHARS, f"has more than {MAX_STOP_CHARS} characters in all"),
            ("stop", all(self.stop), "has an empty string"),
            ("stop", not self.stop or self.detokenize, "strings need detokenize=True"),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
                f"has {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS}",
            ),
            ("logit_bias", len(self.logit_bias) <= MAX_LOGIT_BIAS, f"has more than {MAX_LOGIT_BIAS} entries"),
            ("logit_bias", all(-100 <= v <= 100 for v in self.logit_bias.values()), "values must be in [-100, 100]"),
        ]
        return [*outside, *((field, f"{field} {reason}") for field, is_fine, reason in checks if not is_fine)]

    def child(self, index: int) -> SamplingParams:
        """The parameters of the index-th of `n` completions: a seed of its own, and the first scores the prompt."""
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        return self._with(n=1, seed=seed, prompt_logprobs=None if index else self.prompt_logprobs)

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """These parameters, and the same collections. Raises InvalidRequestError where `min_tokens` is more."""
        if self.min_tokens > max_tokens:
            return replace(self, max_tokens=max_tokens)  # which refuses it
        return self._with(max_tokens=max_tokens)

    def with_collections_of(self, other: SamplingParams) -> SamplingParams:
        """These parameters with `stop`, `logit_bias` and all else that may be long of the others: one object each."""
        return self._with(**{name: getattr(other, name) for name in _COLLECTIONS})

    def shares_collections_with(self, other: SamplingParams) -> bool:
        """Whether these are the same objects in both."""
        return all(getattr(self, name) is getattr(other, name) for name in _COLLECTIONS)

    def _with(self, **checked: Any) -> SamplingParams:
        """A copy with other values, which are not looked at again: those of 128 completions would take 30 ms."""
        made = copy.copy(self)
        for name, value in checked.items():
            object.__setattr__(made, name, value)
        return made


_COLLECTIONS = ("stop", "stop_token_ids", "logit_bias", "structured_outputs")


@dataclass(frozen=True, slots=True)
class _Limits:
    """The values from `low` to `high`; NaN is none of them. is_open: without `low` itself."""

    low: float
    high: float
    is_open: bool = False

    def has(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        return f"{'(' if self.is_open else '['}{self.low}, {self.high}]"


_COUNT, _PENALTY, _LOGPROBS = _Limits(0, MAX_COUNT), _Limits(-2, 2), _Limits(0, MAX_LOGPROBS)
_LIMITS = {
    "n": _Limits(1, MAX_COMPLETIONS),
    "temperature": _Limits(0, 100),
    "top_p": _Limits(0, 1, is_open=True),
    "top_k": _Limits(0, MAX_WHOLE),
    "min_p": _Limits(0, 1),
    "seed": _Limits(-(2**63), 2**63 - 1),
    "max_tokens": _Limits(1, MAX_COUNT),
    "min_tokens": _COUNT,
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _Limits(0.001, 10),
}
"""What a field's numbers may be. With these no edit takes a logit of a model out of float32's range."""


def _as_plain(value: Any) -> float:
    """A number as Python's own, as it crosses to the engine's process; one of another type may be beyond a float."""
    return value if type(value) in (int, float) else _as_float(value)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _shown(value: Any) -> str:
    """A value in a message, short whatever it is."""
    if isinstance(value, Collection) and len(value) > _MAX_SHOWN_CHARS:
        value = value[:_MAX_SHOWN_CHARS] if isinstance(value, str) else type(value)
    try:
        text = repr(value)
    except ValueError:  # more digits than Python writes
        text = f"{type(value).__name__} of too many digits"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def _num_chars(texts: Sequence[str]) -> int:
    return sum(map(len, texts))


MAX_PRIORITY = 1000
"""Levels that a request may be before or after others."""

MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3
"""Of a tenant."""

MAX_TARGET_MS = 3_600_000
"""A tenant's longest target to a token."""


@dataclass(frozen=True, slots=True)
class Claim:
    """How a request stands among those that wait: whose share of the engine it takes, and how early within that.

    tenant: "" where all requests are of one. weight: how large the tenant's share is beside those of others. priority:
    lower is earlier, among requests of the tenant. ttft_target_ms, itl_target_ms: the tenant's targets to the first
    token and between tokens; None: it has none.
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None

    def check(self) -> None:
        """Raises InvalidRequestError for what no front sends."""
        if not (MIN_WEIGHT <= self.weight <= MAX_WEIGHT and abs(self.priority) <= MAX_PRIORITY):
            text = f"a request of weight {self.weight!r} and priority {self.priority}: weights are"
            raise InvalidRequestError(f"{text} {MIN_WEIGHT:g}..{MAX_WEIGHT:g}, priorities +-{MAX_PRIORITY}")
        for name, target_ms in (("ttft", self.ttft_target_ms), ("itl", self.itl_target_ms)):
            if target_ms is not None and not 1 <= target_ms <= MAX_TARGET_MS:
                raise InvalidRequestError(f"{name}_target_ms must be 1 to {MAX_TARGET_MS}, got {target_ms}")


NO_CLAIM = Claim()
"""Of a request like all others."""
