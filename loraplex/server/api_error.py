"""Errors as clients see them: always `{"error": {"message", "type", "param", "code"}}`, in a response or in a stream.

`code` names the error for programs: the class of errors.py in snake case (`adapter_path_not_found`), or OpenAI's own
name where one exists (`model_not_found`, `context_length_exceeded`, `invalid_api_key`).
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loraplex.errors import (
    AdapterError,
    AdapterFaultError,
    EngineDeadError,
    InvalidRequestError,
    LoraplexError,
    PromptTooLongError,
    RequestTimeoutError,
    TenantLimitError,
    sendable,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

INTERNAL_MESSAGE = "the server made a mistake; its log has the details under this request's id"
CLIENT_CLOSED_REQUEST = 499

_CODES: dict[type[LoraplexError], str | None] = {
    InvalidRequestError: None,
    PromptTooLongError: "context_length_exceeded",
}
MAX_SHOWN_CHARS = 40
"""Of a name or value that a client sent, in an error."""
MAX_MESSAGE_CHARS = 10_000
"""Of an error: as JSON at most 60,000 bytes."""
MAX_REASONS = 8
_MAY_WAIT = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_log = logging.getLogger("loraplex.server")


class ApiError(LoraplexError):
    """An answer that is HTTP's own business: 401, 413, 415, 404 for a model's name, 400 for a field (`param`)."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.error_type = kind
        self.code = code


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


def status_of(error: Exception) -> int:
    if isinstance(error, ApiError):
        return error.status
    return error.http_status if isinstance(error, LoraplexError) else 500


def error_reply(error: Exception) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode(ErrorReply(error_body(error)))


def error_body(error: Exception) -> ErrorBody:
    """What a client is told of an error. Nothing of an unforeseen one: that is for the log."""
    if isinstance(error, ApiError):
        return _body(error, error.error_type, error.code)
    if isinstance(error, LoraplexError):
        return _body(error, error.kind, _code_of(type(error)))
    return ErrorBody(INTERNAL_MESSAGE, "internal_error", None, "internal_error")


def _body(error: LoraplexError, kind: str, code: str | None) -> ErrorBody:
    param = None if error.param is None else sendable(clipped(error.param))
    return ErrorBody(sendable(clipped(error.message, MAX_MESSAGE_CHARS)), kind, param, code)


def clipped(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """The beginning of what a client sent: an error says which value, and does not send it back."""
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def _code_of(cls: type[LoraplexError]) -> str | None:
    if cls in _CODES:
        return _CODES[cls]
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).lower()


def error_response(error: Exception, headers: dict[str, str] | None = None, body: bytes | None = None) -> Response:
    """body: in a form of its own."""
    status = status_of(error)
    headers = dict(headers or {})
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, TenantLimitError):
        headers |= error.headers
    if isinstance(error, AdapterFaultError | EngineDeadError | TenantLimitError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif status == 429 or (status == 503 and not isinstance(error, AdapterError)):
        headers["Retry-After"] = "1"
    if isinstance(error, RequestTimeoutError):
        headers["X-Should-Retry"] = "false"  # the openai SDK heeds it: a retry would take as long again
    if status == 500:
        _log.error("answered 500: %r", error, exc_info=error)
    return Response(error_reply(error) if body is None else body, status, headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Give every error of a route this one form. `urls.KnownUrls` has 404 and 405, `request_id` the unforeseen."""
    from fastapi.exceptions import RequestValidationError

    app.add_exception_handler(LoraplexError, _answer)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)


async def _answer(request: Request, error: Exception) -> Response:
    response = error_response(error)
    forget_frames(error)
    return response


def forget_frames(error: BaseException | None) -> None:
    """Of an error that is answered: let go of what its frames had, such as the request's body.

    Where one of them refers to the error, as that of a load does, all of it would stay until a full collection of
    garbage, which a server has rarely. Coroutines and generators are left alone: one that caught the error may wait.
    """
    seen, found = set[int](), error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        for frame, _ in traceback.walk_tb(found.__traceback__):
            if not frame.f_code.co_flags & _MAY_WAIT:
                with suppress(RuntimeError):  # it runs
                    frame.clear()
        found = found.__cause__ or found.__context__


async def _answer_validation(request: Request, error: Exception) -> Response:
    """A query parameter or path of the wrong form."""
    from fastapi.exceptions import RequestValidationError

    assert isinstance(error, RequestValidationError)
    unknown = [str(item["loc"][-1]) for item in error.errors() if item["type"] == "extra_forbidden"]
    if unknown:
        return error_response(unknown_parameter(unknown[0]))
    return error_response(validation_error([{**item, "loc": item["loc"][1:]} for item in error.errors()]))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def unknown_parameter(name: str) -> ApiError:
    """Of a query."""
    shown = clipped(name)
    return ApiError(f"unknown query parameter {shown!r}: remove it", code="unknown_field", param=shown)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic found, in a line: `temperature: Input should be a valid number; n: ...`. `param`: the first one."""
    found = [(_place(item["loc"]), item["msg"]) for item in errors[:MAX_REASONS]]
    text = "; ".join(f"{where}: {what}" if where else what for where, what in found)
    if len(errors) > MAX_REASONS:
        text += f"; and {len(errors) - MAX_REASONS} more"
    param = found[0][0].split(".")[0] if found else None
    return ApiError(text or "the request is not valid", param=param or None)


def _place(parts: Sequence[object]) -> str:
    return ".".join(clipped(str(each)) for each in parts if not _is_tag(each))


def _is_tag(part: object) -> bool:
    """Whether a part of a place is no field but one of a union's shapes (`<texts>`, named so in schemas.py)."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


@contextmanager
def as_api_errors() -> Iterator[None]:
    """Inside of a model's validator: pydantic would make its own of an InvalidRequestError, which is a ValueError."""
    try:
        yield
    except InvalidRequestError as error:
        raise ApiError(error.message, param=error.param) from None


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name fields as the client has sent them. names: what the client calls those of another wire."""
    try:
        yield
    except LoraplexError as error:
        if not (isinstance(error, ApiError) and error.code == "unknown_field"):  # that names what was sent
            words = "|".join(name for name in names if "_" in name or name == error.param)  # others are English, too
            error.args = (re.sub(rf"\b({words})\b", lambda found: names[found[0]], error.message),)
            error.param = names.get(error.param or "", error.param)
        raise
