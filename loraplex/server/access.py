"""Which key a route needs, declared at the route: `@requires(Access.VERB)`. Without it a route needs an admin key."""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_plus

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message

from loraplex.errors import LoraplexError
from loraplex.server.api_error import MAX_SHOWN_CHARS, ApiError, unknown_parameter
from loraplex.server.auth import Caller, caller_of, unknown_key
from loraplex.tenants.records import Role

if TYPE_CHECKING:
    from loraplex.server.context import ServerContext

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Access(enum.StrEnum):
    """`open`: no key; `read`: any key; `key`: any but a read-only one; `admin`: an admin key, where the server has one;
    `verb`: the same, for what changes the server, with an audit event; `loading`: a verb that changes which adapters
    there are, off with `--disable-dynamic-loading`; `own_verb`, `own_loading`: the same, which a tenant may do to its
    own adapters; `manage`, `manage_verb`: tenants and keys, for the role admin."""

    OPEN = "open"
    READ = "read"
    KEY = "key"
    ADMIN = "admin"
    VERB = "verb"
    LOADING = "loading"
    OWN_VERB = "own_verb"
    OWN_LOADING = "own_loading"
    MANAGE = "manage"
    MANAGE_VERB = "manage_verb"

    @property
    def is_verb(self) -> bool:
        return self.value.endswith(("verb", "loading"))


_OF_OPERATORS = frozenset(set(Access) - {Access.MANAGE, Access.MANAGE_VERB})
_OF_ROLES = {
    Role.ADMIN: frozenset(Access),
    Role.OPERATOR: _OF_OPERATORS,
    Role.TENANT: frozenset({Access.OPEN, Access.READ, Access.KEY, Access.OWN_VERB, Access.OWN_LOADING}),
    Role.READ_ONLY: frozenset({Access.OPEN, Access.READ}),
    Role.INFERENCE: frozenset({Access.OPEN, Access.READ, Access.KEY}),
}


def may_use(caller: Caller, access: Access) -> bool:
    """A read-only key of the server itself also reads what is inside."""
    is_watching = access is Access.ADMIN and caller.role is Role.READ_ONLY and caller.scope.tenant is None
    return access in _OF_ROLES[caller.role] or is_watching


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
    """Answers 403 to a key that may not use the route, before the request is read, and records every verb. A verb's key
    is looked up again when the body has come: it may have been revoked meanwhile."""

    def get_route_handler(self) -> Handler:
        handle = self.unguarded_handler()
        access = declared_access(self.endpoint) or Access.ADMIN
        if access is Access.OPEN:
            return handle

        async def checked(request: Request) -> Response:
            check_access(request, access)
            try:
                return await handle(request)
            except LoraplexError as error:
                clean_error(error, request)
                raise

        async def recorded(request: Request) -> Response:
            with request.app.state.context.audit.recording(request, self.path) as record:
                response = await checked(_checked_again(request, access))
                record.status = response.status_code
                return response

        return recorded if access.is_verb else checked

    def unguarded_handler(self) -> Handler:
        """What runs once the caller may use the route."""
        return super().get_route_handler()


def check_access(request: Request, access: Access) -> None:
    """Raises ApiError 403."""
    route = f"{request.method} {request.url.path[:MAX_SHOWN_CHARS]}"
    caller = caller_of(request)
    if not may_use(caller, access):
        if caller.role is Role.INFERENCE:
            raise _forbidden(
                f"{route} needs an admin key of this server (--admin-api-key), and the key that was sent is for "
                "inference",
                "admin_key_required",
            )
        raise _forbidden(f"{route} is not for keys of role {caller.role.value}", "role_required")
    if access not in (Access.LOADING, Access.OWN_LOADING):
        return
    context: ServerContext = request.app.state.context
    if context.config.disable_dynamic_loading:
        raise _forbidden(
            f"{route}: no key may load, replace or unload an adapter here (--disable-dynamic-loading)",
            "dynamic_loading_disabled",
        )


def _checked_again(request: Request, access: Access) -> Request:
    """The same request, whose caller is looked up again when the last of its body is read. That raises ApiError: 401
    for a key that opens nothing any longer, whose caller stays for the audit record, and what `check_access` raises."""

    async def receive() -> Message:
        message = await request.receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            caller = request.app.state.context.keys.admitted(request.headers)
            if caller is None:
                raise unknown_key()
            request.state.caller = caller
            check_access(request, access)
        return message

    return Request(request.scope, receive)


def clean_error(error: LoraplexError, request: Request) -> None:
    """Leave in an error what its caller may see: for a tenant its own names, and nothing of how full the server is."""
    scope = caller_of(request).scope
    if scope.tenant is not None:
        context: ServerContext = request.app.state.context
        error.args = (scope.cleaned(error, context.names.hidden_from(request)),)


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
