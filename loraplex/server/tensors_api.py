"""`PUT /v1/adapters/{name}/tensors`: a new version of an adapter from the body, a safetensors file.

It is received as uploads are (sources/receiver.py), and has one of their places.
"""

from __future__ import annotations

import base64
import binascii
import re
from functools import partial
from typing import Annotated

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field

from loraplex.adapters.files import SAFETENSORS_NAME
from loraplex.adapters.registry import LoadStatus, LoRARef
from loraplex.frontend.adapter_updates import UpdateWish
from loraplex.server.adapter_schemas import LoadReply
from loraplex.server.api_error import ApiError, clipped
from loraplex.server.auth import caller_of, client_of
from loraplex.server.browser_guard import RAW_TYPE, media_type_of
from loraplex.server.context import ServerContext
from loraplex.server.openapi import OF_ADAPTERS, Schema, operation
from loraplex.server.responses import encode
from loraplex.server.sources.receiver import UploadReceiver
from loraplex.server.tenants.callers_names import CallersNames, in_roots
from loraplex.server.verb_turns import VerbTurns

_SHA256 = "^[0-9a-fA-F]{64}$"
_ETAG = re.compile(r'(W/)?"([^"]*)"')


class TensorsQuery(BaseModel):
    """Query of `PUT /v1/adapters/{name}/tensors`. sha256: of the body, in hexadecimal digits. expected_version: the
    number of the version that the body is to replace, 0 for a name that is not loaded."""

    model_config = ConfigDict(extra="forbid")

    sha256: Annotated[str, Field(pattern=_SHA256)] | None = None
    expected_version: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class TensorRoute:
    """loads: the turns of all loads of the server."""

    def __init__(self, context: ServerContext, names: CallersNames, loads: VerbTurns, receiver: UploadReceiver) -> None:
        self._engine = context.engine
        self._quota = context.quota
        self._names = names
        self._sources = context.sources
        self._loads = loads
        self._receiver = receiver

    @staticmethod
    def described() -> Schema:
        described = operation(replies=(LoadReply,), statuses=(200, 201), errors=(*OF_ADAPTERS, 412, 413, 415))
        schema = {"type": "string", "format": "binary"}
        return {**described, "requestBody": {"required": True, "content": {RAW_TYPE: {"schema": schema}}}}

    async def put(self, name: str, request: Request, query: TensorsQuery) -> Response:
        registry = self._receiver.check(request, f"adapter {clipped(name)!r} was to be changed")
        if media_type_of(request.headers) not in ("", RAW_TYPE):
            text = f"Content-Type must be {RAW_TYPE}: the body is a safetensors file, curl -T FILE sends one"
            raise ApiError(text, status=415, code="unsupported_media_type")
        sha256, check_loaded = _sha256_of(request, query), partial(_check_loaded, request, query.expected_version)
        found = self._names.find(request, name)
        is_known = found is not None and registry.is_registered(found)
        name = self._names.own(request, name) if is_known else self._names.new(request, name)
        updates = self._engine.updates
        async with self._receiver.upload(request) as upload:
            async for _ in self._receiver.pieces(request, partial(upload.write, SAFETENSORS_NAME)):
                pass
            async with (
                self._quota.turn(request, is_load=True),
                updates.turn(name),
                self._loads.of(client_of(request)),
                self._quota.changing(request, name, is_load=True) as check_size,
            ):
                wish = UpdateWish(sha256, check_loaded, check_size)
                with in_roots(request, *self._own_places(request)):  # for the configuration of the version before
                    result = await self._engine.on_registry(updates.update, name, upload, wish)
        status = 201 if result.status in (LoadStatus.LOADED, LoadStatus.LOADED_WITH_EVICTION) else 200
        reply = LoadReply.of(result, caller_of(request).scope)
        return Response(encode(reply), status, {"ETag": f'"{reply.digest}"'}, "application/json")

    def _own_places(self, request: Request) -> list[str]:
        """Directories of sources that are the tenant's alone."""
        tenant = caller_of(request).scope.tenant or ""
        return [each.place for each in self._sources.of(tenant) if each.tenant and each.is_directory]


def _sha256_of(request: Request, query: TensorsQuery) -> str | None:
    """As the query says it, or the header Content-Digest (RFC 9530). Raises ApiError where they differ."""
    given = request.headers.get("content-digest")
    if given is None:
        return None if query.sha256 is None else query.sha256.lower()
    found = re.fullmatch(r"sha-256=:([A-Za-z0-9+/]{43}=):", given.strip())
    try:
        digest = base64.b64decode(found[1], validate=True).hex() if found is not None else ""
    except binascii.Error:
        digest = ""
    if not digest:
        text = "Content-Digest is not sha-256=:BASE64:, which is all that this route reads"
        raise ApiError(text, param="Content-Digest")
    if query.sha256 is not None and query.sha256.lower() != digest:
        raise ApiError("the query and Content-Digest say two digests of the body", param="sha256")
    return digest


def _check_loaded(request: Request, expected_version: int | None, loaded: LoRARef | None) -> None:
    """In a thread. Raises ApiError 409 for another version than was expected, 412 for what a header forbids."""
    number = 0 if loaded is None else loaded.adapter_version
    if expected_version is not None and number != expected_version:
        found = f"it has version {number}" if loaded is not None else "it is not loaded"
        text = f"version {expected_version} was to be replaced, and {found}: nothing was changed"
        raise ApiError(text, status=409, kind="conflict_error", code="version_conflict", param="expected_version")
    digest = None if loaded is None else loaded.adapter_digest
    match, none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
    if match is not None and not _names_tag(match, digest):
        raise _failed("If-Match", "the adapter does not have a digest that it names")
    if none_match is not None and _names_tag(none_match, digest):
        raise _failed("If-None-Match", "the adapter has a digest that it names, or is loaded")


def _names_tag(header: str, digest: str | None) -> bool:
    """Whether a list of entity tags has this one. Weak ones are none: weights are equal or are not."""
    if header.strip() == "*":
        return digest is not None
    return ("", digest) in _ETAG.findall(header)


def _failed(header: str, what: str) -> ApiError:
    text = f"{header}: {what}; nothing was changed"
    return ApiError(text, status=412, kind="conflict_error", code="precondition_failed", param=header)
