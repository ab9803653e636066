"""Requests that two servers in a row may read differently: the ambiguous is refused, no body becomes a request."""

from __future__ import annotations

import pytest

from tests.server.raw_connection import Connection

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
REFUSED = {
    "length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two equal lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a list of lengths": HEAD + b"Content-Length: 5, 5\r\n\r\nhello",
    "a length with a sign": HEAD + b"Content-Length: +5\r\n\r\nhello",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\nhello",
    "a hexadecimal length": HEAD + b"Content-Length: 0x5\r\n\r\nhello",
    "a length beyond 64 bits": HEAD + b"Content-Length: 18446744073709551621\r\n\r\nhello",
    "no length": HEAD + b"Content-Length:\r\n\r\nhello",
    "chunks not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunks twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two codings": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "identity": HEAD + b"Transfer-Encoding: identity\r\n\r\nabc",
    "a tab in the name": HEAD + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "space before the colon": HEAD + b"Content-Length : 5\r\n\r\nhello",
    "a folded header": HEAD + b"X: a\r\n Content-Length: 5\r\n\r\nhello",
    "a fold after the first line": b"POST / HTTP/1.1\r\n Host: a\r\n\r\n",
    "bare line feeds": b"POST / HTTP/1.1\nHost: a\n\n",
    "one bare line feed": HEAD + b"X: a\nY: b\r\n\r\n",
    "a bare carriage return": HEAD + b"X: a\rY: b\r\n\r\n",
    "two authorizations": HEAD + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    "two keys": HEAD + b"X-API-Key: a\r\nX-API-Key: b\r\n\r\n",
    "a zero byte": HEAD + b"X: a\x00b\r\n\r\n",
    "a chunk with a bare line feed": CHUNKED + b"5\nhello\n0\n\n",
    "an extension with a bare line feed": CHUNKED + b"5;a\nhello\r\n0\r\n\r\n",
    "a line end in an extension": CHUNKED + b'5;a="\r\n"\r\nhello\r\n0\r\n\r\n',
    "a chunk size with a prefix": CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    "a chunk size with a space": CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
    "a chunk size beyond 64 bits": CHUNKED + b"fffffffffffffffff\r\nhello",
    "a negative chunk size": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a chunk that is too long": CHUNKED + b"5\r\nhelloX\r\n0\r\n\r\n",
}
UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n",
    "both": b"Upgrade: h2c\r\nConnection: upgrade\r\nUpgrade: websocket\r\n",
}


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "byte by byte"])
async def test_what_is_ambiguous_is_400_and_ends_the_connection(
    connection: Connection, message: bytes, is_split: bool
) -> None:
    message += HIDDEN
    connection.feed(*(bytes([byte]) for byte in message) if is_split else [message])
    await connection.settle()
    assert connection.transport.status == 400
    assert connection.transport.is_closed
    assert "/hidden" not in connection.app.paths
    assert connection.app.bodies == []


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES.keys())
@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "later"])
async def test_the_body_of_a_request_with_an_upgrade_is_its_body(
    connection: Connection, upgrade: bytes, is_split: bool
) -> None:
    """The parser stops after such a head: the body was lost, and one that came later was read as the next request."""
    head = HEAD + upgrade + b"Content-Length: %d\r\n\r\n" % len(HIDDEN)
    connection.feed(*([head, HIDDEN] if is_split else [head + HIDDEN]))
    await connection.settle()
    assert (connection.app.paths, connection.app.bodies) == (["/"], [HIDDEN])
    connection.feed(b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n")
    await connection.settle()
    assert connection.app.paths == ["/", "/next"]
    assert connection.transport.written.count(b" 200 OK") == 2


async def test_requests_with_an_upgrade_in_a_row(connection: Connection) -> None:
    request = HEAD + UPGRADES["h2c"] + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    connection.feed(request * 5)
    await connection.settle()
    assert connection.app.bodies == [b"hi"] * 5
    assert [name for name, _ in connection.app.headers[0]] == [
        b"host",
        b"connection",
        b"http2-settings",
        b"transfer-encoding",
    ]


async def test_a_tunnel_is_refused(connection: Connection) -> None:
    connection.feed(b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n" + HIDDEN)
    await connection.settle()
    assert (connection.transport.status, connection.app.paths) == (400, [])


async def test_extensions_and_trailers_of_chunks_are_no_part_of_the_body(connection: Connection) -> None:
    connection.feed(CHUNKED + b'5;a=1;b="x"\r\nhello\r\n0\r\nX: y\r\n\r\n')
    await connection.settle()
    assert connection.app.bodies == [b"hello"]


@pytest.mark.parametrize("expect", [b"100-continue", b"100-Continue"])
async def test_a_client_that_asks_before_it_sends(connection: Connection, expect: bytes) -> None:
    connection.feed(HEAD + b"Expect: " + expect + b"\r\nContent-Length: 5\r\n\r\n")
    while not connection.transport.written:
        await connection.pause()
    assert connection.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.feed(b"hello")
    await connection.settle()
    assert connection.app.bodies == [b"hello"]
