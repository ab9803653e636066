"""Reading a request's body: bounded in bytes and in depth, strict JSON, every field checked by name."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import Headers

from loraplex.server.api_error import ApiError, validation_error
from loraplex.server.request_model import RequestModel

_HALF_AT_END = re.compile(rb'(\\u[dD][89abAB][0-9a-fA-F]{2})[^\\"]{0,3}"[^"]+$')
"""The first half of a surrogate pair in the last text of a body, where the decoder misses the other half as if the body were cut."""

Model = TypeVar("Model", bound=RequestModel)


async def read_model(request: Request, model: type[Model], max_body_bytes: int) -> Model:
    """The body as a `model`. Raises ApiError: 413 too long, 415 not declared as JSON, 400 malformed or refused."""
    return check_model(await read_object(request, max_body_bytes), model)


async def read_object(request: Request, max_body_bytes: int) -> dict[str, Any]:
    check_media_type(request.headers)
    return decode_object(await read_body(request, max_body_bytes))


def check_model(fields: dict[str, Any], model: type[Model]) -> Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False, include_context=False)) from None


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object. NaN, Infinity, lone surrogates, bytes that are not UTF-8 and endless nesting are refused, not read."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError("the body is not usable: its JSON is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        half = _HALF_AT_END.search(body[-16:])
        reason = f"{half[1].decode()} is half of a surrogate pair, and no character" if half else str(error)
        raise ApiError(f"the body is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, got {type(value).__name__}")
    return value


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_body_bytes:
        raise _too_long(max_body_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_body_bytes:
            raise _too_long(max_body_bytes)
    return bytes(body)


def _too_long(max_body_bytes: int) -> ApiError:
    return ApiError(f"the body is longer than {max_body_bytes} bytes", status=413, code="body_too_long")


def check_media_type(headers: Headers) -> None:
    """Other types are refused: a web page may post those to a server on this machine without being asked. So are packed bodies."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            f"Content-Encoding {encoding[:100]!r} is not supported: send the body as it is",
            status=415,
            code="unsupported_media_type",
        )
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(
            f"Content-Type must be application/json, got {media_type[:100] or 'none'!r}",
            status=415,
            code="unsupported_media_type",
        )
