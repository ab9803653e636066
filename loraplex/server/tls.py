"""TLS: the certificate as configured, and a layer that decrypts in slices of the event loop's time.

A record may have one byte of text and takes as long as one of a thousand. What has come on a connection is up to 256
KiB, 11,000 such records, and the event loop's own TLS decrypts all of it at once, for each connection. Here it is fed
to the layer in small pieces, in the same slices in which heads and bodies are parsed.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, cast

from loraplex.errors import ConfigError
from loraplex.server.config import ServerConfig
from loraplex.server.pacing import PacedFlow, SmallReads, TimeSlices

KEY_PASSWORD = "LORAPLEX_SSL_KEYFILE_PASSWORD"

SHUTDOWN_TIMEOUT_S = 5
"""How long a closed connection waits for its client to read the rest, and to say goodbye."""

FED_BYTES = 1024
"""At a time, of one connection: at most 45 records."""


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the configured certificate; None without one. ConfigError: files that cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    password = os.environ.get(KEY_PASSWORD, "")  # without one OpenSSL would ask on the terminal
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: password)
    except (OSError, ValueError) as error:
        key = "" if config.ssl_keyfile is None else f" with --ssl-keyfile {config.ssl_keyfile}"
        hint = f"; is it PEM, does the key belong to it, and is {KEY_PASSWORD} set if the key has a password?"
        is_missing = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile}{key}: {_reason(error)}{'' if is_missing else hint}"
        ) from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {_reason(error)}; is it PEM?") from error
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class PacedTls(SmallReads):
    """One connection below TLS. `handshake` ends with the handshake: False where it failed.

    protocol: sees what is decrypted, as if this were its connection. on_failed: called when the connection is lost
    before the handshake has ended: the protocol never learns of it. source: the address, whose slices it takes.
    """

    def __init__(
        self,
        protocol: asyncio.Protocol,
        context: ssl.SSLContext,
        slices: TimeSlices,
        read_buffer: memoryview,
        handshake_timeout_s: float,
        on_failed: Callable[[], None],
        source: str = "",
    ) -> None:
        loop = asyncio.get_running_loop()
        self.handshake: asyncio.Future[bool] = loop.create_future()
        self._layer: Any = _Layer(  # more than its stubs say
            loop,
            protocol,
            context,
            self.handshake,
            server_side=True,
            ssl_handshake_timeout=handshake_timeout_s,  # type: ignore[arg-type]
            ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
        self._slices, self._source, self.read_buffer = slices, source, read_buffer
        self._on_failed = on_failed
        self._unfed = bytearray()
        self._is_ended = self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1, low=0)  # paused means: the client has not read all of it
        self._flow = PacedFlow(self._transport)
        self._layer.connection_made(_Below(self._transport, self._flow))

    def data_received(self, data: bytes) -> None:
        is_behind = bool(self._unfed)
        self._unfed += data
        if not is_behind:
            self._slices.run(self._feed, len(data) <= FED_BYTES, self._source)
            self._flow.set_behind(bool(self._unfed))

    def pause_writing(self) -> None:
        self._layer.pause_writing()

    def resume_writing(self) -> None:
        self._layer.resume_writing()

    def eof_received(self) -> bool:
        self._is_ended = True
        if not self._unfed:
            self._end()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._unfed.clear()
        self._is_lost = True
        if not self.handshake.done() or self.handshake.cancelled() or not self.handshake.result():
            self._on_failed()
        self._layer.connection_lost(exc)

    def _feed(self) -> None:
        """Some of what came; the rest when other connections have had their time. Meanwhile no more is read."""
        if self._is_lost:
            return
        size = min(FED_BYTES, len(self._unfed))
        self._layer.get_buffer(size)[:size] = self._unfed[:size]
        del self._unfed[:size]
        self._layer.buffer_updated(size)
        self._flow.set_behind(bool(self._unfed))
        if self._unfed:
            self._slices.run(self._feed, False, self._source)
        elif self._is_ended:
            self._end()

    def _end(self) -> None:
        if not self._layer.eof_received():
            self._transport.close()


class _Layer(SSLProtocol):
    """asyncio's, with buffers of one record: its own have 256 KiB for each connection.

    What the transport below has not sent counts as unsent here, too: else a client that reads nothing would be sent
    everything.
    """

    max_size = 2**14

    def _wakeup_waiter(self, exc: BaseException | None = None) -> None:
        """An error that is kept has its traceback, which keeps the layer: 100 KB until the next full collection."""
        layer: Any = self
        waiter: asyncio.Future[bool] | None = layer._waiter
        layer._waiter = None
        if exc is not None:
            exc.__traceback__ = None
        if waiter is not None and not waiter.done():
            waiter.set_result(exc is None)

    def _get_write_buffer_size(self) -> int:
        layer: Any = super()
        below: Any = self._transport
        unsent: int = layer._get_write_buffer_size()
        return unsent if below is None else unsent + below.get_write_buffer_size()


class _Below:
    """The transport as the layer sees it: reading stops for either of two reasons, its own or `PacedTls`'s."""

    def __init__(self, transport: asyncio.Transport, flow: PacedFlow) -> None:
        self._transport = transport
        self.pause_reading, self.resume_reading = flow.pause_reading, flow.resume_reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _force_close(self, error: BaseException | None) -> None:
        self._transport.abort()
