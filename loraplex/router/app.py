"""The router's HTTP application: inference to one replica, verbs to all, lists of all, its own health and metrics."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex import __version__
from loraplex.errors import LoraplexError
from loraplex.router.exchange import REPLICAS_HEADER
from loraplex.router.fleet import Fleet
from loraplex.router.keys import Keys
from loraplex.router.lists import Lists
from loraplex.router.metrics import RouterMetrics
from loraplex.router.needs import needs_of, tenant_of
from loraplex.router.relay import GENERATION_PATHS, Relayed
from loraplex.router.settings import RouteSettings
from loraplex.router.verbs import AdapterVerbs
from loraplex.routing import Needs
from loraplex.server.api_error import ApiError, clipped, error_response
from loraplex.server.auth import credential_of
from loraplex.server.body import SHORT_BODY_BYTES, read_body
from loraplex.server.browser_guard import AllowedHosts, BrowserGuard
from loraplex.server.config import ServerConfig
from loraplex.server.connections import Connections
from loraplex.server.metrics_page import CONTENT_TYPE
from loraplex.server.off_loop import OffLoop
from loraplex.server.request_id import HEADER, RequestIdMiddleware
from loraplex.server.telemetry.tracing import TraceMiddleware, Tracing
from loraplex.server.urls import TrailingSlash
from loraplex.server.wires.anthropic_errors import AnthropicErrors

INFERENCE_PATHS = (*GENERATION_PATHS, "/v1/messages/count_tokens", "/tokenize", "/detokenize")

INFO_PATHS = ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/info")
"""What SGLang's and LoRAX's clients ask of a base model and its server: any replica answers."""


class RouterHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    """restoring: adapters that replicas are to have again. differing: names that do not mean the same at all replicas
    that take requests."""

    status: str
    replicas: int
    available: int
    restoring: int = 0
    differing: int = 0


class Inference:
    """Requests that one replica answers."""

    def __init__(
        self, fleet: Fleet, metrics: RouterMetrics, settings: RouteSettings, off_loop: OffLoop, keys: Keys
    ) -> None:
        self._fleet = fleet
        self._keys = keys
        self._metrics = metrics
        self._settings = settings
        self._off_loop = off_loop

    async def generate(self, request: Request) -> Response:
        refusal = await self._keys.refusal(request)
        if refusal is not None:
            return refusal
        body = await read_body(request, self._settings.max_body_bytes)
        read = partial(needs_of, body, credential_of(request.headers), self._fleet.base_names)
        client = self._keys.client_of(request)
        needs = read() if len(body) <= SHORT_BODY_BYTES else await self._off_loop.run(client, read, len(body))
        return Relayed(self._fleet, self._keys, self._metrics, request, body, needs, self._settings.max_attempts)

    async def show_model(self, request: Request) -> Response:
        needs = Needs(request.path_params.get("model"), tenant=tenant_of(credential_of(request.headers)))
        if needs.adapter is not None and (refusal := await self._keys.refusal(request)) is not None:
            return refusal
        return Relayed(self._fleet, self._keys, self._metrics, request, b"", needs, self._settings.max_attempts)


class Own:
    """What the router says of itself."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, keys: Keys | None) -> None:
        """keys: that the metrics need."""
        self._fleet = fleet
        self._metrics = metrics
        self._keys = keys

    async def health(self, request: Request) -> Response:
        """200 while a replica takes requests."""
        num_open, num_all = self._fleet.num_open, len(self._fleet.replicas)
        if not num_open:
            text = f"none of {num_all} replicas takes requests"
            raise ApiError(text, status=503, kind="unavailable_error", code="no_replica")
        status = "ok" if num_open == num_all else "degraded"
        health = RouterHealth(status, num_all, num_open, self._fleet.num_restoring, self._fleet.num_differing)
        return Response(msgspec.json.encode(health), media_type="application/json")

    async def version(self, request: Request) -> Response:
        return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        if self._keys is not None:
            if (refusal := await self._keys.refusal(request, is_fresh=True)) is not None:
                return refusal
            self._keys.check_sees_all(request)
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)


def create_router_app(
    fleet: Fleet,
    settings: RouteSettings,
    config: ServerConfig,
    connections: Connections,
    keys: Keys,
    tracing: Tracing | None = None,
) -> Starlette:
    """The application. It neither starts nor ends the fleet."""
    metrics, off_loop = RouterMetrics(fleet.replicas, connections, lambda: fleet.num_differing), OffLoop()
    inference = Inference(fleet, metrics, settings, off_loop, keys)
    own = Own(fleet, metrics, keys if settings.guard_metrics else None)
    lists, verbs = Lists(fleet, keys, off_loop), AdapterVerbs(fleet, keys, settings.max_upload_bytes)
    routes = [
        *(Route(path, inference.generate, methods=["POST"]) for path in INFERENCE_PATHS),
        Route("/v1/models", lists.models, methods=["GET"]),
        Route("/v1/models/{model:path}", inference.show_model, methods=["GET"]),
        *(Route(path, inference.show_model, methods=["GET"]) for path in INFO_PATHS),
        Route("/v1/adapters", lists.adapters, methods=["GET"]),
        Route("/v1/adapters/{model:path}", inference.show_model, methods=["GET"]),
        *verbs.routes(),
        *(Route(path, own.health, methods=["GET", "POST"]) for path in ("/health", "/ping")),
        Route("/health_generate", own.health, methods=["GET", "HEAD"]),
        Route("/version", own.version, methods=["GET"]),
        Route("/metrics", own.metrics, methods=["GET"]),
    ]
    origins = config.cors_allowed_origins
    guard = Middleware(BrowserGuard, hosts=AllowedHosts.of(config), allowed_origins=origins)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[HEADER, REPLICAS_HEADER],
    )
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(AnthropicErrors),
            Middleware(RequestIdMiddleware),
            *([] if tracing is None else [Middleware(TraceMiddleware, tracing=tracing)]),
            Middleware(TrailingSlash),
            guard,
            *([cors] if origins else []),
        ],
        exception_handlers={LoraplexError: _answer, HTTPException: _answer_http},
    )


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {clipped(request.url.path)}"
    if error.status_code == 405:
        refusal = ApiError(f"{what}: this path has other methods", status=405, code="method_not_allowed")
        return error_response(refusal, dict(error.headers or {}))
    text = f"{what} is no route of the router: ask a replica, whose address `loraplex route` was started with"
    return error_response(ApiError(text, status=404, kind="not_found_error", code="unknown_url"))
