"""The rule of every request body: a field is honoured, or answered with 400 by its name; none is ignored.

`null` means "not set". Fields of other servers that mean nothing at one value (`best_of=1`) are listed in `neutral`:
that value is accepted, any other refused. `hints` are fields that cannot change an answer: accepted, unless the server
is strict. JSON types are exact: "7" is no number, true is no 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from loraplex.server.api_error import ApiError, clipped

MAX_DEPTH = 32
MAX_HINT_BYTES = 16 * 2**10


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`max_values`: JSON values, names of fields included; `has_token_ids`: a prompt of ids comes on top."""

    max_bytes: int = 64 * 2**10
    max_values: int = 2**14
    has_token_ids: bool = False


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    limits: ClassVar[BodyLimits] = BodyLimits()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    hints: ClassVar[frozenset[str]] = frozenset()
    place: ClassVar[str] = ""
    """Where it is in a request: `reasoning.` of a model that is the field `reasoning`, for errors."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names that other servers have for fields of this model."""
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = ()
    """What the validators say about several fields at a time, as JSON schemas."""
    bulk: ClassVar[frozenset[str]] = frozenset()
    """Fields that are not needed once the prompt and the sampling parameters are made."""

    def without_bulk(self) -> Self:
        """To keep until the answer is written: an object of JSON takes up to 50 times its bytes of memory."""
        return self.model_copy(update=dict.fromkeys(self.bulk))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """What `_only_known_fields` makes of the fields: null is "not set", neutral values are dropped."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        optional = set(schema["properties"]) - set(schema.get("required", ()))
        schema["properties"] |= {name: _or_null(schema["properties"][name]) for name in optional}
        schema["properties"] |= {name: {"enum": [*accepted, None]} for name, accepted in cls.neutral.items()}
        schema["additionalProperties"] = {"type": "null"}
        if cls.rules:
            schema["allOf"] = list(cls.rules)
        return reference

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None and not cls._is_neutral(name, value)}

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        """Whether a field may be dropped since it asks for nothing. Raises ApiError for an unknown or refused one."""
        if name in cls.model_fields:
            return False
        if name not in cls.neutral:
            raise cls._unknown(name)
        if not any(_is_same(value, accepted) for accepted in cls.neutral[name]):
            raise _refusal(cls.place + name, value, cls.neutral[name])
        return True

    @classmethod
    def _unknown(cls, name: str) -> ApiError:
        shown_name = clipped(name)
        meant = cls.aliases.get(name) or next(
            iter(difflib.get_close_matches(shown_name, cls.model_fields, 1, 0.75)), ""
        )
        remedy = f"did you mean {meant!r}?" if meant else "remove it"
        return ApiError(f"unknown field {shown_name!r}: {remedy}", code="unknown_field", param=shown_name)

    @classmethod
    def refuse_hints(cls, fields: Mapping[str, Any]) -> None:
        """Raises ApiError for a field that asks for something and would have no effect on the answer."""
        name = next((name for name in fields if name in cls.hints and fields[name] not in (None, False, {})), None)
        if name is not None:
            raise unsupported(name, f"{name} has no effect here, and this server refuses such fields (--strict-fields)")


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    notes: JsonSchemaValue = {key: schema[key] for key in ("title", "default") if key in schema}
    return {"anyOf": [{key: value for key, value in schema.items() if key not in notes}, {"type": "null"}], **notes}


def any_of(*ways: JsonSchemaValue) -> JsonSchemaValue:
    """A rule: fields are in one of these ways."""
    return {"anyOf": list(ways)}


def has(**fields: JsonSchemaValue) -> JsonSchemaValue:
    """All of these fields are there, with values of these schemas."""
    return {"properties": fields, "required": list(fields)}


def lacks(*names: str) -> JsonSchemaValue:
    """None of these fields asks for anything."""
    return {"properties": {name: {"enum": [None, False, 0, []]} for name in names}}


def _is_same(value: Any, accepted: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, true is not 1."""
    return isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted)


def _refusal(name: str, value: Any, accepted: tuple[Any, ...]) -> ApiError:
    remedy = " or ".join(["remove it", *(f"send {shown(item)}" for item in accepted)])
    return unsupported(name, f"{name}={shown(value)} is not supported by this server: {remedy}")


def unsupported(name: str, message: str) -> ApiError:
    return ApiError(message, code="unsupported_field", param=name)


def shown(value: Any) -> str:
    """A value as JSON in an error, its beginning only."""
    try:
        return clipped(msgspec.json.encode(clipped(value) if isinstance(value, str) else value).decode())
    except RecursionError:
        return "..."


def bounded_json(value: Any) -> Any:
    """Refuse nesting beyond MAX_DEPTH in free-form JSON, which templates walk recursively."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return value
    raise PydanticCustomError("too_deep", "is nested deeper than {depth} levels", {"depth": MAX_DEPTH})


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [child for child in value if isinstance(child, dict | list)] if isinstance(value, list) else []


def _small(value: Any) -> Any:
    if len(msgspec.json.encode(value)) > MAX_HINT_BYTES:
        raise PydanticCustomError("too_long", "is longer than {limit} bytes", {"limit": MAX_HINT_BYTES})
    return value


FreeJson = Annotated[Any, AfterValidator(bounded_json)]
"""Any JSON of bounded depth."""

FreeObject = Annotated[dict[str, Any], AfterValidator(bounded_json)]
"""A JSON object of bounded depth."""

SmallObject = Annotated[FreeObject, AfterValidator(_small)]
"""A JSON object that is only carried along."""


def one_or_list(one: str, several: str, error: str, message: str) -> Discriminator:
    """Of a field that is a string (the tag `one`) or a list. message: of what is neither."""
    return Discriminator(
        lambda value: one if isinstance(value, str) else several if isinstance(value, list) else None,
        custom_error_type=error,
        custom_error_message=message,
    )
