"""The rule of every request body: a field is honoured or answered with 400 by its name; nothing is accepted and ignored.

`null` means "not set". Fields of other servers that mean nothing at one value (`best_of=1`, `response_format={"type": "text"}`)
are listed in `neutral`: that value is accepted, any other refused. JSON types are exact: "7" is no number, true is no 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from loraplex.server.api_error import MAX_SHOWN_CHARS, ApiError

MAX_DEPTH = 32


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

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
            raise ApiError(
                f"unknown field {name[:MAX_SHOWN_CHARS]!r}: remove it",
                code="unknown_field",
                param=name[:MAX_SHOWN_CHARS],
            )
        if not any(_is_same(value, accepted) for accepted in cls.neutral[name]):
            raise _refusal(name, value, cls.neutral[name])
        return True


def _is_same(value: Any, accepted: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, true is not 1."""
    return isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted)


def _refusal(name: str, value: Any, accepted: tuple[Any, ...]) -> ApiError:
    remedy = " or ".join(["remove it", *(f"send {shown(item)}" for item in accepted)])
    return unsupported(name, f"{name}={shown(value)} is not supported by this server: {remedy}")


def unsupported(name: str, message: str) -> ApiError:
    return ApiError(message, code="unsupported_field", param=name)


def shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def _shallow(value: Any) -> Any:
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


FreeJson = Annotated[Any, AfterValidator(_shallow)]
"""Any JSON of bounded depth."""

FreeObject = Annotated[dict[str, Any], AfterValidator(_shallow)]
"""A JSON object of bounded depth."""
