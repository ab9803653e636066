"""What form an output must have: vLLM's parameters, bounded when they are made.

A grammar is a stranger's program: its bytes and its depth are bounded here, before anything parses it; what compiling
it and each mask may cost is bounded in `grammars`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cached_property
from typing import Any, NoReturn, Self

from loraplex.errors import InvalidRequestError, shown

MAX_GRAMMAR_BYTES = 32 * 2**10
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_VALUES = 8192
MAX_MULTIPLE_OF = 10_000
"""Of all `multipleOf` together, without their decimal points: an automaton of remainders has as many states."""

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of `json` (a JSON schema, as text or mapping), `regex` (the whole output matches it), `choice` (the
    output is one of these texts), `grammar` (in Lark's notation, from `start`) and `json_object=True`.

    disable_any_whitespace: JSON without spaces and line ends between its parts. Raises InvalidRequestError.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            _refuse(f"give one of {', '.join(KINDS)}, got {', '.join(given) or 'none of them'}")
        if not isinstance(self.disable_any_whitespace, bool):
            _refuse("disable_any_whitespace must be true or false")
        check = {"json": self._check_json, "choice": self._check_choice, "json_object": self._check_flag}
        check.get(given[0], self._check_text)()

    @classmethod
    def of(cls, wanted: Mapping[str, Any]) -> Self:
        """Of fields by name. Raises InvalidRequestError for an unknown one, unless it is null or false."""
        known = {each.name for each in fields(cls)}
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

    @cached_property
    def digest(self) -> bytes:
        """Of all that it asks: equal ones are compiled once."""
        said = json.dumps([self.kind, getattr(self, self.kind), self.disable_any_whitespace])
        return hashlib.sha256(said.encode()).digest()

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
        object.__setattr__(self, "choice", tuple(texts))
        self._check_bytes("|".join(texts))

    def _check_json(self) -> None:
        """The schema is kept as compact text, in which nothing that it holds can change."""
        schema: Any = self.json
        if isinstance(schema, str):
            self._check_bytes(schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                _refuse(f"json is no JSON schema: {shown(str(error))}")
        if not isinstance(schema, Mapping):
            _refuse("json must be a JSON schema: an object")
        _check_schema(schema)
        try:
            text = json.dumps(schema, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            _refuse(f"json is no JSON schema: {shown(str(error))}")
        self._check_bytes(text)
        object.__setattr__(self, "json", text)

    def _check_bytes(self, text: str) -> None:
        if len(text) * 4 > MAX_GRAMMAR_BYTES and len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            _refuse(f"{self.kind} has more than {MAX_GRAMMAR_BYTES} bytes: make it shorter")
        if any("\ud800" <= character <= "\udfff" for character in text):
            _refuse(f"{self.kind} is no valid Unicode text")


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Depth and values, level by level; and numbers that make an automaton too large."""
    level: list[Any] = [schema]
    num_values = num_remainders = 0
    for _ in range(MAX_SCHEMA_DEPTH):
        num_values += len(level)
        if num_values > MAX_SCHEMA_VALUES:
            _refuse(f"the JSON schema has more than {MAX_SCHEMA_VALUES} values: make it smaller")
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                num_remainders += _num_remainders(item.get("multipleOf"))
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
        if num_remainders > MAX_MULTIPLE_OF:
            _refuse(f"multipleOf has too many digits: at most {MAX_MULTIPLE_OF} without the point, all together")
        if not below:
            return
        level = below
    _refuse(f"the JSON schema is nested deeper than {MAX_SCHEMA_DEPTH} levels: use $defs")


def _num_remainders(value: Any) -> int:
    """Of a `multipleOf`, of which a property of a schema may have the name."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0
    if not abs(value) <= MAX_MULTIPLE_OF:  # NaN, too
        return MAX_MULTIPLE_OF + 1
    return int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits)))


def _refuse(reason: str) -> NoReturn:
    raise InvalidRequestError(f"structured_outputs: {reason}", param="structured_outputs")
