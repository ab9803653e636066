"""Which keys a replica takes: a client whose key none has seen is asked for no body before one has.

Keys are the replicas' to check. A client without one would have its body read, held among those of others, and sent on
only to be refused. A key that was taken is asked for again after FRESH_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.connection import LostError, NotSentError
from loraplex.router.exchange import answer_headers, own_headers, response_of
from loraplex.router.fleet import Fleet
from loraplex.router.needs import tenant_of
from loraplex.routing import Needs
from loraplex.routing.known import Known
from loraplex.server.auth import credential_of

MAX_KNOWN_KEYS = 65_536
MAX_REFUSAL_BYTES = 2**16
FRESH_S = 60.0

PATH = b"/v1/models?limit=1"
"""Every key may see it; without one it is refused."""


class Keys:
    """Digests of the keys, and of "no key" where the replicas need none."""

    def __init__(self, fleet: Fleet, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._clock = clock
        self._taken: Known[str | None, float] = Known(MAX_KNOWN_KEYS)

    async def refusal(self, request: Request) -> Response | None:
        """A replica's answer to a client whose key it does not take. None for one that it takes, or where none says."""
        tenant, now_s = tenant_of(credential_of(request.headers)), self._clock()
        if now_s - self._taken.get(tenant, -FRESH_S) < FRESH_S:
            return None
        replica = self._fleet.choose(Needs(tenant=tenant))
        if replica is None:
            return None
        try:
            answer = await replica.send("GET", PATH, own_headers(request), b"", self._timeout_s)
            body = await answer.read(MAX_REFUSAL_BYTES)
        except (NotSentError, LostError):
            return None
        if answer.status == 401:
            return response_of(answer.status, answer_headers(answer), body)
        if answer.status < 500 and answer.status != 429:
            self._taken.put(tenant, now_s)
        return None
