"""The port: a bound socket, TLS, and the connections that are accepted from it, as far as limits and descriptors go.

The server accepts by itself, not through the event loop's server, so that every descriptor is counted from the moment
it is accepted: a TLS handshake that never ends is one, too. A connection beyond a limit is answered with 503 and
closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import select
import socket
import ssl
from collections.abc import Callable
from functools import partial

from loraplex.errors import ConfigError
from loraplex.server.api_error import ApiError
from loraplex.server.config import ServerConfig
from loraplex.server.connections import Connections, Refusal, Slot
from loraplex.server.http_protocol import LINGER_S
from loraplex.server.request_id import closing_answer
from loraplex.server.tls import PacedTls

_log = logging.getLogger("loraplex.server")

LISTEN_BACKLOG = 4096
"""What has no place in it is tried again by its client after a second, then after three."""

ACCEPTS_AT_ONCE = 32
"""Between two looks at everything else."""

MAX_LINGERING = 64
"""Refused connections that are kept for LINGER_S, so that the answer is not lost with what the client still sends."""

PAUSE_S = 0.2
"""Until the next attempt, when the system has no memory or descriptors at all."""

DEFAULT_MAX_CONNECTIONS = 5000
RESERVED_DESCRIPTORS = 256
"""For adapters' files, the engine's socket, the journal."""

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REMEDIES = {
    errno.EADDRNOTAVAIL: "it is no address of this machine, choose another --host",
    errno.EACCES: "ports below 1024 need privileges, choose another --port",
}


def bind(config: ServerConfig) -> socket.socket:
    """A socket on the configured address that does not listen yet. ConfigError: the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {config.host!r} is no address of this machine: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        remedy = _REMEDIES.get(error.errno or 0, "stop the program that has it, or choose another --port")
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}; {remedy}") from error
    return sock


def raise_descriptor_limit() -> None:
    """Take as many descriptors as this process may have; the engine process inherits them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections(config: ServerConfig) -> int:
    """As configured, or what the descriptors allow. Raises ConfigError when they are too few for what is configured."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DEFAULT_MAX_CONNECTIONS
    if limit != resource.RLIM_INFINITY:
        most = max(1, limit - min(RESERVED_DESCRIPTORS, limit // 2))
    if config.max_connections is None:
        return min(most, DEFAULT_MAX_CONNECTIONS)
    if limit != resource.RLIM_INFINITY and config.max_connections > most:
        raise ConfigError(
            f"max_connections {config.max_connections} is more than {most}, which {limit} open files (ulimit -n) are "
            f"enough for: raise that limit, or lower --max-connections"
        )
    return config.max_connections


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _is_there(sock: socket.socket) -> bool:
    """Whether the client may still answer, whatever it has sent: it has neither closed nor reset the connection."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return not poll.poll(0)


class Handshake:
    """A connection that is not there yet: it may be closed for another one, as a new one may."""

    def __init__(self, task: asyncio.Task[None], slot: Slot) -> None:
        self._task, self._slot = task, slot

    def close_now(self) -> None:
        if self._task.cancel():
            self._slot.release()


class Listener:
    """Accepts connections on a bound socket until `close`. `make_protocol` makes its protocol, which frees its slot."""

    def __init__(
        self,
        sock: socket.socket,
        connections: Connections,
        make_protocol: Callable[[Slot], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._sock = sock
        self._connections = connections
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._lingering: set[socket.socket] = set()
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)  # given up for a moment to turn a connection away

    def start(self) -> None:
        self._sock.setblocking(False)
        self._sock.listen(LISTEN_BACKLOG)
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """No connection is accepted from now on; those that are open stay."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        for task in self._connecting:
            task.cancel()
        for sock in tuple(self._lingering):
            self._let_go(sock)

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._refuse_without_descriptor(error)
                return
            num_closed = self._connections.num_closed_for_others
            slot = self._connections.admit(str(address[0]))
            if isinstance(slot, Refusal):
                self._turn_away(sock, slot, str(address[0]))
            else:
                task = self._loop.create_task(self._connect(sock, slot))
                if self._tls is not None:
                    slot.begin_handshake(Handshake(task, slot))
                self._connecting.add(task)
                task.add_done_callback(partial(self._end_connecting, sock, slot))
            if self._connections.num_closed_for_others > num_closed:
                return  # its descriptor is given back in the next turn of the loop

    async def _connect(self, sock: socket.socket, slot: Slot) -> None:
        sock.setblocking(False)
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(lambda: self._make_protocol(slot), sock)
            else:
                async with asyncio.timeout(self._handshake_timeout_s):
                    await self._first_bytes(sock)
                    await slot.handshake_turn(partial(_is_there, sock))
                await self._connect_tls(self._tls, sock, slot)
        except OSError:  # the client is gone, is silent, or speaks no TLS
            sock.close()
            slot.release()

    async def _connect_tls(self, context: ssl.SSLContext, sock: socket.socket, slot: Slot) -> None:
        layer = PacedTls(
            self._make_protocol(slot),
            context,
            self._connections.slices,
            self._connections.read_buffer,
            self._handshake_timeout_s,
            slot.release,
            slot.source,
        )
        transport, _ = await self._loop.connect_accepted_socket(lambda: layer, sock)
        try:
            is_done = await layer.handshake
        except BaseException:
            transport.abort()
            raise
        if not is_done:
            transport.abort()
            raise ConnectionAbortedError

    def _end_connecting(self, sock: socket.socket, slot: Slot, task: asyncio.Task[None]) -> None:
        """A task that was cancelled may not have begun."""
        self._connecting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a connection could not be made", exc_info=error)
        if task.cancelled() or error is not None:
            sock.close()
            slot.release()

    async def _first_bytes(self, sock: socket.socket) -> None:
        """A handshake costs milliseconds: it begins when its client has."""
        came = self._loop.create_future()
        self._loop.add_reader(sock, partial(_end, came))
        try:
            await came
        finally:
            self._loop.remove_reader(sock)

    def _turn_away(self, sock: socket.socket, reason: Refusal, address: str) -> None:
        num_open = self._connections.num_open
        text = {
            Refusal.CONNECTIONS: f"{num_open} are open (--max-connections)",
            Refusal.ADDRESS: "it has as many as one address may have (--max-connections-per-ip)",
        }.get(reason, "no descriptor is left")
        self._connections.refuse(reason, text, address)
        if self._tls is not None:
            sock.close()
            return
        error = ApiError(
            "too many connections are open; try again later",
            status=503,
            kind="overloaded_error",
            code="too_many_connections",
        )
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(closing_answer(error))
            sock.shutdown(socket.SHUT_WR)
        self._lingering.add(sock)
        if len(self._lingering) > MAX_LINGERING or reason is Refusal.DESCRIPTORS:
            self._let_go(sock)
        else:
            self._loop.call_later(LINGER_S, self._let_go, sock)

    def _let_go(self, sock: socket.socket) -> None:
        """What was received must be read first: a close would reset the connection, and the answer could be lost."""
        if sock in self._lingering:
            self._lingering.discard(sock)
            with contextlib.suppress(OSError):
                sock.recv(2**16)
            sock.close()

    def _refuse_without_descriptor(self, error: OSError) -> None:
        """The connection would wait in the queue without an answer, and the loop would wake for it again and again."""
        if error.errno not in EXHAUSTED:
            _log.error("a connection could not be accepted: %s", error)
        elif error.errno == errno.EMFILE and self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                sock, address = self._sock.accept()
                self._turn_away(sock, Refusal.DESCRIPTORS, str(address[0]))
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
            return
        else:
            self._connections.refuse(Refusal.DESCRIPTORS, f"the system cannot accept one: {error.strerror}")
        self._loop.remove_reader(self._sock)
        self._loop.call_later(PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:
            if self._spare is None:
                with contextlib.suppress(OSError):
                    self._spare = os.open(os.devnull, os.O_RDONLY)
            self._loop.add_reader(self._sock, self._accept)
