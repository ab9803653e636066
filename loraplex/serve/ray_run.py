"""`loraplex serve --ray`: the server's own port and bounds in this process, the engines in a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial

from loraplex import logs
from loraplex.errors import ConfigError, LoraplexError
from loraplex.router.run import Routed
from loraplex.serve.ingress import Fleet, Watch, create_ingress, open_tenants
from loraplex.serve.settings import RayConfig, check_installed
from loraplex.server.auth import KeyRing
from loraplex.server.config import ServerConfig, output_folder
from loraplex.server.http_protocol import bounded_http_protocol
from loraplex.server.listener import bind, max_connections, raise_descriptor_limit
from loraplex.server.run import DrainingServer, loop_factory, signals, tune_interpreter, uvicorn_config
from loraplex.server.tls import tls_context

_log = logging.getLogger("loraplex.server")

OBJECT_STORE_BYTES = 128 * 2**20
"""Of a new cluster: longer bodies and answers are in it while they pass."""


def run_on_ray(config: RayConfig, say: Callable[[LoraplexError], str] = str) -> int:
    """Serve until a signal, then drain and end the engines. `say` puts an error that ends the start into words.

    Returns the exit code. The port is bound before the engines start, and opened after.
    """
    server = config.server
    logs.configure(server.log_level, server.log_format, with_root=True)
    raise_descriptor_limit()
    for warning in server.warnings:
        _log.warning("%s", warning)
    try:
        check_installed()
        max_connections(server)
        tls_context(server)
        output_folder(server)
        with (
            contextlib.closing(bind(server)) as sock,
            _engines(config) as fleet_of,
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            tune_interpreter()
            return runner.run(_serve(fleet_of, server, sock))
    except LoraplexError as error:
        logs.say(f"error: {say(error)}", sys.stderr)
        return 1


@contextlib.contextmanager
def _engines(config: RayConfig) -> Iterator[Callable[[], tuple[Fleet, Watch]]]:
    """The deployment, while the block runs. What is given makes its front, in an event loop. Raises ConfigError."""
    import ray
    from ray import serve

    from loraplex.serve import ray_application

    address, name = config.ray.ray_address, config.ray.ray_application
    _connect(address)
    for lack in config.ray.lacks(ray.cluster_resources()):
        _log.warning("%s", lack)
    try:
        serve.start(proxy_location="Disabled")
        try:
            try:
                handle = serve.run(ray_application.engines(config), name=name, route_prefix=None)
            except RuntimeError as error:
                raise ConfigError(f"the replicas did not start: {ray_application.failure(name)}") from error

            def front() -> tuple[Fleet, Watch]:
                watch = Watch(lambda: ray_application.count_running(name))
                return ray_application.RayFleet(handle, watch, config), watch

            yield front
        finally:
            serve.delete(name)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _connect(address: str | None) -> None:
    import ray

    try:
        if address is not None:
            ray.init(address, log_to_driver=False)
            return
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # of the cluster that begins here
        ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray_address {address or 'local'!r} cannot be used: {error}") from error


async def _serve(front: Callable[[], tuple[Fleet, Watch]], config: ServerConfig, sock: socket.socket) -> int:
    fleet, watch = front()
    tenants = open_tenants(config)
    routed, keys = Routed(config, max_connections(config)), KeyRing.of(config, tenants)
    app = create_ingress(fleet, config, routed.connections, keys)
    protocol = bounded_http_protocol(config, routed.connections, keys.admitted)
    server = DrainingServer(routed, uvicorn_config(app, config, protocol), partial(_announce, sock, watch, config))
    await watch.look()
    watching = asyncio.ensure_future(watch.run())
    try:
        with signals(server.stop):
            await server.serve(sockets=[sock])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if tenants is not None:
            await asyncio.to_thread(tenants.close)
    return server.exit_code


def _announce(sock: socket.socket, watch: Watch, config: ServerConfig) -> None:
    host, port = sock.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    scheme, served = "http" if config.ssl_certfile is None else "https", ", ".join(config.served_model_names)
    count = watch.num_running
    logs.say(f"Loraplex is ready: {scheme}://{address}:{port} serves {served} (replicas on Ray: {count})")
