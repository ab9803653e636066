"""One ASGI request driven by hand: chunks as they are sent, and a client that can go away at any moment."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiCall:
    """`await call.next_chunk()` is the next piece of the body, None at its end; `disconnect()`: the client leaves."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: dict[str, Any],
        method: str = "POST",
        *,
        query: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._outgoing: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                (b"host", b"localhost"),
                *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._outgoing.put))

    async def start(self) -> int:
        """The status, once it is sent."""
        message = await self._outgoing.get()
        assert message["type"] == "http.response.start"
        return int(message["status"])

    async def next_chunk(self) -> bytes | None:
        message = await self._outgoing.get()
        assert message["type"] == "http.response.body"
        return message["body"] if message.get("more_body") else None

    async def rest(self) -> bytes:
        """All of the body that is still to come."""
        chunks = []
        while (chunk := await self.next_chunk()) is not None:
            chunks.append(chunk)
        await self.task
        return b"".join(chunks)

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})
