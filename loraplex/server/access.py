"""Which key a route needs, declared at the route: `@requires(Access.VERB)`. Without it a route needs an admin key."""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_plus

from fastapi import Request, Response
from fastapi.routing import APIRoute

from loraplex.server.api_error import MAX_SHOWN_CHARS, ApiError, unknown_parameter
from loraplex.server.auth import caller_of

if TYPE_CHECKING:
    from loraplex.server.context import ServerContext

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Access(enum.StrEnum):
    """`open`: no key; `key`: any key; `admin`: an admin key, where the server has one; `verb`: the same, for what
    changes the server, with an audit event; `loading`: a verb that changes which adapters there are, off with
    `--disable-dynamic-loading`."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"
    VERB = "verb"
    LOADING = "loading"

    @property
    def is_verb(self) -> bool:
        return self in (Access.VERB, Access.LOADING)

    @property
    def needs_admin(self) -> bool:
        return self not in (Access.OPEN, Access.KEY)


def requires(access: Access) -> Callable[[Endpoint], Endpoint]:
    """Declares the access of a route at its function."""

    def declare(endpoint: Endpoint) -> Endpoint:
        vars(endpoint)["access"] = access
        return endpoint

    return declare


def declared_access(endpoint: Callable[..., Any]) -> Access | None:
    """What a route's function declares; None when that was forgotten."""
    access: Access | None = getattr(endpoint, "access", None)
    return access


class GuardedRoute(APIRoute):
    """Answers 403 to a key that may not use the route, before the request is read, and records every verb."""

    def get_route_handler(self) -> Handler:
        handle = self.unguarded_handler()
        access = declared_access(self.endpoint) or Access.ADMIN
        if not access.needs_admin:
            return handle

        async def checked(request: Request) -> Response:
            _check(request, access)
            return await handle(request)

        async def recorded(request: Request) -> Response:
            with request.app.state.context.audit.recording(request, self.path) as record:
                response = await checked(request)
                record.status = response.status_code
                return response

        return recorded if access.is_verb else checked

    def unguarded_handler(self) -> Handler:
        """What runs once the caller may use the route."""
        return super().get_route_handler()


def _check(request: Request, access: Access) -> None:
    """Raises ApiError 403."""
    context: ServerContext = request.app.state.context
    route = f"{request.method} {request.url.path[:MAX_SHOWN_CHARS]}"
    if not caller_of(request).is_admin:
        raise _forbidden(
            f"{route} needs an admin key of this server (--admin-api-key), and the key that was sent is for inference",
            "admin_key_required",
        )
    if access is Access.LOADING and context.config.disable_dynamic_loading:
        raise _forbidden(
            f"{route}: no key may load, replace or unload an adapter here (--disable-dynamic-loading)",
            "dynamic_loading_disabled",
        )


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(message, status=403, kind="permission_error", code=code)


class StrictRoute(GuardedRoute):
    """Refuses a query where none is taken. Where one is, its model refuses what it does not know (`extra="forbid"`)."""

    def unguarded_handler(self) -> Handler:
        handle = super().unguarded_handler()
        if self.dependant.query_params:
            return handle

        async def handle_without_query(request: Request) -> Response:
            if query := request.scope["query_string"]:
                raise unknown_parameter(_first_name(query))
            return await handle(request)

        return handle_without_query


def _first_name(query: bytes) -> str:
    return unquote_plus(query.partition(b"&")[0].partition(b"=")[0].decode("latin-1"))
