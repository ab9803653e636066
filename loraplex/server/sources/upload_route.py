"""`POST /v1/adapters` with a form: an adapter from files that its client sends, instead of a path.

The body goes to the disk as it comes, a piece at a time, in threads; it may be longer than other bodies
(`--max-upload-bytes`), and how slowly it may come is bounded as for them. Its fields come before its files, so that a
name which cannot be loaded is refused before they are read. What fails leaves nothing (adapters/uploads.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loraplex.adapters.files import CONFIG_NAME, SAFETENSORS_NAME
from loraplex.adapters.registry import LoadResult, LoRARef, LoRARegistry
from loraplex.adapters.uploads import Upload
from loraplex.errors import AdapterConflictError, AdapterTooLargeError
from loraplex.frontend.adapter_updates import UpdateWish
from loraplex.server.adapter_schemas import LoadReply
from loraplex.server.api_error import ApiError, clipped, validation_error
from loraplex.server.audit import name_adapters
from loraplex.server.auth import caller_of
from loraplex.server.body import check_encoding
from loraplex.server.connections import LET_GO
from loraplex.server.context import ServerContext
from loraplex.server.model_names import lora_is_off
from loraplex.server.off_loop import client_of
from loraplex.server.openapi import Schema
from loraplex.server.responses import encode
from loraplex.server.sources.form import MAX_BYTES, UploadForm
from loraplex.server.tenants.callers_names import CallersNames
from loraplex.server.verb_turns import VerbTurns

FORM_TYPE = "multipart/form-data"
PIECE_BYTES = 2**20
"""Written at a time, by one of NUM_WRITERS threads."""

NUM_WRITERS = 4
MAX_UPLOADS, MAX_UPLOADS_OF_A_CLIENT = 16, 4
"""At a time, from the first byte to the answer."""

T = TypeVar("T")


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

    def __init__(self, context: ServerContext, names: CallersNames, loads: VerbTurns) -> None:
        self._context = context
        self._engine = context.engine
        self._names = names
        self._loads = loads
        self._uploads = VerbTurns("uploads", MAX_UPLOADS, MAX_UPLOADS_OF_A_CLIENT)
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what it says of a form, its client is told
        self._writers = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="upload")

    @staticmethod
    def described() -> Schema:
        """Of the form, for OpenAPI."""
        files = {name: {"type": "string", "format": "binary"} for name in MAX_BYTES}
        schema: dict[str, Any] = UploadFields.model_json_schema()
        properties = {**schema["properties"], **files}
        required = ["name", CONFIG_NAME, SAFETENSORS_NAME]
        return {FORM_TYPE: {"schema": {**schema, "properties": properties, "required": required}}}

    async def post(self, request: Request) -> Response:
        registry = self._engine.registry
        if registry is None:
            raise lora_is_off("an adapter was to be uploaded", bool(self._context.config.merged_into))
        self._context.check_takes_uploads()
        updates = self._engine.updates
        updates.check_can_update(registry)
        check_encoding(request.headers)
        async with self._uploads.of(client_of(request)):
            upload = await self._in_thread(updates.uploads.receive)
            async with updates.abandoning(upload):
                fields, name = await self._receive(request, registry, upload)
                async with self._loads.of(client_of(request)), updates.turn(name):
                    result = await self._load(request, registry, name, upload, fields)
        return Response(
            encode(LoadReply.of(result, caller_of(request).scope)),
            headers={"ETag": f'"{result.ref.adapter_digest}"'},
            media_type="application/json",
        )

    async def _load(
        self, request: Request, registry: LoRARegistry, name: str, upload: Upload, fields: UploadFields
    ) -> LoadResult:
        check = partial(_check_loaded, clipped(fields.name), fields.load_inplace)
        sha256 = None if fields.sha256 is None else fields.sha256.lower()
        quota = self._context.quota.changing(request, name, is_load=True, is_pin=fields.is_pinned)
        async with quota as check_size:
            wish = UpdateWish(sha256, check, check_size, fields.is_pinned)
            return await self._engine.on_registry(self._engine.updates.update, name, upload, wish)

    async def _receive(self, request: Request, registry: LoRARegistry, upload: Upload) -> tuple[UploadFields, str]:
        """The fields, and the name that is to be registered, when all is on the disk."""
        limit = self._engine.updates.uploads.limits.max_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > limit + PIECE_BYTES:
            raise _too_long(limit)
        form = UploadForm(request.headers.get("content-type", ""), upload.write)
        checked: tuple[UploadFields, str] | None = None
        piece, num_bytes = bytearray(), 0
        async for chunk in request.stream():
            piece += chunk
            num_bytes += len(chunk)
            if num_bytes > limit + PIECE_BYTES:
                raise _too_long(limit)
            if len(piece) >= PIECE_BYTES:
                await self._feed(request, form, bytes(piece))
                piece.clear()
                checked = checked or self._checked(request, registry, form)
        await self._feed(request, form, bytes(piece))
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
        ref = registry.refs().get(name)
        _check_loaded(clipped(fields.name), fields.load_inplace, ref)
        return fields, name

    async def _feed(self, request: Request, form: UploadForm, piece: bytes) -> None:
        try:
            await self._in_thread(partial(form.feed, piece))
        except AdapterTooLargeError:
            raise _too_long(self._engine.updates.uploads.limits.max_bytes) from None
        if (let_go := request.scope.get(LET_GO)) is not None:
            let_go(len(piece))

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._writers, work)


def _check_loaded(name: str, load_inplace: bool, loaded: LoRARef | None) -> None:
    if loaded is not None and not load_inplace:
        text = f"adapter {name!r} is loaded already; send load_inplace=true to make a new version of it"
        raise AdapterConflictError(text, param="name")


def _too_long(limit: int) -> ApiError:
    text = f"the upload is longer than {limit} bytes (--max-upload-bytes)"
    return ApiError(text, status=413, code="body_too_long")
