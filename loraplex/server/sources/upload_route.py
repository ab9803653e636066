"""`POST /v1/adapters` with a form: an adapter from files that its client sends, instead of a path.

Its fields come before its files, so that a name which cannot be loaded is refused before they are read. What fails
leaves nothing (adapters/sources/uploads.py).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loraplex.adapters.files import CONFIG_NAME, SAFETENSORS_NAME
from loraplex.adapters.registry import LoadResult, LoRARef, LoRARegistry
from loraplex.adapters.sources.uploads import Upload
from loraplex.errors import AdapterConflictError
from loraplex.frontend.adapter_updates import UpdateWish
from loraplex.server.adapter_schemas import LoadReply
from loraplex.server.api_error import ApiError, clipped, validation_error
from loraplex.server.audit import name_adapters
from loraplex.server.auth import caller_of, client_of
from loraplex.server.context import ServerContext
from loraplex.server.model_names import has_adapter
from loraplex.server.openapi import Schema
from loraplex.server.responses import encode
from loraplex.server.sources.form import MAX_BYTES, UploadForm
from loraplex.server.sources.receiver import PIECE_BYTES, UploadReceiver
from loraplex.server.tenants.callers_names import CallersNames
from loraplex.server.verb_turns import VerbTurns

FORM_TYPE = "multipart/form-data"


class UploadFields(BaseModel):
    """The form's fields beside its files. sha256: of the weights, in hexadecimal digits; load_inplace: a name that is
    loaded gets a new version."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    load_inplace: bool = False
    is_pinned: bool = False


class UploadRoute:
    """loads: the turns of all loads of the server."""

    def __init__(self, context: ServerContext, names: CallersNames, loads: VerbTurns, receiver: UploadReceiver) -> None:
        self._engine = context.engine
        self._quota = context.quota
        self._names = names
        self._loads = loads
        self._receiver = receiver
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what it says of a form, its client is told

    @staticmethod
    def described() -> Schema:
        """Of the form, for OpenAPI."""
        files = {name: {"type": "string", "format": "binary"} for name in MAX_BYTES}
        schema: dict[str, Any] = UploadFields.model_json_schema()
        properties = {**schema["properties"], **files}
        required = ["name", CONFIG_NAME, SAFETENSORS_NAME]
        return {FORM_TYPE: {"schema": {**schema, "properties": properties, "required": required}}}

    async def post(self, request: Request) -> Response:
        registry = self._receiver.check(request, "an adapter was to be uploaded")
        async with self._receiver.upload(request) as upload:
            fields, name = await self._receive(request, registry, upload)
            async with (
                self._quota.turn(request, is_load=True, is_held=fields.is_pinned),
                self._engine.updates.turn(name),
                self._loads.of(client_of(request)),
            ):
                result = await self._load(request, name, upload, fields)
        reply = LoadReply.of(result, caller_of(request).scope)
        return Response(encode(reply), headers={"ETag": f'"{reply.digest}"'}, media_type="application/json")

    async def _load(self, request: Request, name: str, upload: Upload, fields: UploadFields) -> LoadResult:
        check = partial(_check_loaded, clipped(fields.name), fields.load_inplace)
        sha256 = None if fields.sha256 is None else fields.sha256.lower()
        async with self._quota.changing(request, name, is_load=True, is_pin=fields.is_pinned) as check_size:
            wish = UpdateWish(sha256, check, check_size, fields.is_pinned, self._names.answer_check(request, name))
            return await self._engine.on_registry(self._engine.updates.update, name, upload, wish)

    async def _receive(self, request: Request, registry: LoRARegistry, upload: Upload) -> tuple[UploadFields, str]:
        """The fields, and the name that is to be registered, when all is on the disk."""
        form = UploadForm(request.headers.get("content-type", ""), upload.write)
        checked: tuple[UploadFields, str] | None = None
        async for _ in self._receiver.pieces(request, form.feed, PIECE_BYTES):
            checked = checked or (self._checked(request, registry, form) if form.files else None)
        form.check_whole()
        for name in (CONFIG_NAME, SAFETENSORS_NAME):
            if name not in form.files:
                raise ApiError(f"the upload has no file {name}", code="invalid_upload")
        return checked or self._checked(request, registry, form)

    def _checked(self, request: Request, registry: LoRARegistry, form: UploadForm) -> tuple[UploadFields, str]:
        """Raises ApiError for fields that are missing or wrong, and what a name that cannot be is refused with."""
        try:
            fields = UploadFields.model_validate(form.fields)
        except ValidationError as error:
            raise validation_error(
                error.errors(include_url=False, include_input=False, include_context=False)
            ) from None
        name_adapters(request, fields.name)
        name = self._names.new(request, fields.name)
        if not fields.load_inplace and has_adapter(registry, name):
            raise _is_loaded(clipped(fields.name))
        return fields, name


def _check_loaded(name: str, load_inplace: bool, loaded: LoRARef | None) -> None:
    if loaded is not None and not load_inplace:
        raise _is_loaded(name)


def _is_loaded(name: str) -> AdapterConflictError:
    text = f"adapter {name!r} is loaded already; send load_inplace=true to make a new version of it"
    return AdapterConflictError(text, param="name")
