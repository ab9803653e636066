"""The command `loraplex route`. What it needs is imported when it runs."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from loraplex.cli_help import Flat, group_fields
from loraplex.commands.settings import in_options_of
from loraplex.router.settings import RouteSettings

group_fields(RouteSettings, "Server")


def route(
    *,
    replica: Annotated[tuple[str, ...], Parameter(negative=())],
    settings: Annotated[RouteSettings | None, Flat] = None,
) -> int:
    """One address in front of several servers of the same base model: each request goes to one, verbs to all.

    Parameters
    ----------
    replica
        Address of a server: http://host:port or host:port; may be given several times. The key of an admin, to read
        their memory and events, is in the variable LORAPLEX_ADMIN_API_KEY or LORAPLEX_API_KEY.
    """
    from loraplex.router.run import run_router

    return run_router(replica, settings or RouteSettings(), in_options_of("route"))
