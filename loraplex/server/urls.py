"""Heads that are not taken; paths: one trailing slash more is the same path, and a path that no route has is answered
with the nearest one; and what counts as one address."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.server.api_error import ApiError, error_response

if TYPE_CHECKING:
    from fastapi.routing import APIRoute

MAX_PATH_BYTES = 4096
"""A route with the longest name of an adapter is shorter. Every route is compared with it."""

MAX_QUERY_PARAMETERS = 64
"""More than any route has."""

MAX_SHOWN_CHARS = 40
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_TEXT_ONLY = "is not supported: this server generates text"
_NO_FLUSH = "is not supported: cached prefixes are evicted by need; another cache_salt shares none of them"

PEERS = {
    "/v1/generate": "POST /v1/completions",
    "/invocations": "POST /v1/chat/completions",
    "/inference/v1/generate": "POST /v1/completions",
    "/api/generate": "POST /v1/completions",
    "/api/chat": "POST /v1/chat/completions",
    "/api/tags": "GET /v1/models",
    "/api/version": "GET /version",
    "/v1/loras": "GET /v1/adapters",
    "/v1/engines": "GET /v1/models",
    "/get_load": "GET /metrics",
    "/load": "GET /metrics",
    "/healthz": "GET /health",
    "/livez": "GET /health",
    "/readyz": "GET /health",
    "/start_profile": "POST /v1/profile/start",
    "/stop_profile": "POST /v1/profile/stop",
    "/redoc": "GET /docs",
}
"""Routes of vLLM, SGLang, LoRAX, Ollama and probes that are called otherwise here, and what to use."""

NOT_HERE = {
    "/v1/embeddings": _TEXT_ONLY,
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/moderations": _TEXT_ONLY,
    "/v1/rerank": _TEXT_ONLY,
    "/v1/score": _TEXT_ONLY,
    "/v2/rerank": _TEXT_ONLY,
    "/rerank": _TEXT_ONLY,
    "/score": _TEXT_ONLY,
    "/encode": _TEXT_ONLY,
    "/classify": _TEXT_ONLY,
    "/pooling": _TEXT_ONLY,
    "/v1/files": "is not supported: requests are answered at once, without files and batches",
    "/v1/batches": "is not supported: requests are answered at once, without files and batches",
    "/v1/fine_tuning": "is not supported: train adapters elsewhere, and load them with POST /v1/adapters",
    "/v1/responses": "is not supported: answers are not stored; send the items of earlier turns again",
    "/v1/conversations": "is not supported: answers are not stored; send the items of earlier turns again",
    "/v1/messages/batches": "is not supported: requests are answered at once, without files and batches",
    "/flush_cache": _NO_FLUSH,
    "/reset_prefix_cache": _NO_FLUSH,
    "/abort_request": "is not supported: close the connection of a request to end it",
    "/sleep": "is not supported: stop the server; with --state-dir the next one has the same adapters",
    "/wake_up": "is not supported: start the server again; with --state-dir it has the same adapters",
    "/update_weights_from_disk": "is not supported: start a server with the other base model",
}
"""Routes of the same servers, and what is below them, that have no counterpart here."""


class TrailingSlash:
    """`/v1/models/` is `/v1/models` to everything behind this, API keys included. A redirect would lose bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and scope["path"] != "/":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


class KnownUrls:
    """The routes of an application, for the answers to what none of them is: 404 with a hint, 405 with the methods."""

    def __init__(self, routes: Sequence[APIRoute]) -> None:
        self._routes = routes
        shown = [route for route in routes if route.include_in_schema]
        self._by_path = {route.path_format: route for route in shown}

    async def answer(self, request: Request, error: Exception) -> Response:
        """The handler of Starlette's own errors."""
        assert isinstance(error, HTTPException)
        method, path = request.method, request.scope["path"]
        what = f"{method[:MAX_SHOWN_CHARS]} {path[:MAX_SHOWN_CHARS]}"
        if error.status_code == 404:
            refusal = ApiError(f"{what} {self.hint(path)}", status=404, kind="not_found_error", code="unknown_url")
            return error_response(refusal)
        headers = dict(error.headers or {})
        if error.status_code != 405:
            return error_response(ApiError(f"{what}: {error.detail}", status=error.status_code), headers)
        methods = self._methods(path) or headers.get("Allow", "")
        refusal = ApiError(f"{what}: this route has {methods}", status=405, code="method_not_allowed")
        return error_response(refusal, {"Allow": methods})

    def hint(self, path: str) -> str:
        """The rest of a sentence that begins with a path: what to use instead, or that there is nothing."""
        if path in PEERS:
            return f"is no route of this server: use {PEERS[path]}"
        for absent, why in NOT_HERE.items():
            if path == absent or path.startswith(f"{absent}/"):
                return why
        nearest = get_close_matches(path[: 2 * MAX_SHOWN_CHARS], self._by_path, n=1, cutoff=0.7)
        if not nearest:
            return "is no route of this server: GET /docs lists them"
        methods = sorted(self._by_path[nearest[0]].methods or ())
        return f"is no route of this server: did you mean {methods[0]} {nearest[0]}?"

    def _methods(self, path: str) -> str:
        """All that a path has, of whichever route."""
        found = {method for route in self._routes if route.path_regex.match(path) for method in route.methods or ()}
        return ", ".join(sorted(found))


def fault_of_head(version: str, method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """headers: names in lower case. What the parser refuses is refused before, such as two lengths of a body."""
    num_hosts = sum(name == b"host" for name, _ in headers)
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if method == b"CONNECT":
        return "this server is no proxy: CONNECT is not served"
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not spoken here: send HTTP/1.1"
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        return f"a request of HTTP/1.1 has one Host header, this one has {num_hosts}"
    for field in (b"authorization", b"x-api-key"):
        if sum(name == field for name, _ in headers) > 1:
            return f"a request has one {field.decode()} header: which of several counts would depend on the server"
    if codings and version == "1.0":
        return "HTTP/1.0 has no Transfer-Encoding: send Content-Length, or HTTP/1.1"
    if codings and codings != [b"chunked"]:
        return "the only Transfer-Encoding is chunked here: send the body as it is"
    return fault_of_url(url)


def fault_of_url(url: bytes) -> str | None:
    """Why this server takes no request for it, before any route is looked at."""
    path, _, query = url.partition(b"?")
    if len(path) > MAX_PATH_BYTES:
        return f"a path has at most {MAX_PATH_BYTES} bytes"
    if query.count(b"&") >= MAX_QUERY_PARAMETERS:
        return f"a query has at most {MAX_QUERY_PARAMETERS} parameters"
    meant = unquote_to_bytes(url)
    try:
        meant.decode()
    except UnicodeDecodeError:
        return "the percent-encoding of the path or query does not stand for UTF-8"
    if _CONTROL.search(meant):
        return "the percent-encoding of the path or query stands for control characters, and no route takes these"
    return None


def source_of(address: str) -> str:
    """What counts as one address: of IPv6 the network of 64 bits, since one machine has all of it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(found.ipv4_mapped or found.packed[:8].hex())
