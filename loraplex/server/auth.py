"""API keys: `Authorization: Bearer KEY`. Keys are compared in constant time; logs have fingerprints."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.server.api_error import ApiError, error_response
from loraplex.server.api_keys import fingerprint, key_digest
from loraplex.server.config import ServerConfig

METRICS_PATH = "/metrics"
OPEN_PATHS = frozenset({"/health", "/ping", "/version", METRICS_PATH})
"""What probes and scrapers read without a key, as in vLLM (`--guard-metrics` takes one away); all else needs one."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What the key of a request stands for.

    fingerprint: names the key in logs and events. owner: separates the cached prefixes of two keys; made with a secret
    of this process, so that neither key nor fingerprint follows from it; "" where all share them. is_admin: may use the
    routes that change the server.
    """

    fingerprint: str
    owner: str
    is_admin: bool


KEYLESS = Caller("no key", "", is_admin=True)
"""Every request to a server without keys."""

ANONYMOUS = Caller("no key", "", is_admin=False)
"""A request to an open path of a server with keys."""


class KeyRing:
    """The accepted keys, kept as digests: comparing these takes the same time for every key and every length."""

    def __init__(
        self, api_keys: Sequence[str], admin_keys: Sequence[str] = (), *, is_cache_shared: bool = False
    ) -> None:
        """Without admin keys every key may do everything. is_cache_shared: all keys share cached prefixes."""
        secret = secrets.token_bytes(32)
        self._callers = tuple(
            (
                key_digest(key),
                Caller(
                    fingerprint(key),
                    "" if is_cache_shared else hmac.new(secret, key_digest(key), "sha256").hexdigest(),
                    is_admin=key in admin_keys or not admin_keys,
                ),
            )
            for key in dict.fromkeys((*api_keys, *admin_keys))
        )

    @classmethod
    def of(cls, config: ServerConfig) -> KeyRing:
        return cls(config.api_keys, config.admin_api_keys, is_cache_shared=config.share_prefix_cache)

    @property
    def has_keys(self) -> bool:
        return bool(self._callers)

    def admitted(self, headers: Headers) -> Caller | None:
        """Who sends a request with this head; None where it has no valid key, but needs one: its body is never read."""
        return self.caller_of(headers.get("authorization")) if self._callers else KEYLESS

    def caller_of(self, authorization: str | None) -> Caller | None:
        """Of a header's value, which is `Bearer` and a key; None for any other. Every key is compared, always."""
        scheme, _, key = (authorization or "").partition(" ")
        given = key_digest(key.strip())
        found = [caller for digest, caller in self._callers if hmac.compare_digest(given, digest)]
        return found[0] if found and scheme.lower() == "bearer" else None


class ApiKeyMiddleware:
    """Answers 401 before any route sees a request without a key; a new route is guarded unless it is in OPEN_PATHS.

    What a key may do is the route's to say (access.py): the caller is in the state of the request.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._caller_of(scope)
        if caller is not None:
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, send)
            return
        error = ApiError(
            "no valid API key was sent; send `Authorization: Bearer KEY` with a key of this server",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )
        await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _caller_of(self, scope: Scope) -> Caller | None:
        if not self._keys.has_keys:
            return KEYLESS
        if scope["path"] in self._open_paths:
            return ANONYMOUS
        return self._keys.caller_of(Headers(scope=scope).get("authorization"))


def caller_of(request: Request) -> Caller:
    """The caller that the middleware has found."""
    caller: Caller = request.state.caller
    return caller
