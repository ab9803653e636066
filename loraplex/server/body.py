"""Reading a request's body: bounded in bytes, values and depth, strict JSON, every field checked by name.

What a body may cost is known before it is read as JSON (`bounds/json_size.py`). A long body is counted, decoded and
checked in a thread (`off_loop.py`), and the event loop goes on between two calls. The longest single call is the
decoder's: 8 ms for 16 MiB of plain text, 52 ms for 16 MiB of escapes (measured).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import Request

from loraplex.bounds.json_size import MAX_LONG_NUMBERS, Excess, excess_of
from loraplex.server.api_error import ApiError, validation_error
from loraplex.server.auth import client_of
from loraplex.server.browser_guard import check_media_type
from loraplex.server.off_loop import OffLoop
from loraplex.server.pacing import Turns
from loraplex.server.request_model import BodyLimits, RequestModel

SHORT_BODY_BYTES = 16 * 2**10
"""A body up to this is read in the event loop: the worst takes some milliseconds."""

_HALF_AT_END = re.compile(rb'(\\u[dD][89abAB][0-9a-fA-F]{2})[^\\"]{0,3}"[^"]+$')
"""The first half of a surrogate pair in a body's last text: the decoder misses the other half, as in a cut body."""
Model = TypeVar("Model", bound=RequestModel)


class BodyReader:
    """Reads bodies with one server's settings. `longest_len`: so many more values fit into a prompt of token ids."""

    def __init__(self, off_loop: OffLoop, max_body_bytes: int, longest_len: int, is_strict: bool) -> None:
        self._off_loop = off_loop
        self._turns = Turns()
        self._max_body_bytes = max_body_bytes
        self._longest_len = longest_len
        self._is_strict = is_strict

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The body as a `model`. Raises ApiError: 413 too long, 415 not declared as JSON, 400 malformed or refused."""
        return await self.read_one_of(request, lambda fields: model, model.limits)

    async def read_one_of(
        self, request: Request, choose: Callable[[dict[str, Any]], type[Model]], limits: BodyLimits
    ) -> Model:
        """The body as the model that `choose` finds for its fields."""
        check_media_type(request.headers)
        body = await read_body(request, min(limits.max_bytes, self._max_body_bytes))
        max_values = limits.max_values + (self._longest_len if limits.has_token_ids else 0)
        parse = partial(_parse, body, choose, max_values, self._is_strict)
        if len(body) <= SHORT_BODY_BYTES:
            await self._turns.next(client_of(request))
            return parse()
        fields = await self._off_loop.run_for(request, parse, len(body))
        await self._turns.next(client_of(request))  # for what the route does with it
        return fields


def _parse(body: bytes, choose: Callable[[dict[str, Any]], type[Model]], max_values: int, is_strict: bool) -> Model:
    check_num_values(body, max_values)
    fields = decode_object(body)
    model = choose(fields)
    if is_strict:
        model.refuse_hints(fields)
    return check_model(fields, model)


def check_model(fields: dict[str, Any], model: type[Model]) -> Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False, include_context=False)) from None


def check_num_values(body: bytes, max_values: int) -> None:
    """Refuse a body of more JSON values (names of fields included) than `max_values`, or of too many long numbers,
    before any of them is made (json_size.py)."""
    excess = excess_of(body, max_values)
    if excess is Excess.VALUES:
        raise ApiError(f"the body has more than {max_values} values: send several requests", code="too_many_values")
    if excess is Excess.LONG_NUMBERS:
        text = f"the body has more than {MAX_LONG_NUMBERS} {excess.value}: round them"
        raise ApiError(text, code="too_many_long_numbers")


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object. NaN, Infinity, lone surrogates, bytes that are not UTF-8 and endless nesting are refused."""
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
