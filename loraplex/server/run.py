"""The application on a port, from the first byte to the last: bind, start the engine, serve, drain, stop.

The port is bound before the engine starts (a taken one is said at once, not after minutes of loading) and opened after
it is ready. On SIGTERM, SIGINT or SIGHUP no new connection is taken, running requests have `shutdown_grace_s` to
finish, and what is left then is ended with an error that says so. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import uvicorn

from loraplex import logs
from loraplex.errors import LoraplexError
from loraplex.server.config import ServerConfig, output_folder
from loraplex.server.connections import Connections, Slot
from loraplex.server.http_protocol import BoundedHttpProtocol, bounded_http_protocol
from loraplex.server.listener import Listener, bind, max_connections, raise_descriptor_limit
from loraplex.server.telemetry.tracing import check_tracing
from loraplex.server.tls import tls_context

if TYPE_CHECKING:
    from loraplex.processes.engine_child import EngineChild
    from loraplex.server.context import ServerContext
    from loraplex.server.engine_surface import EngineSurface

_log = logging.getLogger("loraplex.server")

SWITCH_INTERVAL_S = 0.001
"""How long a thread that reads a long body or writes a long answer keeps the event loop waiting at a time."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GC_THRESHOLDS = (25_000, 1, 5000)
"""Python's own (700, 10, 10) look at all objects again and again while the log probabilities of a large answer come
together: seconds in which no request is answered. With these a young collection takes some 5 ms, a middle one of at
most 50,000 objects 30 ms, and an old one is rare: thousands of waiting requests have hundreds of thousands of them."""

COLLECT_TICKS, COLLECT_BUSY_TICKS = 300, 3000
"""uvicorn's, 0.1 s each, between two full collections: what a cycle of references keeps, an error and its request,
would else stay. One takes milliseconds while few requests are there, and is rarer while many are."""

FEW_REQUESTS = 64

LAST_WORDS_S = 5.0
"""After the grace, how long the error of an aborted request may take to reach its client."""

FORCED_WORDS_S = 0.5
"""The same after a second signal, and when these are over."""

StartEngine = Callable[[], Awaitable["EngineSurface"]]


class Served(Protocol):
    """An application behind a port: its bounds, and how what it does is ended."""

    @property
    def config(self) -> ServerConfig: ...
    @property
    def connections(self) -> Connections: ...
    @property
    def num_endless(self) -> int: ...
    @property
    def num_in_flight(self) -> int: ...
    def close(self) -> None: ...
    async def end_requests(self) -> None: ...
    async def finish(self) -> None: ...


def run_server(
    start_engine: StartEngine,
    config: ServerConfig,
    say: Callable[[LoraplexError], str] = str,
    child: EngineChild | None = None,
) -> int:
    """Serve until a signal. `say` puts an error that ends the start into words. child: the process that `start_engine`
    will take; its imports take longest, so it is made before the rest of this one's, and ended after all.

    Returns the exit code: 0, 1 when the port or the engine cannot be had or kept, 128 + n on signal n before that.
    """
    logs.configure(config.log_level, config.log_format, with_root=True)
    raise_descriptor_limit()
    for warning in config.warnings:
        _log.warning("%s", warning)
    try:
        if child is not None:
            child.make()
        max_connections(
            config
        )  # this, certificate and folder are made again later: what is wrong is said before the engine starts
        tls_context(config)
        output_folder(config)
        check_tracing(config)
        sock = bind(config)
        with contextlib.closing(sock), asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_start_and_serve(start_engine, config, sock))
    except LoraplexError as error:
        logs.say(f"error: {say(error)}", sys.stderr)
        return 1
    finally:
        if child is not None:
            child.end()


def tune_interpreter() -> None:
    """For an event loop that many wait for: threads and collections of garbage hold it up for a short time only."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # what is there now stays: to look at it in every full collection would hold requests up for 100 ms
    gc.set_threshold(*GC_THRESHOLDS)


async def serve(engine: EngineSurface, config: ServerConfig, sock: socket.socket) -> int:
    """Serve on a bound socket until a signal, then drain; returns the exit code. Prints one line when ready.

    The engine stays the caller's; one that has given up ends the server with 1.
    """
    server = make_server(engine, config, partial(_announce, sock))
    tune_interpreter()
    with signals(server.stop):
        giving_up = asyncio.ensure_future(_stop_when_given_up(engine, server))
        try:
            await server.serve(sockets=[sock])
        finally:
            giving_up.cancel()
            await asyncio.gather(giving_up, return_exceptions=True)
    return server.exit_code


async def _stop_when_given_up(engine: EngineSurface, server: DrainingServer) -> None:
    await engine.wait_until_given_up()
    _log.error("the server ends, since its engine does not start any more")
    server.exit_code = 1
    server.stop()


def make_server(
    engine: EngineSurface, config: ServerConfig, on_ready: Callable[[ServerContext], None]
) -> DrainingServer:
    """A server for an event loop of the caller's: run its `serve(sockets=[...])`, end it with `stop()`."""
    from loraplex.server.app import create_app

    app = create_app(engine, config)
    context: ServerContext = app.state.context
    protocol = bounded_http_protocol(config, context.connections, context.keys.admitted)
    return DrainingServer(context, uvicorn_config(app, config, protocol), partial(on_ready, context))


class DrainingServer(uvicorn.Server):
    """uvicorn's server, whose requests end with an error, not a broken connection, when the grace is over."""

    def __init__(self, context: Served, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._context = context
        self._on_ready = on_ready
        self._abort: asyncio.Task[None] | None = None
        self.exit_code = 0

    def stop(self) -> None:
        """Begin to drain; called again, stop waiting."""
        if self.should_exit:
            self._abort = asyncio.ensure_future(self._end_requests("a second signal came"))
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections; uvicorn's way of doing it counts none and says nothing when descriptors run out."""
        settings, connections = self._context.config, self._context.connections
        tls = tls_context(settings)
        listeners = [
            Listener(sock, connections, self._protocol, tls, settings.header_timeout_s) for sock in sockets or []
        ]
        for listener in listeners:
            listener.start()
        self.servers = cast("list[asyncio.base_events.Server]", listeners)
        self.started = True
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        is_quiet = self._context.num_in_flight <= FEW_REQUESTS
        if counter % (COLLECT_TICKS if is_quiet else COLLECT_BUSY_TICKS) == 0:
            gc.collect()
        return await super().on_tick(counter)

    def _protocol(self, slot: Slot) -> asyncio.Protocol:
        protocol_class = cast("type[BoundedHttpProtocol]", self.config.http_protocol_class)
        protocol = protocol_class(config=self.config, server_state=self.server_state, app_state={})
        protocol.slot = slot
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        num_requests = len(self.server_state.tasks) - self._context.num_endless
        grace_s = self._context.config.shutdown_grace_s
        if num_requests > 0:
            waits = f"waits for {_requests(num_requests)}, at most {grace_s:g} s; Ctrl-C again ends what runs"
            _log.info("the server shuts down: it %s", waits)
        else:
            _log.info("the server shuts down: no request runs")
        self._context.close()
        reaper = asyncio.ensure_future(self._abort_after_grace())
        patience = asyncio.get_running_loop().call_later(grace_s + LAST_WORDS_S, self._stop_waiting)
        try:
            await super().shutdown(sockets)
        finally:
            patience.cancel()
            reaper.cancel()
            await asyncio.gather(reaper, *filter(None, [self._abort]), return_exceptions=True)
            await self._cut_requests()
            await self._context.finish()

    def _stop_waiting(self) -> None:
        self.force_exit = True

    async def _cut_requests(self) -> None:
        """What runs after all that: requests that the engine does not know of, or whose clients do not read."""
        if not (running := set(self.server_state.tasks)):
            return
        _, running = await asyncio.wait(running, timeout=FORCED_WORDS_S)
        for task in running:
            task.cancel()
        if running:
            _log.warning("%s cut: it did not end in time", _requests(len(running)))
            await asyncio.wait(running, timeout=FORCED_WORDS_S)

    async def _abort_after_grace(self) -> None:
        grace_s = self._context.config.shutdown_grace_s
        await asyncio.sleep(grace_s)
        await self._end_requests(f"the {grace_s:g} s of --shutdown-grace-s are over")

    async def _end_requests(self, reason: str) -> None:
        if num_prompts := self._context.num_in_flight:
            _log.warning("%s ended: %s", _requests(num_prompts), reason)
        await self._context.end_requests()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are `serve`'s. uvicorn would raise them again afterwards, before the engine could be stopped."""
        yield


async def _start_and_serve(start_engine: StartEngine, config: ServerConfig, sock: socket.socket) -> int:
    """Signals before the engine is ready end its start, and those before the application is there the engine; one that
    comes while it is created is `serve`'s."""
    starting, importing = asyncio.ensure_future(start_engine()), asyncio.ensure_future(_import_rest(config))
    received: list[signal.Signals] = []
    with signals(
        lambda: starting.cancel() if len(received) == 1 else None, received
    ):  # what it clears up is not called off
        try:
            engine = await starting
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]
        try:
            await importing
            return 128 + received[0] if received else await serve(engine, config, sock)
        finally:
            with signals(lambda: None):  # `serve` has removed its own; the end of the engine is not called off
                await engine.shutdown()


async def _import_rest(config: ServerConfig) -> None:
    """The application, while the engine starts. What plans of merges need is there before requests come, too: torch
    keeps the interpreter for a second."""
    await asyncio.to_thread(importlib.import_module, "loraplex.server.app")
    if output_folder(config) is not None:
        await asyncio.to_thread(importlib.import_module, "loraplex.adapters.merging.export")


@contextlib.contextmanager
def signals(react: Callable[[], object], received: list[signal.Signals] | None = None) -> Generator[None, None, None]:
    """Call `react` on each signal, if this is the main thread; others never get one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def on_signal(which: signal.Signals) -> None:
        if received is not None:
            received.append(which)
        react()

    handled = [each for each in SIGNALS if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    for each in handled:  # `nohup` has SIGHUP ignored
        loop.add_signal_handler(each, on_signal, each)
    try:
        yield
    finally:
        for each in handled:
            loop.remove_signal_handler(each)


def uvicorn_config(
    app: Callable[..., object], config: ServerConfig, protocol: type[BoundedHttpProtocol]
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        http=protocol,
        log_config=None,
        access_log=config.access_log,
        server_header=False,
        proxy_headers=False,  # http_protocol.py reads them
        timeout_keep_alive=math.ceil(config.keep_alive_s),
    )


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _announce(sock: socket.socket, context: ServerContext) -> None:
    host, port = sock.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    registry = context.engine.registry
    _log.info("model: %s", context.engine.model_info.form)
    _log.info("kernels: %s", context.engine.model_info.backend)
    num_adapters = 0 if registry is None else len(registry.names())
    adapters = "LoRA is off" if registry is None else f"{num_adapters} adapter{'' if num_adapters == 1 else 's'}"
    scheme = "http" if context.config.ssl_certfile is None else "https"
    served = ", ".join(context.names.served)
    most, may_wait = context.connections.max_open, context.engine.max_waiting_requests
    _log.info("at most %d connections", most)
    if most <= may_wait:
        text = "requests that wait may take all of them, %d may wait: lower --max-waiting-requests, or raise %s"
        _log.warning(text, may_wait, "--max-connections and the limit of open files")
    devices = context.engine.devices
    runners = f", {len(devices)} runners: {', '.join(devices)}" if len(devices) > 1 else ""
    logs.say(f"Loraplex is ready: {scheme}://{address}:{port} serves {served} ({adapters}{runners})")
