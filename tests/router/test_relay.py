"""A request through the router: where it goes, what passes through, and what lost replicas and clients do to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import httpx
import pytest

from loraplex.errors import EngineDeadError, EngineOverloadedError
from tests.router.parts import FakeReplica, RawReplica, Router, completion, replicas, router
from tests.server.sse import events

KEY = "k" * 32
OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n"


async def test_an_answer_is_the_replicas_and_its_adapters_next_request_goes_there_too() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        answer = await front.client.post("/v1/completions", json=completion())
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == "[sql] "
        assert answer.headers["x-request-id"]
        for _ in range(5):
            await front.client.post("/v1/completions", json=completion())
        assert sorted([len(a.engine.requests), len(b.engine.requests)]) == [0, 6]
        chat = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert (await front.client.post("/v1/chat/completions", json=chat)).status_code == 200
        tokens = await front.client.post("/tokenize", json={"model": "sql", "prompt": "hi"})
        assert tokens.json()["count"] > 0
        assert (await front.client.get("/v1/models/sql")).json()["id"] == "sql"


@pytest.mark.parametrize(("policy", "shares"), [("spread", [4, 4]), ("pack", [3, 5])])
async def test_a_policy_places_what_comes_while_others_run(policy: str, shares: list[int]) -> None:
    settings: dict[str, Any] = {"policy": policy, "replica_requests": 5, "poll_interval_s": 0.02}
    async with replicas(2) as (a, b), router([a.name, b.name], **settings) as front:
        for replica in (a, b):
            replica.engine.hold()
        calls = [asyncio.ensure_future(front.client.post("/v1/completions", json=completion("base"))) for _ in range(8)]
        await front.until(lambda: len(a.engine.requests) + len(b.engine.requests) == 8)
        assert sorted([a.engine.num_running, b.engine.num_running]) == shares
        for replica in (a, b):
            replica.engine.resume()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 8


async def test_a_stream_passes_through_piece_by_piece() -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        a.engine.hold(after_tokens=2)
        async with front.client.stream("POST", "/v1/completions", json=completion(stream=True)) as answer:
            pieces = answer.aiter_bytes()
            seen = await anext(pieces)
            while seen.count(b"data: ") < 2:
                seen += await anext(pieces)
            assert b"[DONE]" not in seen, "what came so far came while the replica holds the rest"
            a.engine.resume()
            async for piece in pieces:
                seen += piece
        assert seen.endswith(b"data: [DONE]\n\n")
        assert "".join(each["choices"][0]["text"] for each in events(seen.decode()) if each["choices"]) == "[sql] "


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request_at_the_replica(is_stream: bool) -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        a.engine.hold(after_tokens=1)
        call = asyncio.ensure_future(front.client.post("/v1/completions", json=completion(stream=is_stream)))
        await front.until(lambda: a.engine.num_running == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await front.until(lambda: a.engine.num_running == 0)
        assert len(a.engine.aborted) == 1
        assert front.replica(a.name).num_in_flight == 0


async def test_what_a_client_does_not_read_stays_at_the_replica() -> None:
    """The router holds a piece of an endless answer, and what the system's buffers take."""
    written = 0

    async def endless(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for _ in range(4096):
            writer.write(bytes(2**16))
            await writer.drain()
            written += 2**16

    async with RawReplica(endless).running() as raw, router([raw.name]) as front:
        body = json.dumps(completion()).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=2**16)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(0.3)
        assert written < 64 * 2**20, "of 256 MiB"
        writer.close()
        await front.until(lambda: front.replica(raw.name).num_in_flight == 0)


# ------------------------------------------------------------------------------------------------------ lost replicas


async def test_a_replica_that_cannot_be_reached_is_passed_over_and_taken_back() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name], poll_interval_s=0.05) as front:
        await a.kill()
        answers = [await front.client.post("/v1/completions", json=completion()) for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        await front.until(lambda: not front.replica(a.name).breaker.is_closed)
        assert (await front.client.get("/health")).json() == {"status": "degraded", "replicas": 2, "available": 1}
        await a.start()
        await front.until(lambda: front.fleet.num_open == 2)
        b.engine.hold()
        call = asyncio.ensure_future(front.client.post("/v1/completions", json=completion("base")))
        await front.until(lambda: a.engine.num_running + b.engine.num_running > 0 or call.done())
        b.engine.resume()
        assert (await call).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_replica_that_is_killed_ends_its_own_requests_alone_and_none_is_sent_twice(is_stream: bool) -> None:
    settings: dict[str, Any] = {"policy": "spread"}
    async with replicas(2) as (a, b), router([a.name, b.name], **settings) as front:
        for replica in (a, b):
            replica.engine.hold(after_tokens=1)
        body = completion("base", stream=is_stream)
        calls = [asyncio.ensure_future(front.client.post("/v1/completions", json=body)) for _ in range(6)]
        await front.until(lambda: a.engine.num_running == b.engine.num_running == 3)
        if is_stream:
            await asyncio.sleep(0.1)  # the first token of each is on its way
        await a.kill()
        await front.until(lambda: sum(call.done() for call in calls) == 3)
        b.engine.resume()
        answers = await asyncio.gather(*calls)
        if is_stream:
            ends = [answer.text.rstrip().rpartition("data: ")[2] for answer in answers]
            errors = [json.loads(end)["error"] for end in ends if end != "[DONE]"]
        else:
            assert sorted(answer.status_code for answer in answers) == [200] * 3 + [502] * 3
            errors = [answer.json()["error"] for answer in answers if answer.status_code == 502]
        assert [error["code"] for error in errors] == ["replica_lost"] * 3
        assert all(a.name in error["message"] for error in errors)
        assert len(b.engine.requests) == 3, "a request that may have ended a replica is not sent to the next one"


async def test_an_answer_of_a_known_length_that_breaks_off_does_not_look_whole() -> None:
    async def half(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b'content-length: 100\r\n\r\n{"half":')

    async with RawReplica(half).running() as raw, router([raw.name]) as front:
        with pytest.raises(httpx.RemoteProtocolError):
            await front.client.post("/v1/completions", json=completion())


async def test_no_replica_is_said_and_health_is_503() -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        await a.kill()
        answer = await front.client.post("/v1/completions", json=completion())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert answer.headers["retry-after"] == "1"
        await front.until(lambda: front.fleet.num_open == 0)
        assert (await front.client.get("/health")).status_code == 503
        assert (await front.client.get("/v1/models")).status_code == 503
        await a.start()
        await front.until(lambda: front.fleet.num_open == 1)


async def test_a_refusal_goes_on_to_the_next_replica_and_the_last_one_is_answered() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        first, second = (a, b) if a.name < b.name else (b, a)
        first.engine.fail_next(EngineOverloadedError("too many"))
        assert (await front.client.post("/v1/completions", json=completion())).status_code == 200
        assert (len(first.engine.requests), len(second.engine.requests)) == (1, 1)
        page = (await front.client.get("/metrics")).text
        assert f'loraplex:router_retries_total{{replica="{first.name}"}} 1.0' in page
        assert f'loraplex:router_requests_total{{replica="{second.name}",status="200"}} 1.0' in page
        for replica in (a, b):
            replica.engine.fail_next(EngineOverloadedError("too many"))
        refused = await front.client.post("/v1/completions", json=completion())
        assert (refused.status_code, refused.json()["error"]["message"]) == (429, "too many")


HI: list[Any] = [{"role": "user", "content": "hi"}]
LORAX: dict[str, Any] = {"inputs": "hi", "parameters": {"adapter_id": "rare", "max_new_tokens": 6}}
WIRES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "rare", "messages": HI, "max_tokens": 6}),
    ("/v1/responses", {"model": "rare", "input": "hi"}),
    ("/v1/messages", {"model": "rare", "messages": HI, "max_tokens": 6}),
    ("/generate", {"text": "hi", "lora_path": "rare", "sampling_params": {"max_new_tokens": 6}}),
    ("/generate", LORAX),
    ("/generate_stream", LORAX),
    ("/", LORAX),
]


@pytest.mark.parametrize(("path", "body"), WIRES)
async def test_the_refusals_of_every_wire_go_on_to_the_next_replica(path: str, body: dict[str, Any]) -> None:
    async with replicas(2) as (a, b), router([a.name, b.name], poll_interval_s=60.0) as front:
        first, second = (a, b) if a.name < b.name else (b, a)
        assert second.engine.registry is not None
        await asyncio.to_thread(second.engine.registry.load, "rare", "/adapters/rare")
        assert (await front.client.post(path, json=body)).status_code == 200, "404 of the first one is not the answer"
        assert (len(first.engine.requests), len(second.engine.requests)) == (0, 1)
        assert first.engine.registry is not None
        await asyncio.to_thread(first.engine.registry.load, "rare", "/adapters/rare")
        second.engine.fail_next(EngineOverloadedError("too many"))
        assert (await front.client.post(path, json=body)).status_code == 200, "nor 429 of the second one"
        assert (len(first.engine.requests), len(second.engine.requests)) == (1, 2)


async def test_a_request_that_ended_an_engine_is_not_sent_to_the_next_one() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        for replica in (a, b):
            replica.engine.fail_next(EngineDeadError("the engine process ended"))
        answer = await front.client.post("/v1/completions", json=completion())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert len(a.engine.requests) + len(b.engine.requests) == 1


async def test_an_adapter_that_one_replica_alone_has_is_found() -> None:
    async with replicas(3) as fleet, router([each.name for each in fleet]) as front:
        last = max(fleet, key=lambda each: each.name)
        assert last.engine.registry is not None
        await asyncio.to_thread(last.engine.registry.load, "rare", "/adapters/rare")
        for _ in range(2):
            assert (await front.client.post("/v1/completions", json=completion("rare"))).status_code == 200
        unknown = await front.client.post("/v1/completions", json=completion("none"))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_engine_that_is_down_takes_its_replica_out() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        a.engine.die()
        await front.until(lambda: front.fleet.num_open == 1)
        for _ in range(4):
            assert (await front.client.post("/v1/completions", json=completion("base"))).status_code == 200
        assert len(b.engine.requests) == 4


# ------------------------------------------------------------------------------------------------------ what is hostile


async def test_a_replica_gets_the_request_alone_of_what_a_client_sends() -> None:
    """No header of a connection, of a page or of a proxy; a body in chunks has its length; the target is as it was."""

    async def empty(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(
            OK + b"content-length: 2\r\nset-cookie: a=b\r\nx-own: 1\r\nx-hop: 1\r\nconnection: x-hop\r\n\r\n{}"
        )

    async with RawReplica(empty).running() as raw, router([raw.name]) as front:

        async def chunks() -> Any:
            yield json.dumps(completion()).encode()

        headers = {
            "Authorization": "Bearer key",
            "Content-Type": "application/json",
            "Connection": "close, x-secret",
            "X-Secret": "1",
            "Cookie": "session=1",
            "X-Forwarded-Host": "evil.example",
            "TE": "trailers",
            "Expect": "100-continue",
            "X-Request-Id": "mine",
        }
        answer = await front.client.post("/v1/completions?a=%2f", content=chunks(), headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-own"] == "1"
        assert not {"set-cookie", "x-hop"} & set(answer.headers)
        assert len(answer.headers.get_list("date")) == 1
        head, _, body = raw.requests[0].partition(b"\r\n\r\n")
        line, *sent = head.decode().split("\r\n")
        names = sorted(each.partition(":")[0].lower() for each in sent)
        expected = ["accept", "authorization", "content-length", "content-type", "host", "user-agent"]
        assert line == "POST /v1/completions?a=%2f HTTP/1.1"
        assert names == [*expected, "x-forwarded-for", "x-request-id"]
        assert "X-Request-Id: mine" in sent or "x-request-id: mine" in sent
        assert json.loads(body) == completion()


SMUGGLED = [
    b"Content-Length: 5\r\nContent-Length: 6\r\n",
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Content-Length: +5\r\n",
]


@pytest.mark.parametrize("lengths", SMUGGLED)
async def test_a_body_of_two_lengths_reaches_no_replica(lengths: bytes) -> None:
    async def empty(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 2\r\n\r\n{}")

    async with RawReplica(empty).running() as raw, router([raw.name]) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + lengths
        writer.write(head + b"\r\n0\r\n\r\nGET /v1/models/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400")
        assert raw.requests == []
        writer.close()


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{" + b" " * 5000 + b"}", {"Content-Type": "application/json"}, 413),
        (b'{"model": ', {"Content-Type": "application/json"}, 400),
        (b"[]", {"Content-Type": "application/json"}, 400),
        (b'{"model":"\xff"}', {"Content-Type": "application/json"}, 400),
        (b"[" * 4000, {"Content-Type": "application/json"}, 400),
        (b'{"prompt":' + b"[" * 4000, {"Content-Type": "application/json"}, 400),
        (b"model=sql", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b"{}", {"Content-Type": "application/json", "Host": "evil.example"}, 403),
        (b"{}", {"Content-Type": "application/json", "Origin": "http://evil.example"}, 403),
    ],
)
async def test_a_bad_request_is_refused_before_any_replica(
    content: bytes, headers: dict[str, str], status: int
) -> None:
    async with replicas(1) as (a,), router([a.name], max_body_bytes=4500) as front:
        answer = await front.client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert a.engine.requests == []


async def test_a_key_is_passed_on_and_in_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    key = "a-key-of-32-characters-a-key-of-"
    caplog.set_level(logging.DEBUG)
    async with replicas(1, api_keys=(key,)) as (a,), router([a.name], access_log=True, log_level="debug") as front:
        good = await front.client.post("/v1/completions", json=completion(), headers={"Authorization": f"Bearer {key}"})
        bad = await front.client.post("/v1/completions", json=completion(), headers={"Authorization": "Bearer guessed"})
        assert (good.status_code, bad.status_code) == (200, 401)
        assert (await front.client.get("/v1/models")).status_code == 401
        await a.kill()
        await front.client.post("/v1/completions", json=completion(), headers={"Authorization": f"Bearer {key}"})
    assert key not in caplog.text
    assert "guessed" not in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-long: 1\r\n" * 20_000 + b"\r\n",
        b"nonsense\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    ],
    ids=["upgrade", "long-head", "nonsense", "nothing", "two-lengths"],
)
async def test_what_a_replica_must_not_answer_is_a_502(answer: bytes) -> None:
    async def write(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with RawReplica(write).running() as raw, router([raw.name]) as front:
        found = await front.client.post("/v1/completions", json=completion())
        assert (found.status_code, found.json()["error"]["code"]) == (502, "replica_lost")


async def test_a_replica_that_falls_silent_is_given_up() -> None:
    async def silent(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with RawReplica(silent).running() as raw, router([raw.name], answer_timeout_s=0.2) as front:
        found = await front.client.post("/v1/completions", json=completion())
        assert (found.status_code, found.json()["error"]["code"]) == (502, "replica_lost")


async def test_sglangs_and_loraxs_clients_have_their_routes() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        body = {"lora_name": "new", "lora_path": "/adapters/new"}
        loaded = await front.client.post("/load_lora_adapter", json=body)
        assert (loaded.status_code, loaded.json()["success"]) == (200, True), loaded.text
        for replica in (a, b):
            assert "new" in replica.engine.registry.names()
        sglang = await front.client.post("/generate", json={"text": "hi", "lora_path": "new"})
        assert sglang.json()["text"] == "[new] hi"
        for path in ("/generate", "/generate_stream", "/"):
            lorax = await front.client.post(path, json={"inputs": "hi", "parameters": {"adapter_id": "new"}})
            assert lorax.headers["x-adapter-id"] == "new"
            assert "[new] hi" in lorax.text
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/info"):
            assert (await front.client.get(path)).status_code == 200
        assert (await front.client.get("/health_generate")).status_code == 200
        gone = await front.client.post("/unload_lora_adapter", json={"lora_name": "new"})
        assert gone.status_code == 200
        for replica in (a, b):
            assert "new" not in replica.engine.registry.names()


# --------------------------------------------------------------------------------------------- forms of other servers

MESSAGES: dict[str, Any] = {"model": "sql", "max_tokens": 6, "messages": [{"role": "user", "content": "hi"}]}


async def test_routes_of_other_forms_go_to_the_replica_that_has_the_adapter() -> None:
    async with replicas(2, api_keys=(KEY,)) as (a, b), router([a.name, b.name]) as front:
        headers = {"x-api-key": KEY}
        for _ in range(3):
            answer = await front.client.post("/v1/messages", json=MESSAGES, headers=headers)
            assert (answer.status_code, answer.json()["model"]) == (200, "sql")
            body = {"model": "sql", "input": "hi", "max_output_tokens": 6}
            assert (await front.client.post("/v1/responses", json=body, headers=headers)).status_code == 200
        assert sorted([len(a.engine.requests), len(b.engine.requests)]) == [0, 6]
        count = {name: MESSAGES[name] for name in ("model", "messages")}
        counted = await front.client.post("/v1/messages/count_tokens", json=count, headers=headers)
        assert counted.json()["input_tokens"] > 0
        for given in ({}, {"x-api-key": "wrong"}):
            refused = await front.client.post("/v1/messages", json=MESSAGES, headers=given)
            assert (refused.status_code, refused.json()["type"]) == (401, "error")
            assert refused.json()["error"]["type"] == "authentication_error"
        unknown = await front.client.post("/v1/messages", json={**MESSAGES, "model": "nope"}, headers=headers)
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


async def stream_of_a_lost_replica(front: Router, replica: FakeReplica, path: str, body: dict[str, Any]) -> str:
    """All that a client gets whose stream began."""
    replica.engine.hold(after_tokens=1)
    async with front.client.stream("POST", path, json={**body, "stream": True}) as answer:
        texts = answer.aiter_text()
        seen = [await anext(texts)]
        await replica.kill()
        return "".join(seen + [text async for text in texts])


async def test_a_stream_whose_replica_is_lost_ends_in_its_own_form() -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        *_, last, rest = (await stream_of_a_lost_replica(front, a, "/v1/messages", MESSAGES)).split("\n\n")
        name, data = last.split("\n")
        assert (name, rest) == ("event: error", "")
        error = json.loads(data.removeprefix("data: "))
        assert (error["type"], error["error"]["type"], error["error"]["code"]) == ("error", "api_error", "replica_lost")
        refused = await front.client.post("/v1/messages", json=MESSAGES)
        assert (refused.status_code, refused.json()["type"]) == (503, "error")


@pytest.mark.parametrize("path", ["/generate_stream", "/"])
async def test_a_stream_of_loraxs_whose_replica_is_lost_ends_in_its_form(path: str) -> None:
    """Its client takes `error` for a text."""
    async with replicas(1) as (a,), router([a.name]) as front:
        body = {"inputs": "hi", "parameters": {"adapter_id": "sql"}}
        *_, last, rest = (await stream_of_a_lost_replica(front, a, path, body)).split("\n\n")
        error = json.loads(last.removeprefix("data:"))
        assert (error["error_type"], error["code"], rest) == ("generation", "replica_lost", "")
        assert "replica" in error["error"]
