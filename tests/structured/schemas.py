"""Schemas of the kinds of JSONSchemaBench, by number: nested objects, enums, bounded arrays, tuples, ranges, patterns,
formats, anyOf, oneOf told apart by a constant, allOf, references, recursion. Every text is bounded, so that a model
which writes at random ends."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][a-z]{1,4}-[0-9]{2}$", "^(red|green|blue)$", "^[0-9a-f]{4}$", "^\\d{1,3}\\.\\d{2}$")
FORMATS = ("date", "uuid", "ipv4", "hostname")
"""A `time` may have a leap second where none is (docs/guides/structured-output.md)."""


def schema_of(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    root = _object(rng, depth=2)
    root["$defs"] = {"point": {"type": "object", "properties": {"x": _integer(rng), "y": _integer(rng)}}}
    root["$defs"]["point"] |= {"required": ["x", "y"], "additionalProperties": False}
    if number % 3 == 0:
        root["properties"]["at"] = {"$ref": "#/$defs/point"}
        root["required"].append("at")
    if number % 10 == 5:
        following = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
        node = {"type": "object", "properties": {"value": _integer(rng), "next": following}}
        root["$defs"]["node"] = {**node, "required": ["value", "next"], "additionalProperties": False}
        root["properties"]["chain"] = {"$ref": "#/$defs/node"}
        root["required"].append("chain")
    return root


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(("id", "name", "tags", "size", "kind", "is_open", "note", "parts"), rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.8]
    properties = {name: _value(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-500, 500)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random) -> dict[str, Any]:
    """With few decimals: a model that writes at random would write them without an end."""
    return {"type": "number", "minimum": rng.randint(-9, 0), "maximum": 12.5, "multipleOf": rng.choice((0.25, 0.5))}


def _text(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}


def _choice(rng: random.Random) -> dict[str, Any]:
    return rng.choice(({"enum": ["a", 7, None, True, "long one"]}, {"const": "only"}, {"type": ["boolean", "null"]}))


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _pair(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_value(rng, depth - 1), _integer(rng)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"oneOf": [_case(tag, _value(rng, depth - 1)) for tag in ("card", "cash")]}


def _case(tag: str, value: dict[str, Any]) -> dict[str, Any]:
    properties = {"kind": {"const": tag}, "value": value}
    return {"type": "object", "properties": properties, "required": ["kind", "value"], "additionalProperties": False}


def _all_of(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(0, 50)
    return {"allOf": [{"type": "integer", "minimum": low}, {"exclusiveMaximum": low + rng.randint(2, 500)}]}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1), {"type": "null"}, _integer(rng)]}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_integer, _number, _text, _choice, _all_of)
    if depth <= 0 or rng.random() < 0.5:
        return rng.choice(leaves)(rng)
    return rng.choice((_object, _array, _pair, _any_of, _one_of))(rng, depth)
