"""Streams and clients that go away: errors before and in a stream, disconnects, merging, back to zero afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from loraplex.adapters.registry import LoRARef
from loraplex.errors import (
    AdapterUnavailableError,
    EngineDeadError,
    EngineOverloadedError,
    LoraplexError,
)
from loraplex.server import ServerConfig, create_app
from loraplex.server.api_error import forget_frames
from loraplex.server.context import ServerContext
from loraplex.server.engine_surface import TextSurface
from loraplex.server.openai_api import AnswerWriter
from loraplex.server.streaming import EventStream, merge
from loraplex.testing import FakeAsyncEngine
from tests.server.asgi_call import AsgiCall
from tests.server.conftest import client_of
from tests.server.sse import events

COMPLETION: dict[str, Any] = {"model": "sql", "prompt": "hi", "max_tokens": 10, "ignore_eos": True}
CHAT: dict[str, Any] = {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


async def until(condition: Any) -> None:
    """Let the loop run until the condition holds; pytest's timeout ends it otherwise."""
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize(("url", "body"), ROUTES)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineOverloadedError("too many"), 429, "engine_overloaded"),
        (AdapterUnavailableError("gone"), 503, "adapter_unavailable"),
        (EngineDeadError("dead"), 503, "engine_dead"),
    ],
)
async def test_errors_before_the_first_token_have_their_status(
    client: httpx.AsyncClient,
    engine: FakeAsyncEngine,
    url: str,
    body: dict[str, Any],
    is_stream: bool,
    error: LoraplexError,
    status: int,
    code: str,
) -> None:
    engine.fail_next(error)
    response = await client.post(url, json={**body, "stream": is_stream})
    assert response.status_code == status
    assert response.json()["error"] == {"message": str(error), "type": error.kind, "param": None, "code": code}
    assert ("retry-after" in response.headers) == (code != "adapter_unavailable")


@pytest.mark.parametrize(("url", "body"), ROUTES)
async def test_an_error_in_mid_stream_is_an_event(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, url: str, body: dict[str, Any]
) -> None:
    engine.fail_next(EngineDeadError("the engine ended"), after_tokens=3)
    response = await client.post(url, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200
    *chunks, last = events(response.content)
    assert len(chunks) >= 3
    assert all("error" not in chunk for chunk in chunks)
    assert last["error"]["code"] == "engine_dead"
    assert last["error"]["message"] == "the engine ended"


async def test_an_unforeseen_error_tells_the_client_nothing_of_its_cause(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("loraplex.server.completions.encode", explode)
    response = await client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"]
    streamed = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert "secret" not in streamed.text
    assert events(streamed.content)[-1]["error"]["type"] == "internal_error"


async def test_one_failed_prompt_ends_the_request_and_aborts_the_others(
    client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    engine.fail_next(EngineDeadError("ended"), after_tokens=2)
    response = await client.post("/v1/completions", json={**COMPLETION, "prompt": ["a", "b", "c"]})
    assert response.status_code == 503
    assert engine.num_running == 0
    assert len(engine.aborted) == 2


@pytest.mark.parametrize(("url", "body"), ROUTES)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_goes_away_before_the_first_token(
    app: FastAPI, engine: FakeAsyncEngine, url: str, body: dict[str, Any], is_stream: bool
) -> None:
    engine.hold()
    call = AsgiCall(app, url, {**body, "stream": is_stream})
    await until(lambda: engine.num_running == 1)
    call.disconnect()
    await call.task
    assert engine.num_running == 0
    assert len(engine.aborted) == 1


@pytest.mark.parametrize(("url", "body"), ROUTES)
async def test_a_client_that_goes_away_in_mid_stream(
    app: FastAPI, engine: FakeAsyncEngine, url: str, body: dict[str, Any]
) -> None:
    engine.hold(after_tokens=2)
    call = AsgiCall(app, url, {**body, "stream": True})
    assert await call.start() == 200
    for _ in range(2):
        assert b"data: " in (await call.next_chunk() or b"")
    call.disconnect()
    await call.task
    assert engine.num_running == 0
    assert len(engine.aborted) == 1


async def test_prompts_of_many_completions_begin_as_the_engine_reads(app: FastAPI, engine: FakeAsyncEngine) -> None:
    """Those that are sent are before others' in its socket, whatever becomes of them; one alone is always sent."""
    engine.hold(after_tokens=1)
    engine.is_behind = True
    many = AsgiCall(app, "/v1/completions", {**COMPLETION, "prompt": ["a", "b", "c"]})
    one = AsgiCall(app, "/v1/completions", COMPLETION)
    await until(lambda: engine.num_running == 1)
    await asyncio.sleep(0.05)
    assert engine.num_running == 1
    engine.is_behind = False
    await until(lambda: engine.num_running == 4)
    for call in (many, one):
        call.disconnect()
        await call.task
    assert engine.num_running == 0


async def test_a_client_of_several_prompts_that_goes_away(app: FastAPI, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    call = AsgiCall(app, "/v1/completions", {**COMPLETION, "prompt": ["a", "b", "c"], "stream": True})
    assert await call.start() == 200
    await until(lambda: engine.num_running == 3)
    call.disconnect()
    await call.task
    assert engine.num_running == 0
    assert len(engine.aborted) == 3


async def test_the_texts_of_adapters_are_made_no_longer_than_their_client_is_there(
    app: FastAPI, engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of hundreds may have a tokenizer of its own, which takes tens of milliseconds."""
    names, asked = [f"a{number}" for number in range(20)], list[str]()
    for name in names:
        await engine.load_adapter(name, f"/{name}")
    text_of = engine.text_of

    def texts(ref: LoRARef | None) -> TextSurface:
        asked.append("" if ref is None else ref.adapter_name)
        if len(asked) == 3:
            call.disconnect()
        return text_of(ref)

    monkeypatch.setattr(engine, "text_of", texts)
    call = AsgiCall(app, "/v1/completions", {**COMPLETION, "model": "base", "prompt": ["a"] * 20, "lora_path": names})
    await call.task
    assert asked == names[:3]
    assert engine.registry is not None
    assert engine.registry.num_references == 0


class Prompt:
    """Of a request."""


async def raising(prompt: Prompt, text: str) -> AsyncGenerator[int, None]:
    yield 1
    raise EngineOverloadedError(text)


async def test_errors_keep_nothing_of_their_request() -> None:
    """A cycle of an error and its frames has all prompts, and a server looks for cycles once in a while alone: 1,024
    prompts in requests that ended in 429 or 504 took 20 MB of it each."""
    prompts = [Prompt() for _ in range(4)]
    left = [weakref.ref(prompt) for prompt in prompts]
    stream = merge([raising(prompt, f"{index}") for index, prompt in enumerate(prompts)])
    del prompts
    gc.disable()
    try:
        with contextlib.suppress(EngineOverloadedError):
            async for _ in stream:
                pass
        del stream
        await asyncio.sleep(0)
        assert [prompt for prompt in left if prompt() is not None] == []
    finally:
        gc.enable()


async def test_what_the_frames_of_an_answered_error_had_is_let_go() -> None:
    prompt = Prompt()
    left = weakref.ref(prompt)

    def fail(held: Prompt, known: list[Exception]) -> None:
        known.append(EngineOverloadedError("full"))
        raise known[0]

    gc.disable()
    try:
        try:
            fail(prompt, [])
        except EngineOverloadedError as error:
            forget_frames(error)
        del prompt
        assert left() is None
    finally:
        gc.enable()


async def test_errors_that_caused_one_another_are_let_go_once() -> None:
    first = EngineOverloadedError("full")
    try:
        try:
            raise first
        except EngineOverloadedError:
            raise EngineDeadError("ended")  # noqa: B904  # its context is the first one
    except EngineDeadError as last:
        first.__cause__ = last
    forget_frames(first)


async def test_a_coroutine_that_goes_on_after_an_error_keeps_its_frame() -> None:
    """One error may be raised for many requests: another one's answer must not end what waits here."""
    go_on = asyncio.Event()
    known = EngineDeadError("ended")

    async def waits() -> str:
        try:
            raise known
        except EngineDeadError:
            await go_on.wait()
        return "went on"

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    forget_frames(known)
    go_on.set()
    assert await task == "went on"


async def test_a_stopped_server_task_aborts_too(app: FastAPI, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    call = AsgiCall(app, "/v1/completions", {**COMPLETION, "stream": True})
    assert await call.start() == 200
    assert await call.next_chunk()
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)
    assert engine.num_running == 0
    assert len(engine.aborted) == 1


async def test_a_client_that_goes_away_before_anything_is_sent_to_it() -> None:
    """The first item is there, the stream is about to begin: its source is closed although no event was read."""
    source = Source([1, 2, 3])
    stream = source.stream()
    await anext(stream)

    async def events_of() -> AsyncGenerator[bytes, None]:
        async for item in stream:
            yield bytes([item])

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def never(message: Message) -> None:
        await asyncio.Event().wait()

    await EventStream(events_of(), stream)({"type": "http", "asgi": {"spec_version": "2.3"}}, gone, never)
    assert source.is_closed


async def test_tokens_are_sent_as_they_come(app: FastAPI, engine: FakeAsyncEngine) -> None:
    """While the engine holds after two tokens, two chunks are there."""
    engine.hold(after_tokens=2)
    call = AsgiCall(app, "/v1/completions", {**COMPLETION, "stream": True})
    assert await call.start() == 200
    first, second = await call.next_chunk(), await call.next_chunk()
    assert first is not None
    assert second is not None
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "["
    engine.resume()
    assert len(events(second + await call.rest())) == 9


async def test_an_abort_by_another_hand_is_an_error_of_the_request(app: FastAPI, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    call = AsgiCall(app, "/v1/completions", {**COMPLETION, "stream": True})
    assert await call.start() == 200
    await call.next_chunk()
    await engine.abort(engine.requests[0].request_id)
    error = events(await call.rest())[-1]["error"]
    assert error["code"] == "request_aborted"
    assert "adapter 'sql'" in error["message"]


async def test_the_end_of_the_grace_tells_running_requests(app: FastAPI, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    streamed = AsgiCall(app, "/v1/completions", {**COMPLETION, "stream": True})
    whole = AsgiCall(app, "/v1/chat/completions", CHAT)
    assert await streamed.start() == 200
    await until(lambda: engine.num_running == 2)
    context: ServerContext = app.state.context
    assert len(context.in_flight) == 2
    await context.in_flight.abort_all()
    assert events(await streamed.rest())[-1]["error"]["code"] == "engine_shutdown"
    assert await whole.start() == 503
    await whole.rest()
    late = AsgiCall(app, "/v1/completions", COMPLETION)
    assert await late.start() == 503
    await late.rest()
    assert len(context.in_flight) == 0


async def test_many_requests_at_once_answer_as_one_at_a_time(client: httpx.AsyncClient) -> None:
    bodies = [
        {"model": model, "prompt": f"{model} {index}", "max_tokens": 40, "stream": index % 2 == 0}
        for index in range(10)
        for model in ("base", "sql", "chat")
    ]

    async def ask(body: dict[str, Any]) -> str:
        response = await client.post("/v1/completions", json=body)
        if not body["stream"]:
            return str(response.json()["choices"][0]["text"])
        return "".join(choice["text"] for chunk in events(response.content) for choice in chunk["choices"])

    together = await asyncio.gather(*map(ask, bodies))
    assert together == [f"[{body['model']}] {body['prompt']}" for body in bodies]
    assert together == [await ask(body) for body in bodies]


def test_the_server_does_not_count_what_it_does_not_run() -> None:
    context = ServerContext.create(FakeAsyncEngine(), ServerConfig())
    with context.in_flight.track("a", 1):
        assert len(context.in_flight) == 1
    assert len(context.in_flight) == 0


# ------------------------------------------------------------------------------------------------------------- merge


class Source:
    def __init__(self, items: list[int], error: Exception | None = None) -> None:
        self._items = items
        self._error = error
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for item in self._items:
                await asyncio.sleep(0)
                yield item
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


@pytest.mark.parametrize("num_sources", [1, 2, 5])
async def test_merge_keeps_the_order_of_each_source(num_sources: int) -> None:
    sources = [Source(list(range(index + 3))) for index in range(num_sources)]
    merged = [entry async for entry in merge([source.stream() for source in sources])]
    for index in range(num_sources):
        assert [item for which, item in merged if which == index] == list(range(index + 3))
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_merge_ends_all_with_the_first_error(num_sources: int) -> None:
    sources = [Source([1], ValueError("bad")), *(Source(list(range(1000))) for _ in range(num_sources - 1))]
    with pytest.raises(ValueError, match="bad"):
        async for _ in merge([source.stream() for source in sources]):
            pass
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_closing_a_merge_closes_its_sources(num_sources: int) -> None:
    sources = [Source(list(range(1000))) for _ in range(num_sources)]
    merged = merge([source.stream() for source in sources])
    await anext(merged)
    await merged.aclose()
    assert sources[0].is_closed
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", {"inputs": "hi" * 50, "parameters": {"return_full_text": True}}),
        ("/v1/responses", {"model": "base", "input": "hi" * 50, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": None, "stream": True, "stream_reasoning": False}),
    ],
)
async def test_an_event_that_says_all_again_counts_as_all(
    engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Where it counted as its one token it was written on the event loop, whatever its length."""
    sizes: list[int] = []
    write = AnswerWriter.write

    async def noted(self: AnswerWriter, render: Any, num_logprobs: int, size: int) -> bytes:
        sizes.append(size)
        return await write(self, render, num_logprobs, size)

    monkeypatch.setattr(AnswerWriter, "write", noted)
    engine.reply = "<think>" + "y" * 200
    async with client_of(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert sizes[-2] < 200
    assert sizes[-1] > 200 + ("hi" * 50 in str(body)) * 100
