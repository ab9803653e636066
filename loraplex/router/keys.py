"""Which keys a replica takes, and what a client may be told of adapters that no open replica has.

A client whose key none has seen is asked for no body before one has.

Keys are the replicas' to check. A client without one would have its body read, held among those of others, and sent on
only to be refused. A key that was taken is asked for again after FRESH_S.

Where tenants are, a name is known to a client that sees all names, to its own tenant, and to those that were served by
it: to others it is one that does not exist, also while the replica that has it is away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.datastructures import Headers as RequestHeaders
from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.connection import LostError, NotSentError
from loraplex.router.exchange import answer_headers, own_headers, response_of
from loraplex.router.fleet import Fleet
from loraplex.router.needs import tenant_of
from loraplex.routing import Needs
from loraplex.routing.known import Known
from loraplex.server.api_error import ApiError
from loraplex.server.auth import KEYLESS, TENANT_HEADER, Caller, address_of, credential_of
from loraplex.tenants.records import Role

MAX_KNOWN_KEYS = 65_536
MAX_SERVED = 262_144
MAX_REFUSAL_BYTES = 2**16
FRESH_S = 60.0

REFUSALS = frozenset({400, 401, 403, 421, 431})
"""Of the client, whatever it asks for: its key, or its head. Of other answers a key is neither taken nor refused."""

_TENANT_HEADER = TENANT_HEADER.lower().encode()

PATH = b"/v1/models?limit=1"
"""Every key may see it; without one it is refused."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """tenant: whose names the key sees, "": public ones; None: all names."""

    at_s: float
    tenant: str | None


class Keys:
    """Digests of the keys, and of "no key" where the replicas need none."""

    def __init__(self, fleet: Fleet, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._clock = clock
        self._taken: Known[str | None, _Taken] = Known(MAX_KNOWN_KEYS)
        self._served: Known[tuple[str | None, str], None] = Known(MAX_SERVED)

    async def refusal(self, request: Request, *, is_fresh: bool = False) -> Response | None:
        """A replica's answer to a client whose key it does not take. None for one that it takes, or where none says.

        is_fresh: it is asked now, since no replica sees the request: a key may have been revoked.
        """
        tenant, now_s = tenant_of(credential_of(request.headers)), self._clock()
        known = self._taken.get(tenant)
        if known is not None and not is_fresh and now_s - known.at_s < FRESH_S:
            return None
        replica = self._fleet.choose(Needs(tenant=tenant))
        if replica is None:
            return None
        try:
            answer = await replica.send("GET", PATH, own_headers(request), b"", self._timeout_s)
            body = await answer.read(MAX_REFUSAL_BYTES)
        except (NotSentError, LostError):
            return None
        if answer.status in REFUSALS:
            self._taken.pop(tenant, None)
            return response_of(answer.status, answer_headers(answer), body)
        if answer.status == 200:
            owners = [value.decode("latin-1") for name, value in answer.headers if name == _TENANT_HEADER]
            self._taken.put(tenant, _Taken(now_s, owners[0] if owners else None))
        return None

    def meant(self, needs: Needs) -> Needs:
        """With the whole name of a tenant's own adapter, where it wrote the short one: what replicas list."""
        key = self._taken.get(needs.tenant)
        if needs.adapter is None or key is None or not key.tenant:
            return needs
        own = f"{key.tenant}/{needs.adapter}"
        return replace(needs, adapter=own) if self._fleet.is_known(own) else needs

    def learn_served(self, needs: Needs) -> None:
        """A replica has served the client with the adapter."""
        if needs.adapter is not None:
            self._served.put((needs.tenant, needs.adapter), None)

    def account(self, headers: RequestHeaders) -> str | None:
        """What a request's turns and bodies count for, where replicas have tenants and have taken its key: its
        tenant, or its key where that has none. None: its address, which an invented key does not change."""
        credential = tenant_of(credential_of(headers))
        key = self._taken.get(credential)
        if credential is None or key is None or key.tenant is None:
            return None
        return f"tenant {key.tenant}" if key.tenant else credential

    def client_of(self, request: Request) -> str:
        """Whose turn a request takes."""
        return self.account(request.headers) or address_of(request)

    def caller(self, headers: RequestHeaders) -> Caller:
        """Whose the connection's request is. Keys are the replicas' to check."""
        account = self.account(headers)
        return KEYLESS if account is None else Caller(account, "", Role.INFERENCE)

    def check_sees_all(self, request: Request) -> None:
        """Raises ApiError for a key that sees a tenant's names alone, or that no replica has said anything of."""
        key = self._taken.get(tenant_of(credential_of(request.headers)))
        if key is None:
            text = "no replica says now what this key may see; try again later"
            raise ApiError(text, status=503, kind="unavailable_error", code="no_replica")
        if key.tenant is not None:
            text = f"{request.method} {request.url.path[:80]} is for keys that see the adapters of all tenants"
            raise ApiError(text, status=403, kind="permission_error", code="role_required")

    def may_know(self, needs: Needs) -> bool:
        """Whether the client may hear that the adapter exists."""
        key, adapter = self._taken.get(needs.tenant), needs.adapter
        if adapter is None or (needs.tenant, adapter) in self._served:
            return True
        if key is None:
            return False
        return key.tenant is None or (key.tenant != "" and adapter.startswith(f"{key.tenant}/"))
