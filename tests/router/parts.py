"""Replicas over a fake engine, replicas of raw bytes, and the router in front of them, all in the test's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx

from loraplex.adapters.sources.uploads import UploadStore
from loraplex.router.fleet import Fleet
from loraplex.router.run import route
from loraplex.router.settings import RouteSettings
from loraplex.server import ServerConfig, bind
from loraplex.server.run import DrainingServer, make_server
from loraplex.testing import FakeAsyncEngine

ADAPTERS = {"sql": "/adapters/sql", "chat": "/adapters/chat"}
SETTINGS: dict[str, Any] = {
    "port": 0,
    "access_log": False,
    "poll_interval_s": 0.02,
    "shutdown_grace_s": 0.0,
    "connect_timeout_s": 20.0,  # a machine under load: a replica that is late is not one that fails
}

POLLED = (b"/metrics", b"/version", b"/v1/memory", b"/v1/events", b"/v1/models?limit")


def completion(model: str = "sql", **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "hi", "max_tokens": 6, "ignore_eos": True, **fields}


class FakeReplica:
    """A server over a fake engine. `kill` ends it as SIGKILL does: its connections break, and its port is closed."""

    def __init__(self, uploads: UploadStore | None = None, **settings: Any) -> None:
        self.engine = FakeAsyncEngine(ADAPTERS, uploads=uploads)
        self._settings: dict[str, Any] = {
            "access_log": False,
            "log_level": "warning",
            "shutdown_grace_s": 0.0,
            **settings,
        }
        self.port = 0
        self._server: DrainingServer
        self._task: asyncio.Task[None]

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        config = ServerConfig(port=self.port, **self._settings)
        sock = bind(config)
        self.port = sock.getsockname()[1]
        is_ready = asyncio.Event()
        self._server = make_server(self.engine, config, lambda context: is_ready.set())
        self._task = asyncio.ensure_future(self._server.serve(sockets=[sock]))
        await is_ready.wait()

    async def kill(self) -> None:
        for listener in self._server.servers:
            listener.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await self.stop()

    async def start_empty(self) -> None:
        """Again, as a process without a state directory."""
        self.engine = FakeAsyncEngine()
        await self.start()

    async def stop(self) -> None:
        self._server.stop()
        await self._task


@contextlib.asynccontextmanager
async def replicas(count: int, **settings: Any) -> AsyncIterator[list[FakeReplica]]:
    found = [FakeReplica(**settings) for _ in range(count)]
    for each in found:
        await each.start()
    try:
        yield found
    finally:
        for each in found:
            each.engine.resume()
            await each.stop()


class RawReplica:
    """Answers /health, and everything else with what `answer` writes."""

    def __init__(
        self, answer: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]], health: bytes = b"HTTP/1.1 200 OK"
    ) -> None:
        self._answer = answer
        self.health = health
        self.requests: list[bytes] = []
        self.port = 0

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[RawReplica]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._tasks: set[asyncio.Task[Any]] = set()
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with (
            contextlib.closing(writer),
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError),
        ):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            body = await reader.readexactly(length)
            if head.startswith(b"GET /health"):
                writer.write(self.health + b"\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
            elif head.startswith(tuple(b"GET " + path for path in POLLED)):
                writer.write(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            else:
                self.requests.append(head + body)
                await self._answer(head + body, writer)
            await writer.drain()


class Router:
    def __init__(self, fleet: Fleet, client: httpx.AsyncClient, url: str) -> None:
        self.fleet, self.client, self.url = fleet, client, url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def replica(self, name: str) -> Any:
        return self.fleet.named([name])[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        """pytest's timeout ends it otherwise."""
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def router(names: Sequence[str], key: str = "", **settings: Any) -> AsyncIterator[Router]:
    route_settings = RouteSettings(**{**SETTINGS, **settings})
    config = route_settings.server_config
    fleet = Fleet(names, route_settings, key)
    sock = bind(config)
    ready: asyncio.Future[DrainingServer] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(route(fleet, route_settings, config, sock, ready.set_result))
    server = await ready
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    while not server.started:
        await asyncio.sleep(0)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20.0, trust_env=False) as client:
            yield Router(fleet, client, url)
    finally:
        server.stop()
        await task
        sock.close()
