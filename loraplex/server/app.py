"""The HTTP application over one engine: routes, middleware, errors. `run.py` puts it on a port."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from loraplex import __version__
from loraplex.server.adapter_api import AdapterRoutes
from loraplex.server.api_error import add_error_handlers
from loraplex.server.auth import METRICS_PATH, OPEN_PATHS, ApiKeyMiddleware, KeyRing
from loraplex.server.browser_guard import AllowedHosts, BrowserGuard
from loraplex.server.config import ServerConfig
from loraplex.server.context import ServerContext
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.events_api import EventRoutes
from loraplex.server.health_api import HealthRoutes
from loraplex.server.memory_api import MemoryRoutes
from loraplex.server.openai_api import OpenAIRoutes
from loraplex.server.openapi import DescribedApi
from loraplex.server.pages import PAGE_PATHS, PageRoutes
from loraplex.server.profile_api import ProfileRoutes
from loraplex.server.request_id import HEADER, RequestIdMiddleware
from loraplex.server.telemetry.tracing import TraceMiddleware, Tracing
from loraplex.server.tenants.api import TenantRoutes
from loraplex.server.tenants.usage_api import UsageRoutes
from loraplex.server.tokenize_api import TokenizeRoutes
from loraplex.server.urls import KnownUrls, TrailingSlash
from loraplex.server.wires.anthropic_errors import AnthropicErrors
from loraplex.server.wires.anthropic_messages import MessagesRoutes
from loraplex.server.wires.native import NativeRoutes
from loraplex.server.wires.openai_responses import ResponsesRoutes

ROUTES = (
    OpenAIRoutes,
    ResponsesRoutes,
    MessagesRoutes,
    NativeRoutes,
    TokenizeRoutes,
    AdapterRoutes,
    MemoryRoutes,
    EventRoutes,
    ProfileRoutes,
    TenantRoutes,
    UsageRoutes,
    HealthRoutes,
    PageRoutes,
)


def create_app(engine: EngineSurface, config: ServerConfig | None = None) -> FastAPI:
    """The application. `app.state.context` is its ServerContext. It neither starts nor ends the engine."""
    context = ServerContext.create(engine, config or ServerConfig())
    app = DescribedApi(
        title="Loraplex",
        version=__version__,
        openapi_url=None,  # pages.py has it
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    routers = [routes(context).router() for routes in ROUTES]
    for router in routers:
        app.include_router(router)
    add_error_handlers(app)
    known = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    app.add_exception_handler(HTTPException, KnownUrls(known).answer)
    app.open_paths = _open_paths(context.config) - {"/"} if context.keys.has_keys else None  # POST / needs one
    add_middleware(app, context.config, context.keys, context.tracing)
    return app


def _open_paths(config: ServerConfig) -> frozenset[str]:
    return (OPEN_PATHS | PAGE_PATHS) - ({METRICS_PATH} if config.guard_metrics else set())


def add_middleware(app: Starlette, config: ServerConfig, keys: KeyRing, tracing: Tracing | None = None) -> None:
    """The last one added sees a request first: the form of its errors, its id, its trace, its path, then what browsers
    may do (guard, then CORS), then its key."""
    app.add_middleware(ApiKeyMiddleware, keys=keys, open_paths=_open_paths(config))
    if config.cors_allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    app.add_middleware(BrowserGuard, hosts=AllowedHosts.of(config), allowed_origins=config.cors_allowed_origins)
    app.add_middleware(TrailingSlash)
    if tracing is not None:
        app.add_middleware(TraceMiddleware, tracing=tracing)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(AnthropicErrors)
