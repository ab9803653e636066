"""Bodies of uploads: to the disk as they come, in threads, a piece at a time. A piece of each is held in memory.

They may be longer than other bodies (`--max-upload-bytes`). How slowly one may come is bounded as for them, and by
MAX_UPLOAD_S in all: it has one of few places from its first byte on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from fastapi import Request

from loraplex.adapters.registry import LoRARegistry
from loraplex.adapters.sources.uploads import Upload
from loraplex.errors import AdapterTooLargeError
from loraplex.server.api_error import ApiError
from loraplex.server.auth import caller_of, client_of
from loraplex.server.browser_guard import check_encoding
from loraplex.server.connections import LET_GO
from loraplex.server.context import ServerContext
from loraplex.server.model_names import lora_is_off
from loraplex.server.verb_turns import VerbTurns

PIECE_BYTES = 2**20
"""Written at a time, by one of NUM_WRITERS threads."""

NUM_WRITERS = 4
MAX_UPLOADS, MAX_UPLOADS_OF_A_CLIENT = 16, 4
"""At a time, from the first byte to the answer."""

MAX_UPLOAD_S = 3600.0
"""From the first byte to the last."""

T = TypeVar("T")


class UploadReceiver:
    """Of all routes that take uploads."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._engine = context.engine
        self._uploads = VerbTurns("uploads", MAX_UPLOADS, MAX_UPLOADS_OF_A_CLIENT)
        self._writers = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="upload")

    def check(self, request: Request, what: str) -> LoRARegistry:
        """Before anything is read. what: the beginning of a sentence, where LoRA is off. Raises ApiError, ConfigError
        where servers share names."""
        registry = self._engine.registry
        if registry is None:
            raise lora_is_off(what, bool(self._context.config.merged_into))
        self._context.check_takes_uploads()
        self._engine.updates.check_can_update(registry)
        check_encoding(request.headers)
        return registry

    @asynccontextmanager
    async def upload(self, request: Request) -> AsyncIterator[Upload]:
        """In the client's turn. An error in the block removes what came, unless it was taken."""
        updates = self._engine.updates
        async with self._uploads.of(client_of(request)):
            upload = await self._in_thread(partial(updates.uploads.receive, caller_of(request).scope.tenant or ""))
            async with updates.abandoning(upload):
                yield upload

    async def pieces(
        self, request: Request, write: Callable[[bytes], None], num_beside: int = 0
    ) -> AsyncIterator[None]:
        """Of a body, each when `write` has had it. num_beside: bytes that it may have beside its files. Raises ApiError
        413 for a body that is too long, 408 for one that is too slow."""
        limit = self._engine.updates.uploads.limits.max_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > limit + num_beside:
            raise _too_long(limit)
        until_s = asyncio.get_running_loop().time() + MAX_UPLOAD_S
        piece, num_bytes, is_last, stream = bytearray(), 0, False, aiter(request.stream())
        while not is_last:
            try:
                async with asyncio.timeout_at(until_s):
                    chunk = await anext(stream, None)
            except TimeoutError:
                text = f"the upload did not come within {MAX_UPLOAD_S:g} s"
                raise ApiError(text, status=408, code="upload_timeout") from None
            piece += chunk or b""
            num_bytes += len(chunk or b"")
            is_last = chunk is None
            if num_bytes > limit + num_beside:
                raise _too_long(limit)
            if len(piece) >= PIECE_BYTES or is_last:
                await self._write(request, write, bytes(piece))
                piece.clear()
                yield

    async def _write(self, request: Request, write: Callable[[bytes], None], piece: bytes) -> None:
        try:
            await self._in_thread(lambda: write(piece))
        except AdapterTooLargeError:
            raise _too_long(self._engine.updates.uploads.limits.max_bytes) from None
        if (let_go := request.scope.get(LET_GO)) is not None:
            let_go(len(piece))

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._writers, work)


def _too_long(limit: int) -> ApiError:
    text = f"the upload is longer than {limit} bytes (--max-upload-bytes)"
    return ApiError(text, status=413, code="body_too_long")
