"""The router on a port: with the server's own listener, bounds of the protocol, signals and drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from loraplex import logs
from loraplex.errors import LoraplexError
from loraplex.router.app import create_router_app
from loraplex.router.fleet import Fleet
from loraplex.router.keys import Keys
from loraplex.router.settings import RouteSettings
from loraplex.server.config import ServerConfig
from loraplex.server.connections import Connections
from loraplex.server.http_protocol import bounded_http_protocol
from loraplex.server.listener import bind, max_connections, raise_descriptor_limit
from loraplex.server.run import DrainingServer, loop_factory, signals, tune_interpreter, uvicorn_config
from loraplex.server.telemetry.tracing import Tracing, check_tracing
from loraplex.server.tls import tls_context
from loraplex.views.remote import key_of_environment

_log = logging.getLogger("loraplex.router")


class Routed:
    """What the server's drain ends: nothing by itself; requests that are over their grace are cut."""

    num_endless = 0
    num_in_flight = 0

    def __init__(self, config: ServerConfig, max_open: int) -> None:
        self.config = config
        self.connections = Connections(config, max_open)

    def close(self) -> None:
        """Nothing runs beside the requests."""

    async def end_requests(self) -> None:
        """The server cuts them."""

    async def finish(self) -> None:
        """Nothing is left."""


def run_router(replicas: Sequence[str], settings: RouteSettings, say: Callable[[LoraplexError], str] = str) -> int:
    """Route until a signal. `say` puts an error that ends the start into words. Returns the exit code."""
    logs.configure(settings.log_level, settings.log_format, with_root=True)
    raise_descriptor_limit()
    try:
        config = settings.server_config
        max_clients(config)
        tls_context(config)
        check_tracing(config)
        with contextlib.closing(bind(config)) as sock, asyncio.Runner(loop_factory=loop_factory()) as runner:
            tune_interpreter()
            runner.run(route(Fleet(replicas, settings, key_of_environment()), settings, config, sock))
    except LoraplexError as error:
        logs.say(f"error: {say(error)}", sys.stderr)
        return 1
    return 0


def max_clients(config: ServerConfig) -> int:
    """Connections of clients: each may need another one, to a replica. Raises ConfigError as `max_connections` does."""
    if config.max_connections is None:
        return max(1, max_connections(config) // 2)
    return max_connections(replace(config, max_connections=2 * config.max_connections)) // 2


async def route(
    fleet: Fleet,
    settings: RouteSettings,
    config: ServerConfig,
    sock: socket.socket,
    on_ready: Callable[[DrainingServer], None] = lambda server: None,
) -> None:
    """Serve on a bound socket until a signal, then drain. `on_ready` gets the server, whose `stop` ends it."""
    routed = Routed(config, max_clients(config))
    tracing = Tracing.of(config)
    keys = Keys(fleet, settings.connect_timeout_s)
    app = create_router_app(fleet, settings, config, routed.connections, keys, tracing)
    protocol = bounded_http_protocol(config, routed.connections, keys.caller)
    server = DrainingServer(routed, uvicorn_config(app, config, protocol), partial(_announce, sock, fleet, config))
    try:
        await fleet.start()
        on_ready(server)
        with signals(server.stop):
            await server.serve(sockets=[sock])
    finally:
        await fleet.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _announce(sock: socket.socket, fleet: Fleet, config: ServerConfig) -> None:
    host, port = sock.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    scheme = "http" if config.ssl_certfile is None else "https"
    num_open, num_all = fleet.num_open, len(fleet.replicas)
    _log.info("process %d, replicas: %s", os.getpid(), ", ".join(each.name for each in fleet.replicas))
    logs.say(f"Loraplex routes: {scheme}://{address}:{port} to {num_open} of {num_all} replicas")
