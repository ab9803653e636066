"""The HTTP application in front of the replicas: their keys and bounds, before a body is read; then one of them.

It has an answer of its own for probes and scrapers alone. All else goes to a replica as it came, and comes back as it
is: a stream piece by piece, an error with its status. A client that goes away ends its request in the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from loraplex.errors import LoraplexError
from loraplex.router.app import INFERENCE_PATHS, RouterHealth
from loraplex.router.metrics import RouterMetrics
from loraplex.router.needs import needs_of, tenant_of
from loraplex.routing import Needs
from loraplex.serve.exchange import REPLICA_HEADER, Call, Head
from loraplex.serve.places import Places
from loraplex.server.access import Access, check_access
from loraplex.server.api_error import ApiError, clipped, error_response
from loraplex.server.app import add_middleware
from loraplex.server.auth import ANONYMOUS, KeyRing, caller_of, client_of, credential_of
from loraplex.server.body import SHORT_BODY_BYTES, read_body
from loraplex.server.config import ServerConfig
from loraplex.server.connections import Connections
from loraplex.server.metrics_page import CONTENT_TYPE
from loraplex.server.off_loop import OffLoop
from loraplex.server.request_id import USABLE, new_request_id
from loraplex.server.streaming import until_disconnect
from loraplex.server.wires.native_forms import error_event
from loraplex.tenants.directory import TenantDirectory

_log = logging.getLogger("loraplex.server")

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
EVENTS_PATH = "/v1/events"


class ReplicaLostError(LoraplexError):
    """The replica stopped answering: it may have begun the request."""


class Fleet(Protocol):
    """The replicas, wherever they are."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_places(self) -> int:
        """Requests that they have of this front before one client's further ones wait."""
        ...

    @property
    def max_waiting(self) -> int:
        """Requests that may wait in front of them."""
        ...

    def send(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """A head, and then the body. Raises ReplicaLostError, EngineOverloadedError. Closing it ends the request."""
        ...


class Ingress:
    def __init__(self, fleet: Fleet, config: ServerConfig, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._config = config
        self._base_names = frozenset(config.served_model_names)
        self._metrics = metrics
        self._off_loop = OffLoop()
        self._places = Places(fleet.max_waiting)
        self._name = new_request_id()

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.health, methods=["GET", "POST"]) for path in ("/health", "/ping")),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route(EVENTS_PATH, _refuse_events, methods=["GET"]),
            Route("/{path:path}", self.forward, methods=list(METHODS)),
        ]

    async def health(self, request: Request) -> Response:
        """200 while a replica runs."""
        num_running = self._fleet.num_running
        if not num_running:
            raise _no_replica()
        return Response(msgspec.json.encode(RouterHealth("ok", num_running, num_running)), media_type=_JSON)

    async def metrics(self, request: Request) -> Response:
        """Of the ingress, with a key as for a server's; with the header of a replica, that one's."""
        if REPLICA_HEADER in request.headers:
            return await self.forward(request)
        if caller_of(request).scope.tenant is not None:
            check_access(request, Access.ADMIN)
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def forward(self, request: Request) -> Response:
        body = await read_body(request, self._config.max_body_bytes)
        path, authorization = request.scope["path"], credential_of(request.headers)
        needs = Needs(tenant=tenant_of(authorization))
        if request.method == "POST" and path in INFERENCE_PATHS:
            read, is_short = partial(needs_of, body, authorization, self._base_names), len(body) <= SHORT_BODY_BYTES
            with contextlib.suppress(ApiError):  # of the body: the replica refuses it, in its own words
                needs = read() if is_short else await self._off_loop.run_for(request, read, len(body))
        if not self._fleet.num_running:
            raise _no_replica()
        place = self._places.of(_account(request), self._fleet.num_places)
        return Passed(self._fleet, place, self._metrics, request, _call(self._name, request, body, needs))


class Passed(Response):
    """The answer of a replica to a call, whose body has been read, once it has a place."""

    def __init__(
        self,
        fleet: Fleet,
        place: contextlib.AbstractAsyncContextManager[None],
        metrics: RouterMetrics,
        request: Request,
        call: Call,
    ) -> None:
        super().__init__()
        self._fleet = fleet
        self._place = place
        self._metrics = metrics
        self._request = request
        self._call = call
        self._head: Head | None = None
        self._tail = b"\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(self._request, self._pass_on(send))
        except LoraplexError as error:
            if self._head is None:
                await error_response(_told(error, self._request))(scope, receive, send)
                return
            replica = _header(self._head, REPLICA_HEADER.lower().encode())
            self._metrics.count_lost(replica.decode())
            _log.warning("request %s, replica %s: %s", self._call.request_id, replica.decode(), error.message)
            if not self._head.is_stream or self._tail != b"\n\n":
                raise ClientDisconnect from error  # the connection is cut: the answer is not whole
            await send({"type": "http.response.body", "body": error_event(scope["path"], _told(error, self._request))})

    async def _pass_on(self, send: Send) -> None:
        async with self._place, contextlib.aclosing(self._fleet.send(self._call)) as parts:
            async for part in parts:
                if isinstance(part, Head):
                    self._head = part
                    self._metrics.count_request(_header(part, REPLICA_HEADER.lower().encode()).decode(), part.status)
                    await send({"type": "http.response.start", "status": part.status, "headers": list(part.headers)})
                else:
                    self._tail = (self._tail + part[-2:])[-2:]
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def create_ingress(fleet: Fleet, config: ServerConfig, connections: Connections, keys: KeyRing) -> Starlette:
    """The application. It neither starts nor ends the replicas."""
    ingress = Ingress(fleet, config, RouterMetrics((), connections, lambda: 0))
    app = Starlette(routes=ingress.routes(), exception_handlers={LoraplexError: _answer, HTTPException: _answer_http})
    add_middleware(app, config, keys)
    return app


def open_tenants(config: ServerConfig) -> TenantDirectory | None:
    """Of the database that the replicas share; None without one. Raises JournalError when it cannot be read."""
    if config.database_url is None:
        return None
    from loraplex.adapters.journal.database import Database  # sqlalchemy: a third of a second
    from loraplex.tenants.store import TenantStore

    return TenantDirectory(TenantStore(Database(config.database_url).pooled()))


class Watch:
    """How many replicas run, asked for again and again in a thread until it is cancelled. Before the first look a
    request may try."""

    def __init__(self, count: Callable[[], int], pause_s: float = 1.0) -> None:
        self._count = count
        self._pause_s = pause_s
        self.num_running = 1

    async def look(self) -> None:
        """One that fails says nothing."""
        try:
            self.num_running = await asyncio.to_thread(self._count)
        except Exception as error:
            _log.warning("Ray Serve does not say how many replicas run: %s", error)

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._pause_s)


_JSON = "application/json"


def _account(request: Request) -> str:
    """What its places are counted for. Requests without a key have one account, whatever their addresses, where others
    have keys."""
    return ANONYMOUS.fingerprint if caller_of(request) is ANONYMOUS else client_of(request) or "no address"


def _call(front: str, request: Request, body: bytes, needs: Needs) -> Call:
    scope = request.scope
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    given = request.headers.get(REPLICA_HEADER)
    return Call(
        front=front,
        method=request.method,
        target=target.partition(b"?")[0],
        query=scope["query_string"],
        headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
        client=None if request.client is None else request.client.host,
        body=body,
        request_id=request.state.request_id,
        needs=needs,
        replica=given if given is None or USABLE.fullmatch(given) else clipped(given),
    )


def _header(head: Head, name: bytes) -> bytes:
    return next((value for each, value in head.headers if each == name), b"")


def _no_replica() -> ApiError:
    text = "no replica runs; try again later"
    return ApiError(text, status=503, kind="unavailable_error", code="no_replica")


def _told(error: LoraplexError, request: Request) -> LoraplexError:
    """What its caller may read of it."""
    if not isinstance(error, ReplicaLostError):
        scope = caller_of(request).scope
        if scope.tenant is not None:
            error.args = (scope.cleaned(error),)
        return error
    text = f"the replica of this request is no longer responding ({error.message}); send the request again"
    return ApiError(text, status=502, kind="server_error", code="replica_lost")


async def _refuse_events(request: Request) -> Response:
    text = "events are of one engine, and an ingress has several: follow the logs of the replicas"
    raise ApiError(text, status=404, kind="not_found_error", code="unknown_url")


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{clipped(request.method)} is no method of this server"
    refusal = ApiError(text, status=error.status_code, code="method_not_allowed")
    return error_response(refusal, dict(error.headers or {}))
