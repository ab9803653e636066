"""What form an output must have: vLLM's parameters, bounded when they are made.

A grammar is a stranger's program: its bytes and its depth are bounded here, before anything parses it; what compiling
it and each mask may cost is bounded in `grammars`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cached_property
from typing import Any, NoReturn, Self

from loraplex.errors import InvalidRequestError, shown

MAX_GRAMMAR_BYTES = 32 * 2**10
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_VALUES = 8192
MAX_PATTERN_BYTES = 2 * 2**10
"""Of a regular expression, and of all patterns of a schema: memory and time to compile grow with their square."""

MAX_CHOICES = 1999
"""The library follows 2,000 items side by side, one of which is the choice itself."""

MAX_NUMBER = 2**53
"""Of a schema, either sign: the library recurses without an end for the least of 64 bits."""

MAX_MULTIPLE_OF = 10_000
"""Of different `multipleOf` multiplied, without their decimal points: as many states an automaton of them may have."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "calls")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of `json` (a JSON schema, as text or mapping), `regex` (the whole output matches it), `choice` (the
    output is one of these texts), `grammar` (in Lark's notation, from `start`), `json_object=True` and `calls` (a JSON
    list of calls `{"name": ..., "parameters": ...}` of functions, whose schemas it has by name).

    is_one_call: the list has one. disable_any_whitespace: JSON without spaces and line ends between its parts. Raises
    InvalidRequestError.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    calls: str | Mapping[str, Any] | None = None
    is_one_call: bool = False
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            _refuse(f"give one of {', '.join(KINDS)}, got {', '.join(given) or 'none of them'}")
        if not isinstance(self.disable_any_whitespace, bool):
            _refuse("disable_any_whitespace must be true or false")
        check = {
            "json": self._check_json,
            "calls": self._check_json,
            "choice": self._check_choice,
            "json_object": self._check_flag,
        }
        check.get(given[0], self._check_text)()

    @classmethod
    def of(cls, wanted: Mapping[str, Any]) -> Self:
        """Of vLLM's fields by name. Raises InvalidRequestError for an unknown one, unless it is null or false."""
        known = {each.name for each in fields(cls)} - {"calls", "is_one_call"}
        unknown = [name for name, value in wanted.items() if name not in known and value not in (None, False)]
        if unknown:
            _refuse(f"{shown(unknown[0])} is not supported; the fields are {', '.join(sorted(known))}")
        return cls(**{name: value for name, value in wanted.items() if name in known and value is not None})

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def num_bytes(self) -> int:
        """Of what it says, for whose turn it is to have it compiled."""
        return len(str(getattr(self, self.kind)))

    @property
    def said(self) -> dict[str, Any]:
        """All that it asks, as plain data: `StructuredOutputsParams(**said)` is equal to it."""
        flags = {"is_one_call": self.is_one_call, "disable_any_whitespace": self.disable_any_whitespace}
        return {self.kind: getattr(self, self.kind), **flags}

    @cached_property
    def digest(self) -> bytes:
        """Of all that it asks: equal ones are compiled once."""
        return hashlib.sha256(json.dumps(self.said).encode()).digest()

    def _check_text(self) -> None:
        text = getattr(self, self.kind)
        if not isinstance(text, str):
            _refuse(f"{self.kind} must be a text")
        self._check_bytes(text)

    def _check_flag(self) -> None:
        if self.json_object is not True:
            _refuse("json_object must be true or false")

    def _check_choice(self) -> None:
        texts = self.choice
        is_list = isinstance(texts, Collection) and not isinstance(texts, str | Mapping)
        if not is_list or not texts or not all(isinstance(each, str) and each for each in texts):
            _refuse("choice must be a list of texts, none of them empty")
        assert texts is not None
        if len(texts) > MAX_CHOICES:
            _refuse(f"choice has {len(texts)} texts, at most {MAX_CHOICES} can be followed")
        object.__setattr__(self, "choice", tuple(texts))
        self._check_bytes("|".join(texts))

    def _check_json(self) -> None:
        """The schema is kept as compact text, in which nothing that it holds can change."""
        schema: Any = getattr(self, self.kind)
        if isinstance(schema, str):
            self._check_bytes(schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                _refuse(f"{self.kind} is no JSON schema: {shown(str(error))}")
        if not isinstance(schema, Mapping) or (self.kind == "calls" and not schema):
            _refuse(f"{self.kind} must be a JSON schema: an object")
        self._check_schema(schema)
        try:
            text = json.dumps(schema, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            _refuse(f"{self.kind} is no JSON schema: {shown(str(error))}")
        self._check_bytes(text)
        object.__setattr__(self, self.kind, text)

    def _check_schema(self, schema: Mapping[str, Any]) -> None:
        """Depth, values and characters, level by level, before anything reads it whole; and numbers that make an
        automaton too large."""
        level: list[Any] = [schema]
        num_values = num_chars = pattern_bytes = 0
        divisors: set[int] = set()
        for _ in range(MAX_SCHEMA_DEPTH):
            num_values += len(level)
            if num_values > MAX_SCHEMA_VALUES:
                _refuse(f"the JSON schema has more than {MAX_SCHEMA_VALUES} values: make it smaller")
            num_chars += sum(map(_num_chars, level))
            if num_chars > MAX_GRAMMAR_BYTES:
                _refuse(f"{self.kind} has more than {MAX_GRAMMAR_BYTES} bytes: make it shorter")
            below: list[Any] = []
            for item in level:
                if isinstance(item, Mapping):
                    divisors.add(_num_remainders(item.get("multipleOf")))
                    pattern_bytes += sum(map(_num_bytes, _patterns(item)))
                    below += item.values()
                elif isinstance(item, list | tuple):
                    below += item
                elif isinstance(item, int | float) and not abs(item) <= MAX_NUMBER:
                    _refuse(f"a number of the JSON schema is not within +-{MAX_NUMBER}")
            if math.prod(divisors) > MAX_MULTIPLE_OF:
                _refuse(f"multipleOf has too many digits: at most {MAX_MULTIPLE_OF} without the point, multiplied")
            if pattern_bytes > MAX_PATTERN_BYTES:
                _refuse(f"the patterns of the JSON schema have more than {MAX_PATTERN_BYTES} bytes: make them shorter")
            if not below:
                return
            level = below
        _refuse(f"the JSON schema is nested deeper than {MAX_SCHEMA_DEPTH} levels: use $defs")

    def _check_bytes(self, text: str) -> None:
        most = MAX_PATTERN_BYTES if self.kind == "regex" else MAX_GRAMMAR_BYTES
        if len(text) * 4 > most and len(text.encode(errors="replace")) > most:
            _refuse(f"{self.kind} has more than {most} bytes: make it shorter")
        if any("\ud800" <= character <= "\udfff" for character in text):
            _refuse(f"{self.kind} is no valid Unicode text")


def _num_bytes(text: str) -> int:
    """At most MAX_GRAMMAR_BYTES of characters are looked at."""
    return len(text[:MAX_GRAMMAR_BYTES].encode(errors="replace"))


def _num_chars(item: Any) -> int:
    """Of a text, or of the keys of an object, without those of what they hold."""
    if isinstance(item, str):
        return len(item)
    if not isinstance(item, Mapping):
        return 0
    return len(item) if len(item) > MAX_GRAMMAR_BYTES else sum(len(key) for key in item if isinstance(key, str))


def _patterns(item: Mapping[str, Any]) -> Iterator[str]:
    """Regular expressions in one object of a schema; properties may have these names, too."""
    if isinstance(pattern := item.get("pattern"), str):
        yield pattern
    if isinstance(by_pattern := item.get("patternProperties"), Mapping):
        yield from (each for each in by_pattern if isinstance(each, str))


def _num_remainders(value: Any) -> int:
    """Of a `multipleOf`, of which a property of a schema may have the name; at least 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value:
        return 1
    if not abs(value) <= MAX_MULTIPLE_OF:  # NaN, too
        return MAX_MULTIPLE_OF + 1
    return int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits)))


def _refuse(reason: str) -> NoReturn:
    raise InvalidRequestError(f"structured_outputs: {reason}", param="structured_outputs")


FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Of a request over HTTP: OpenAI's, vLLM's, and vLLM's older names."""


def wanted_form(asked: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What fields of FORM_FIELDS ask together; None: any text. Raises InvalidRequestError, which names the field."""
    given = {name: asked[name] for name in FORM_FIELDS if asked.get(name) is not None}
    if given.get("response_format") == {"type": "text"}:
        del given["response_format"]
    if not given:
        return None
    name, value = next(iter(given.items()))
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} ask for different forms: send one", param=name)
    with as_field(name):
        if name == "response_format":
            return _of_response_format(value)
        if name == "structured_outputs":
            return StructuredOutputsParams.of(value)
        return StructuredOutputsParams(**{name.removeprefix("guided_"): value})


@contextmanager
def as_field(name: str) -> Iterator[None]:
    """Errors of a form name the field that it came in."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != "structured_outputs" or name == error.param:
            raise
        text = error.message.removeprefix("structured_outputs: ")
        raise InvalidRequestError(f"{name}: {text}", param=name) from error


def _of_response_format(wanted: Mapping[str, Any]) -> StructuredOutputsParams:
    """OpenAI's. `name`, `description` and `strict` of a schema change nothing: it always holds."""
    kind, described = wanted.get("type"), wanted.get("json_schema")
    unknown = [key for key in wanted if key not in ("type", "json_schema")]
    if unknown:
        _refuse(f"{shown(unknown[0])} is no field of it")
    if kind == "json_object" and described is None:
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema" or not isinstance(described, Mapping):
        _refuse('type must be "text", "json_object", or "json_schema" with the field json_schema')
    schema = described.get("schema")
    unknown = [key for key in described if key not in ("name", "description", "schema", "strict")]
    if unknown or not isinstance(schema, Mapping):
        _refuse(f"{shown(unknown[0])} is no field of json_schema" if unknown else "json_schema needs schema, an object")
    return StructuredOutputsParams(json=schema)
