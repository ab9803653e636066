"""API keys: `Authorization: Bearer KEY`, or `X-API-Key: KEY` as Anthropic's clients send it.

Keys are compared in constant time; logs have fingerprints.

There are keys of the command line, and those of tenants in the database (`tenants/`). The latter are random and found
by their SHA-256: how long that takes says nothing about a key.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from loraplex.logs import request_context
from loraplex.server.api_error import ApiError, error_response
from loraplex.server.api_keys import fingerprint
from loraplex.server.config import ServerConfig
from loraplex.server.urls import source_of
from loraplex.tenants.directory import Tables
from loraplex.tenants.records import Key, Role, Scope, TenantTable, key_digest

METRICS_PATH = "/metrics"
KEY_HEADER = "x-api-key"
TENANT_HEADER = "X-Loraplex-Tenant"
"""Of GET /v1/models, for a key that sees a tenant's names alone: the tenant; none: public names."""

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ping", "/version", METRICS_PATH})
"""What probes and scrapers read without a key, as in vLLM (`--guard-metrics` takes one away); all else needs one."""


def credential_of(headers: Headers) -> str:
    """The value of `Authorization`; without one, what `X-API-Key` says in its form; "" where neither is there."""
    given, key = headers.get("authorization"), headers.get(KEY_HEADER)
    return f"Bearer {key}" if given is None and key else given or ""


def key_of(credential: str) -> str | None:
    """The key in what `credential_of` gives, `Bearer` and a key, however these are spelled; None: it has no key."""
    scheme, _, key = credential.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


@dataclass(frozen=True, slots=True)
class Caller:
    """What the key of a request stands for.

    fingerprint: names the key in logs and events. owner: separates the cached prefixes of two keys or tenants; made
    with a secret of this process, so that neither key nor fingerprint follows from it; "" where all share them. scope:
    the adapters that it may see, and what it calls them.
    """

    fingerprint: str
    owner: str
    role: Role
    scope: Scope = field(default_factory=Scope)

    @property
    def is_admin(self) -> bool:
        """Whether it sees all, and may use the routes that change the server."""
        return self.role in (Role.ADMIN, Role.OPERATOR)

    @property
    def account(self) -> str:
        """What its turns, connections and verbs are counted for."""
        return f"tenant {self.scope.tenant}" if self.scope.tenant else self.fingerprint


KEYLESS = Caller("no key", "", Role.ADMIN)
"""Every request to a server without keys."""

ANONYMOUS = Caller("no key", "", Role.INFERENCE)
"""A request to an open path of a server with keys."""


NO_TENANTS = TenantTable()


class KeyRing:
    """The accepted keys, kept as digests: comparing these takes the same time for every key and every length."""

    def __init__(
        self,
        api_keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        *,
        is_cache_shared: bool = False,
        tenants: Tables | None = None,
    ) -> None:
        """Without admin keys every key may do everything. is_cache_shared: all keys share cached prefixes. tenants:
        what is known of them now; None: there are none."""
        self._secret = secrets.token_bytes(32)
        self._is_cache_shared = is_cache_shared
        self._tenants = tenants
        self._callers = tuple(
            (
                key_digest(key),
                Caller(
                    fingerprint(key),
                    self._owner(key_digest(key)),
                    Role.ADMIN if key in admin_keys or not admin_keys else Role.INFERENCE,
                ),
            )
            for key in dict.fromkeys((*api_keys, *admin_keys))
        )

    @classmethod
    def of(cls, config: ServerConfig, tenants: Tables | None = None) -> KeyRing:
        return cls(config.api_keys, config.admin_api_keys, is_cache_shared=config.share_prefix_cache, tenants=tenants)

    @property
    def table(self) -> TenantTable:
        return NO_TENANTS if self._tenants is None else self._tenants.table

    @property
    def has_keys(self) -> bool:
        return bool(self._callers) or self.table.is_configured

    @property
    def shows_cached_tokens(self) -> bool:
        """Whether answers say how much of a prompt was cached: never what another key has sent."""
        return not self._is_cache_shared or (len(self._callers) < 2 and not self.table.is_configured)

    def admitted(self, headers: Headers) -> Caller | None:
        """Who sends a request with this head; None where it has no valid key, but needs one: its body is never read."""
        return self.caller_of(credential_of(headers)) if self.has_keys else KEYLESS

    def caller_of(self, credential: str) -> Caller | None:
        """Of what `credential_of` gives: `Bearer` and a key; None for any other. Every key is compared, always."""
        key, table = key_of(credential), self.table
        given = key_digest(key or "")
        found = [caller for digest, caller in self._callers if hmac.compare_digest(given, digest)]
        if key is None:
            return None
        if not found:
            of_tenant = table.keys.get(given)
            return None if of_tenant is None else self._caller(of_tenant, given, table)
        if not table.is_configured:
            return found[0]
        return replace(found[0], scope=Scope(table, None if found[0].is_admin else ""))

    def _caller(self, key: Key, digest: bytes, table: TenantTable) -> Caller:
        owner = self._owner(digest if key.tenant is None else f"tenant {key.tenant}".encode())
        return Caller(key.key_id, owner, key.role, Scope(table, key.tenant))

    def _owner(self, of: bytes) -> str:
        return "" if self._is_cache_shared else hmac.new(self._secret, of, "sha256").hexdigest()


class ApiKeyMiddleware:
    """Answers 401 before any route sees a request without a key; a new route is guarded unless it is in OPEN_PATHS.

    What a key may do is the route's to say (access.py): the caller is in the state of the request.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._caller_of(scope)
        if caller is not None:
            scope.setdefault("state", {})["caller"] = caller
            if (context := request_context.get()) is not None:
                context.tenant = caller.scope.tenant or ""
                context.client = client_of(HTTPConnection(scope))
            await self._app(scope, receive, send)
            return
        await error_response(unknown_key())(scope, receive, send)

    def _caller_of(self, scope: AsgiScope) -> Caller | None:
        if not self._keys.has_keys:
            return KEYLESS
        if self._is_open(scope["method"], scope["path"]):
            return ANONYMOUS
        return self._keys.caller_of(credential_of(Headers(scope=scope)))

    def _is_open(self, method: str, path: str) -> bool:
        """A page is open to reading: `POST /` is LoRAX's route."""
        is_read = method in ("GET", "HEAD") or path in OPEN_PATHS
        is_closed = path == METRICS_PATH and self._keys.table.is_configured
        return is_read and path in self._open_paths and not is_closed


def client_of(request: HTTPConnection) -> str:
    """Whose turn a request takes: its tenant's or key's where it has one, else its address's."""
    caller = caller_of(request)
    return address_of(request) if caller in (KEYLESS, ANONYMOUS) else caller.account


def address_of(request: HTTPConnection) -> str:
    """As connections count it."""
    return "" if request.client is None else source_of(request.client.host)


def unknown_key() -> ApiError:
    text = "no valid API key was sent; send `Authorization: Bearer KEY` with a key of this server"
    return ApiError(text, status=401, kind="authentication_error", code="invalid_api_key")


def caller_of(request: HTTPConnection) -> Caller:
    """The caller that the middleware has found; of a verb, as it was known when the body had come (access.py), and
    of one that adds an adapter or pins, when its turn had (tenants/adapter_quota.py)."""
    caller: Caller = request.state.caller
    return caller
