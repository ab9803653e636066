"""Routes whose queries are like their bodies: a parameter is honoured or answered with 400 by its name."""

from __future__ import annotations

from urllib.parse import unquote_plus

from fastapi import Request, Response

from loraplex.server.access import GuardedRoute, Handler
from loraplex.server.api_error import unknown_parameter


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
