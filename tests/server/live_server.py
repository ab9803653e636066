"""The server on a loopback port in a thread, for real clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import TracebackType

from loraplex.server import ServerConfig, bind
from loraplex.server.connections import Connections
from loraplex.server.context import ServerContext
from loraplex.server.run import DrainingServer, make_server
from loraplex.testing import FakeAsyncEngine


class LiveServer:
    """`loop_factory`: of another event loop than asyncio's own."""

    def __init__(
        self,
        engine: FakeAsyncEngine,
        config: ServerConfig | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self.engine = engine
        self._loop_factory = loop_factory
        self._config = config or ServerConfig(port=0, access_log=False, log_level="warning", shutdown_grace_s=0.0)
        self._sock = bind(self._config)
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="live-server")
        self._loop: asyncio.AbstractEventLoop
        self._server: DrainingServer

    @property
    def url(self) -> str:
        host, port = self._sock_name
        return f"http://{host}:{port}"

    @property
    def address(self) -> tuple[str, int]:
        return self._sock_name

    @property
    def connections(self) -> Connections:
        return self._context.connections

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = make_server(self.engine, self._config, self._on_ready)
        await self._server.serve(sockets=[self._sock])

    def _on_ready(self, context: ServerContext) -> None:
        self._context = context
        self._is_ready.set()

    def __enter__(self) -> LiveServer:
        self._sock_name = self._sock.getsockname()[:2]
        self._thread.start()
        assert self._is_ready.wait(30)
        return self

    def stop(self) -> None:
        self.call(self._server.stop)

    def call(self, action: Callable[[], object]) -> None:
        """Do something on the server's event loop."""
        self._loop.call_soon_threadsafe(action)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
                self.stop()
        self._thread.join(30)
        self._sock.close()
        assert not self._thread.is_alive()
