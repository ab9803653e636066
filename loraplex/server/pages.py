"""Pages for a browser: `/` says what is where, `/docs` is Swagger UI, `/dashboard` shows what happens.

They load nothing from other sites. The dashboard is files alone: all that it shows comes from documented routes, asked
by the browser with the key that its reader entered.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from loraplex import __version__
from loraplex.server.access import Access, GuardedRoute, requires
from loraplex.server.context import ServerContext
from loraplex.server.responses import encode

STATIC = Path(__file__).with_name("static")
LINKS = {
    "dashboard": "/dashboard",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "adapters": "/v1/adapters",
    "memory": "/v1/memory",
    "health": "/health",
    "metrics": "/metrics",
    "version": "/version",
}
ABOUT = {
    "dashboard": "what happens here, as it happens",
    "docs": "every route, to read and to try",
    "openapi": "the same for programs",
    "models": "the base model and its adapters",
    "adapters": "where each adapter is",
    "memory": "tiers and pressure",
    "health": "whether requests can be served",
    "metrics": "for Prometheus",
    "version": "of Loraplex and its kernels",
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem; }
dt { float: left; clear: left; width: 9rem; } dd { margin: 0 0 .3rem 9rem; opacity: .75; }
"""


def _policy(style: str, script: str = "'none'") -> str:
    """A page's Content-Security-Policy: from this server alone, and in no frame."""
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


INDEX_POLICY = _policy(f"'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'")
DOCS_POLICY = _policy("'self'", "'self'")
DASHBOARD_POLICY = f"{DOCS_POLICY}; require-trusted-types-for 'script'; trusted-types 'none'"
"""No text of an adapter or an event becomes markup or code, whatever a script does: names and texts are hostile."""


NO_CACHE = {"Cache-Control": "no-cache"}
"""Asked for again each time, and answered with 304: modules of two versions never run together."""


class Index(msgspec.Struct, frozen=True):
    """What `/` says to a program. `models`: names of the base model; null where a key is needed to see them."""

    name: str
    version: str
    models: list[str] | None
    links: dict[str, str]


@dataclass(frozen=True)
class Page:
    """What is the same for all clients: read or made once, packed once and unpacked once; every answer has these bytes.

    `load`: the content, packed if `is_packed`.
    """

    load: Callable[[], bytes]
    media_type: str
    is_packed: bool = False
    headers: Mapping[str, str] = field(default_factory=lambda: NO_CACHE)

    @cached_property
    def _packed(self) -> bytes:
        return self.load() if self.is_packed else gzip.compress(self._plain, mtime=0)

    @cached_property
    def _plain(self) -> bytes:
        return gzip.decompress(self._packed) if self.is_packed else self.load()

    @cached_property
    def _etag(self) -> str:
        return f'W/"{hashlib.sha256(self._packed).hexdigest()[:32]}"'

    def respond(self, request: Request) -> Response:
        headers = {**self.headers, "ETag": self._etag, "Vary": "Accept-Encoding"}
        if self._etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if not _takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(self._plain, headers=headers, media_type=self.media_type)
        return Response(self._packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=self.media_type)


def _takes_gzip(accepted: str) -> bool:
    return any(re.fullmatch(r"\s*gzip\s*(;\s*q=(?!0(\.0*)?\s*$).*)?", each.lower()) for each in accepted.split(","))


def _asset(path: Path, media_type: str) -> Page:
    """A file of the docs page. It changes with the version of Loraplex alone."""
    headers = {"Cache-Control": "public, max-age=3600"}
    return Page(path.read_bytes, media_type, path.suffix == ".gz", headers)


ASSETS = {
    "/docs/swagger-ui.js": _asset(STATIC / "swagger-ui" / "swagger-ui.js.gz", "text/javascript"),
    "/docs/swagger-ui.css": _asset(STATIC / "swagger-ui" / "swagger-ui.css.gz", "text/css"),
    "/docs/docs.js": _asset(STATIC / "docs.js", "text/javascript"),
}
DASHBOARD_ASSETS = {
    "/dashboard/uplot.js": Page((STATIC / "uplot" / "uplot.js.gz").read_bytes, "text/javascript", True),
    "/dashboard/uplot.css": Page((STATIC / "uplot" / "uplot.css.gz").read_bytes, "text/css", True),
    "/dashboard/dashboard.css": Page((STATIC / "dashboard" / "dashboard.css").read_bytes, "text/css"),
    **{
        f"/dashboard/{path.name}": Page(path.read_bytes, "text/javascript")
        for path in sorted((STATIC / "dashboard").glob("*.js"))
    },
}
DASHBOARD = Page(
    (STATIC / "dashboard" / "dashboard.html").read_bytes,
    "text/html",
    headers={**NO_CACHE, "Content-Security-Policy": DASHBOARD_POLICY},
)
DOCS = Page(
    (STATIC / "docs.html").read_bytes,
    "text/html",
    headers={"Cache-Control": "no-cache", "Content-Security-Policy": DOCS_POLICY},
)
PAGE_PATHS = frozenset({"/", "/docs", "/dashboard", "/openapi.json", *ASSETS, *DASHBOARD_ASSETS})
"""They are the same on every server of a version, so they need no key; `/` names models only where none is needed."""


class PageRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._schema: asyncio.Task[Page] | None = None

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False, route_class=GuardedRoute)
        router.add_api_route("/", self.index, methods=["GET", "HEAD"])
        router.add_api_route("/docs", self.docs, methods=["GET", "HEAD"])
        router.add_api_route("/openapi.json", self.schema, methods=["GET", "HEAD"])
        router.add_api_route("/dashboard", self.dashboard, methods=["GET", "HEAD"])
        for path in (*ASSETS, *DASHBOARD_ASSETS):
            router.add_api_route(path, self.asset, methods=["GET", "HEAD"])
        return router

    @requires(Access.OPEN)
    async def index(self, request: Request) -> Response:
        """Links: a page for a browser, JSON for everything else."""
        models = None if self._context.keys.has_keys else list(self._context.names.served)
        if "text/html" not in request.headers.get("accept", ""):
            reply = Index("loraplex", __version__, models, LINKS)
            return Response(encode(reply), headers={"Vary": "Accept"}, media_type="application/json")
        headers = {"Vary": "Accept", "Content-Security-Policy": INDEX_POLICY}
        return Response(_index_page(models), headers=headers, media_type="text/html")

    @requires(Access.OPEN)
    async def docs(self, request: Request) -> Response:
        return DOCS.respond(request)

    @requires(Access.OPEN)
    async def dashboard(self, request: Request) -> Response:
        return DASHBOARD.respond(request)

    @requires(Access.OPEN)
    async def schema(self, request: Request) -> Response:
        """Made once, in a thread: that takes a tenth of a second."""
        if self._schema is None:
            self._schema = asyncio.ensure_future(asyncio.to_thread(_schema_page, request.app))
        return (await asyncio.shield(self._schema)).respond(request)

    @requires(Access.OPEN)
    async def asset(self, request: Request) -> Response:
        path = request.scope["path"]
        return (ASSETS.get(path) or DASHBOARD_ASSETS[path]).respond(request)


def _schema_page(app: FastAPI) -> Page:
    schema = msgspec.json.encode(app.openapi())
    return Page(lambda: schema, "application/json")


def _index_page(models: list[str] | None) -> str:
    served = "" if models is None else f"<p>It serves <b>{escape(', '.join(models))}</b>.</p>"
    links = "".join(f'<dt><a href="{path}">{path}</a></dt><dd>{ABOUT[name]}</dd>' for name, path in LINKS.items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Loraplex</title><style>{STYLE}</style></head><body>"
        f"<h1>Loraplex {__version__}</h1>{served}<dl>{links}</dl></body></html>\n"
    )
