"""What a web page may do to this server through the browser of a person who visits it: nothing, unless it was named.

A page can reach a server that no stranger can, on loopback or inside a network. Three ways lead there, and each is
closed: a name of the page's own that is made to resolve to this machine (DNS rebinding: the `Host` is none of ours),
a request to another origin (`Origin` and `Sec-Fetch-Site`, which a browser writes and a page cannot), and a form (its
body is never JSON; one of files, an upload, needs a header that no form sends).
Programs send neither `Origin` nor `Sec-Fetch-*`: for them only the `Host` counts.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.server.api_error import ApiError, clipped, error_response
from loraplex.server.auth import KEY_HEADER
from loraplex.server.config import ServerConfig

BROWSER_HEADERS = (
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"),
)
"""On every answer that does not say otherwise: its type is true, no cache keeps it, and no frame shows it."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL_ENDINGS = (".local", ".localdomain", ".internal", ".lan", ".home.arpa", ".test", ".svc")
"""Of names that no public DNS has: no stranger's page can have one of them."""
MAX_SHOWN_CHARS = 40
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d{0,5})?", re.ASCII)
_DEFAULT_PORTS = {"http": "80", "https": "443"}

_FORMS = {
    "application/x-www-form-urlencoded": "curl and others send forms unless told otherwise: "
    "curl -H 'Content-Type: application/json' -d '{...}'",
    "multipart/form-data": "send the fields as one JSON object: curl -H 'Content-Type: application/json' -d '{...}'",
}

JSON_TYPE, RAW_TYPE = "application/json", "application/octet-stream"
"""The latter is of a body that is a file; only `PUT .../tensors` takes one."""

_NOT_OF_A_PAGE = ("authorization", KEY_HEADER, "x-requested-with")
"""A page of another site can send a form of files, but none of these headers with it."""


class AllowedHosts:
    """Names of a server, whatever the port. `names` may have `*.example.com`, or `*` for any."""

    def __init__(self, names: Collection[str], *, has_local: bool = False) -> None:
        lowered = {name.lower().strip("[]").removesuffix(".") for name in names}
        self._is_any = "*" in lowered
        self._names = frozenset(name for name in lowered if not name.startswith("*"))
        self._endings = tuple(name[1:] for name in lowered if name.startswith("*."))
        self._has_local = has_local

    @classmethod
    def of(cls, config: ServerConfig) -> AllowedHosts:
        """On loopback its names. Beyond it any with keys, and without them what no stranger's page can be called."""
        if not config.is_loopback and config.has_keys and not config.allowed_hosts:
            return cls(("*",))
        return cls((config.host, *config.allowed_hosts), has_local=not config.is_loopback)

    def accept(self, host: str) -> bool:
        """Whether the value of a `Host` header is one of the names."""
        if self._is_any:
            return True
        name = _host_name(host)
        return bool(name) and (name in self._names or name.endswith(self._endings) or self._is_known(name))

    def _is_known(self, name: str) -> bool:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            if name == "localhost" or name.endswith(".localhost"):
                return True
            return self._has_local and ("." not in name or name.endswith(LOCAL_ENDINGS))
        return self._has_local or address.is_loopback


class BrowserGuard:
    """Answers 403 to a Host or a page that is not allowed, and 415 to a body that is neither JSON nor files."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, allowed_origins: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._allowed_origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["method"], scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        hosts = headers.getlist("host")
        for host in hosts:
            if not self._hosts.accept(host):
                raise _wrong_host(host)
        if not self._is_own_page(headers, hosts[0] if hosts else "") and not _is_link(method, headers):
            raise _foreign_page(headers)
        is_form = (method, path) == ("POST", "/v1/adapters") and media_type_of(headers) == "multipart/form-data"
        if is_form and not any(name in headers for name in _NOT_OF_A_PAGE):
            raise _maybe_a_page()
        if method not in SAFE_METHODS and _has_body(headers) and not is_form and not _is_raw(method, path, headers):
            check_media_type(headers)

    def _is_own_page(self, headers: Headers, host: str) -> bool:
        """Whether a request is no page's, or that of a page of this server or of an allowed origin."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._allowed_origins or origin in self._allowed_origins:
            return True
        if origin == "null":
            return False
        if site is not None:
            return site in ("same-origin", "none")
        return origin is None or _is_same_host(origin, host)


def _is_link(method: str, headers: Headers) -> bool:
    """A link that a person follows: the page that shows it never sees the answer."""
    mode, target = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return method in ("GET", "HEAD") and mode == "navigate" and target == "document" and "origin" not in headers


def _is_raw(method: str, path: str, headers: Headers) -> bool:
    """A file of tensors: no page sends a PUT before it has asked, nor this type."""
    return method == "PUT" and path.endswith("/tensors") and media_type_of(headers) in ("", RAW_TYPE)


def _maybe_a_page() -> ApiError:
    return ApiError(
        "files are taken with a key, or with the header X-Requested-With (any value), which no page of another site "
        "can send with a form: curl -H 'X-Requested-With: curl' -F ...",
        status=415,
        code="unsupported_media_type",
    )


def _has_body(headers: Headers) -> bool:
    """Whether a body is there or its type was named: a form without fields names one too."""
    return "content-type" in headers or "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _is_same_host(origin: str, host: str) -> bool:
    """Whether an origin is what the `Host` names. The scheme may differ: a proxy may speak TLS for this server."""
    scheme, _, place = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    return port is not None and _with_port(place, port) == _with_port(host.lower(), port)


def _with_port(place: str, default: str) -> tuple[str, str]:
    name, colon, port = place.rpartition(":")
    return (name, port) if colon and port.isdigit() else (place.removesuffix(":"), default)


def _host_name(host: str) -> str:
    """The name in `name:port` or `[address]:port`, in lower case; empty when it is neither."""
    match = _HOST.fullmatch(host.lower())
    return (match[1] or match[2]).removesuffix(".") if match else ""


def _wrong_host(host: str) -> ApiError:
    shown = host[:MAX_SHOWN_CHARS]
    return ApiError(
        f"Host {shown!r} is not a name of this server; if it should be, start the server with --allowed-host NAME",
        status=403,
        kind="permission_error",
        code="host_not_allowed",
    )


def _foreign_page(headers: Headers) -> ApiError:
    origin = headers.get("origin")
    page = "a page of another site" if origin is None else f"a page of {origin[:MAX_SHOWN_CHARS]!r}"
    return ApiError(
        f"{page} may not call this server; to allow it, start the server with --cors-allowed-origins ORIGIN",
        status=403,
        kind="permission_error",
        code="origin_not_allowed",
    )


def check_media_type(headers: Headers) -> None:
    """Other types are refused: web pages may post those to a server on this machine. So are packed bodies."""
    check_encoding(headers)
    media_type = media_type_of(headers)
    if media_type != JSON_TYPE:
        hint = f"; {_FORMS[media_type]}" if media_type in _FORMS else ""
        raise ApiError(
            f"Content-Type must be application/json, got {clipped(media_type or 'none')!r}{hint}",
            status=415,
            code="unsupported_media_type",
        )


def check_encoding(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            f"Content-Encoding {clipped(encoding)!r} is not supported: send the body as it is",
            status=415,
            code="unsupported_media_type",
        )


def media_type_of(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()
