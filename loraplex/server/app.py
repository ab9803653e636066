"""The HTTP application over one engine: routes, middleware, errors. `run.py` puts it on a port."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from loraplex import __version__
from loraplex.server.adapter_api import AdapterRoutes
from loraplex.server.api_error import add_error_handlers
from loraplex.server.auth import METRICS_PATH, OPEN_PATHS, ApiKeyMiddleware, KeyRing
from loraplex.server.config import ServerConfig
from loraplex.server.context import ServerContext
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.events_api import EventRoutes
from loraplex.server.health_api import HealthRoutes
from loraplex.server.memory_api import MemoryRoutes
from loraplex.server.openai_api import OpenAIRoutes
from loraplex.server.profile_api import ProfileRoutes
from loraplex.server.request_id import HEADER, RequestIdMiddleware
from loraplex.server.tokenize_api import TokenizeRoutes


def create_app(engine: EngineSurface, config: ServerConfig | None = None) -> FastAPI:
    """The application. `app.state.context` is its ServerContext. It neither starts nor ends the engine."""
    context = ServerContext.create(engine, config or ServerConfig())
    app = FastAPI(title="Loraplex", version=__version__)
    app.state.context = context
    for routes in (OpenAIRoutes, TokenizeRoutes, AdapterRoutes, MemoryRoutes, EventRoutes, ProfileRoutes, HealthRoutes):
        app.include_router(routes(context).router())
    add_error_handlers(app)
    _add_middleware(app, context.config)
    return app


def _add_middleware(app: FastAPI, config: ServerConfig) -> None:
    """The last one added sees a request first: its id, then what browsers may do, then its key."""
    open_paths = OPEN_PATHS - {METRICS_PATH} if config.guard_metrics else OPEN_PATHS
    app.add_middleware(ApiKeyMiddleware, keys=KeyRing.of(config), open_paths=open_paths)
    if config.cors_allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    app.add_middleware(RequestIdMiddleware)
