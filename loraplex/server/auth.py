"""API keys: `Authorization: Bearer KEY`. Keys are compared in constant time and never logged."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.server.api_error import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""What probes and scrapers read without a key, as in vLLM. Everything else needs one."""


class ApiKeys:
    """The accepted keys, kept as digests: comparing these takes the same time for every key and every length."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def accept(self, authorization: str | None) -> bool:
        """Whether a header's value is `Bearer` and one of the keys. Every key is compared, whichever matches."""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == "bearer"


class ApiKeyMiddleware:
    """Answers 401 before any route sees a request without a key; a new route is guarded unless it is in OPEN_PATHS."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = ApiKeys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or self._is_open(scope)
            or self._keys.accept(Headers(scope=scope).get("authorization"))
        ):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            "no valid API key was sent; send `Authorization: Bearer KEY` with a key of this server",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )
        await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        return scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
