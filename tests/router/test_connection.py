"""Connections to replicas: an answer in any pieces, what comes behind it, and what a replica cannot do to others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.router import connection
from loraplex.router.connection import MAX_HEAD_BYTES, Answer, Line, LostError, NotSentError
from loraplex.server.pacing import READ_BYTES
from tests.router.parts import RawReplica, completion, replicas, router

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: 1\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
EARLY = b"HTTP/1.1 100 Continue\r\nX-B: 2\r\n\r\n" + PLAIN
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nhello"


class Server:
    """Answers each request with the next of `answers`, in the pieces in which they are given; None closes."""

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.answers = list(answers)
        self.num_connections = 0
        self.requests: list[bytes] = []

    @contextlib.asynccontextmanager
    async def line(self) -> AsyncIterator[Line]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        line = Line("replica x", f"http://127.0.0.1:{port}", 5.0)
        try:
            yield line
        finally:
            line.close()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)


async def get(line: Line, method: str = "GET") -> Answer:
    return await line.send(method, b"/x", [(b"accept", b"*/*")], b"", 5.0)


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED, EARLY], ids=["plain", "chunked", "early"])
async def test_a_connection_is_kept_for_the_next_request(answer: bytes) -> None:
    server = Server(*[[answer]] * 3)
    async with server.line() as line:
        for _ in range(3):
            found = await get(line)
            assert (found.status, await found.read(5)) == (200, b"hello")
            assert found.header(b"x-b") == b""
        assert server.num_connections == 1
        assert server.requests[0].split(b"\r\n")[0] == b"GET /x HTTP/1.1"
        assert b"accept: */*" in server.requests[0].split(b"\r\n")


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([PLAIN, CHUNKED, EARLY]), st.sets(st.integers(1, 60)))
def test_an_answer_may_come_in_any_pieces(answer: bytes, cuts: set[int]) -> None:
    ends = [*sorted(cut for cut in cuts if cut < len(answer)), len(answer)]

    async def read() -> bytes:
        async with Server([answer[start:end] for start, end in zip([0, *ends], ends, strict=False)]).line() as line:
            return await (await get(line)).read(5)

    assert asyncio.run(read()) == b"hello"


@pytest.mark.parametrize("is_whole", [False, True])
async def test_an_answer_that_is_closed_again_ends_no_later_request(is_whole: bool) -> None:
    """Its connection has the next request by then, whose reader would wait, or get what comes for a third one."""
    pieces: list[bytes | None] = [PLAIN] if is_whole else [PLAIN[:-2], PLAIN[-2:]]
    server = Server([PLAIN], pieces, [PLAIN.replace(b"hello", b"other")])
    async with server.line() as line:
        first = await get(line)
        assert await first.peek(5) == b"hello"
        second = await get(line)
        first.close()
        third = await get(line)
        assert await second.read(5) == b"hello"
        assert await third.read(5) == b"other"
        assert server.num_connections == 2


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with Server([ENDLESS, None]).line() as line:
        assert await (await get(line)).read(5) == b"hello"


@pytest.mark.parametrize(
    "more", [PLAIN, b"HTTP/1.1 200", b"\x00", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nevil"]
)
@pytest.mark.parametrize("is_late", [False, True])
async def test_what_comes_behind_an_answer_is_no_answer_to_the_next_request(more: bytes, is_late: bool) -> None:
    server = Server([PLAIN, more] if is_late else [PLAIN + more], [CHUNKED])
    async with server.line() as line:
        first = await get(line)
        assert await first.read(5) == b"hello"
        await asyncio.sleep(0.02 if is_late else 0)
        second = await get(line)
        assert (await second.read(5), second.header(b"x-a")) == (b"hello", b"")
        assert server.num_connections == 2


async def test_a_connection_that_is_closing_gets_no_request() -> None:
    """As one whose end has come in this turn of the event loop."""
    server = Server([PLAIN], [PLAIN])
    async with server.line() as line:
        assert await (await get(line)).read(5) == b"hello"
        line._idle[0]._transport.close()
        assert await (await get(line)).read(5) == b"hello"
        assert server.num_connections == 2


async def test_an_answer_to_head_has_no_body() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    async with Server([head], [PLAIN]).line() as line:
        answer = await get(line, "HEAD")
        assert (answer.header(b"content-length"), await answer.read(5)) == (b"5", b"")
        assert await (await get(line)).read(5) == b"hello"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * MAX_HEAD_BYTES,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
    ],
)
async def test_what_is_no_answer_is_lost(answer: bytes) -> None:
    async with Server([answer, None]).line() as line:
        with pytest.raises(LostError, match="replica x"):
            await get(line)


@pytest.mark.parametrize("answer", [PLAIN[:-1], CHUNKED[:-5], CHUNKED[:-9]])
async def test_an_answer_that_breaks_off_is_lost(answer: bytes) -> None:
    async with Server([answer, None]).line() as line:
        with pytest.raises(LostError, match="within its answer"):
            await (await get(line)).read(5)


async def test_an_answer_that_is_too_long_or_silent_is_lost() -> None:
    async with Server([PLAIN], [PLAIN[:-1]]).line() as line:
        with pytest.raises(LostError, match="more than 4 bytes"):
            await (await get(line)).read(4)
        line_of_silence = await line.send("GET", b"/x", [], b"", 0.1)
        with pytest.raises(LostError, match="silent"):
            await line_of_silence.read(5)


@pytest.mark.parametrize(
    ("target", "value"),
    [(b"/x\r\nevil: 1", b"1"), (b"/x y", b"1"), (b"", b"1"), (b"/x", b"1\r\nevil: 1"), (b"/x", b"\0")],
)
async def test_no_head_is_sent_that_is_more_than_it_says(target: bytes, value: bytes) -> None:
    server = Server([PLAIN])
    async with server.line() as line:
        with pytest.raises(LostError, match="other characters"):
            await line.send("GET", target, [(b"accept", value)], b"", 5.0)
        assert server.num_connections == 0


async def test_tiny_chunks_are_read_in_turns_and_come_together() -> None:
    """A replica that sent its answer in chunks of a byte held the event loop for half a second, for 3 s without end."""
    num_chunks = 50_000
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * num_chunks + b"0\r\n\r\n"
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async with Server([answer]).line() as line:
        task = asyncio.ensure_future(other())
        found = await get(line)
        pieces = [piece async for piece in found.pieces()]
        task.cancel()
        found.close()
    assert sum(map(len, pieces)) == num_chunks
    assert max(map(len, pieces)) <= READ_BYTES // len(b"1\r\na\r\n") + 1
    assert num_turns >= len(pieces) - 1
    assert len(pieces) < num_chunks / 10, "not one by one"


async def test_no_more_is_read_than_its_reader_takes() -> None:
    server = Server([b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n", bytes(10**8)])
    async with server.line() as line:
        answer = await get(line)
        held: Any = answer._connection
        for _ in range(100):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert held._num_unread <= connection.MAX_UNREAD_BYTES + READ_BYTES
        assert len(await answer.read(10**8)) == 10**8


async def test_answers_that_begin_together_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of a thousand streams held the event loop for 0.4 s, of two thousand for 2.5 s."""
    turns: list[int] = []
    real = connection.Turns.next

    async def counted(self: Any) -> None:
        turns.append(1)
        await real(self)

    monkeypatch.setattr(connection.Turns, "next", counted)
    async with Server(*[[PLAIN]] * 30).line() as line:
        answers = await asyncio.gather(*(get(line) for _ in range(30)))
        assert len(turns) == 30
        assert [await answer.read(5) for answer in answers] == [b"hello"] * 30
        assert len(line._idle) == 30
        line.close()
        assert not line._idle


# --------------------------------------------------------------------------------------------------- through the router


async def test_a_router_without_descriptors_takes_no_replica_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own lack of them opened the breakers of healthy replicas, and what was known of these was forgotten."""
    async with replicas(1) as (a,), router([a.name]) as front:
        assert (await front.client.post("/v1/completions", json=completion())).status_code == 200
        replica = front.replica(a.name)
        replica._line.close()
        loop = asyncio.get_running_loop()
        real: Callable[..., Any] = loop.create_connection
        is_full = True

        async def create(factory: Any, host: Any = None, port: Any = None, **named: Any) -> Any:
            if is_full and port == a.port:
                raise OSError(errno.EMFILE, "Too many open files")
            return await real(factory, host, port, **named)

        monkeypatch.setattr(loop, "create_connection", create)
        asked = await asyncio.gather(*(replica.ask("/health", 100) for _ in range(20)), return_exceptions=True)
        lost = [error for error in asked if isinstance(error, NotSentError)]
        assert lost
        assert all(error.is_own for error in lost)
        for _ in range(5):
            answers = await asyncio.gather(
                *(front.client.post("/v1/completions", json=completion()) for _ in range(5)), return_exceptions=True
            )
        assert {answer.status_code for answer in answers if isinstance(answer, httpx.Response)} >= {503}
        assert replica.breaker.is_closed
        assert replica.known.tiers
        is_full = False
        assert (await front.client.post("/v1/completions", json=completion())).status_code == 200


async def test_what_a_browser_obeys_and_what_has_no_body_are_not_the_replicas_to_say() -> None:
    headers = [b"Access-Control-Allow-Origin: *", b"Content-Security-Policy: x", b"Location: /", b"Refresh: 0"]

    async def write(request: bytes, writer: asyncio.StreamWriter) -> None:
        status = b"304 Not Modified" if b"chat" in request else b"204 No Content"
        more = b"\r\n".join([*headers, b"Alt-Svc: h3", b"Connection: close", b"Content-Length: 5", b"X-Own: 1"])
        writer.write(b"HTTP/1.1 " + status + b"\r\n" + more + b"\r\n\r\n")

    async with RawReplica(write).running() as raw, router([raw.name]) as front:
        for model, status in (("chat", 304), ("sql", 204)):
            answer = await front.client.post("/v1/completions", json=completion(model))
            assert (answer.status_code, answer.headers["x-own"]) == (status, "1")
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            assert not {"access-control-allow-origin", "location", "refresh", "alt-svc"} & set(answer.headers)
