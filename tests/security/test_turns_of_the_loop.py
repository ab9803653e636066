"""What ends or is written for many prompts or clients at the same moment has many turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loraplex.server import ServerConfig, completions, create_app, openai_api, streaming
from loraplex.server.generation import Deadline, InFlight
from loraplex.server.openai_api import SOME_LOGPROBS
from loraplex.server.streaming import merge
from loraplex.testing import FakeAsyncEngine


class TurnCounter:
    """Counts the turns of the event loop, and what happens in each."""

    def __init__(self) -> None:
        self.happened: Counter[int] = Counter()
        self._turn = 0
        self._is_over = False
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._turn += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._next)

    def count(self) -> None:
        self.happened[self._turn] += 1

    def close(self) -> None:
        self._is_over = True


@pytest.fixture
async def turns() -> AsyncGenerator[TurnCounter, None]:
    counter = TurnCounter()
    yield counter
    counter.close()


@pytest.fixture
def app() -> FastAPI:
    return create_app(FakeAsyncEngine(), ServerConfig())


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


async def test_a_thousand_prompts_are_closed_some_at_a_time(turns: TurnCounter) -> None:
    async def source() -> AsyncGenerator[int, None]:
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            turns.count()

    merged = merge([source() for _ in range(1000)])
    assert (await anext(merged))[1] == 0
    await merged.aclose()
    assert turns.happened.total() == 1000
    assert max(turns.happened.values()) <= streaming.MAX_CANCELLED


async def test_a_second_cancellation_leaves_no_prompt_open(turns: TurnCounter) -> None:
    async def source() -> AsyncGenerator[int, None]:
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            turns.count()

    async def read() -> None:
        merged = merge([source() for _ in range(200)])
        try:
            async for _ in merged:
                pass
        finally:
            await merged.aclose()

    task = asyncio.ensure_future(read())
    for _ in range(300):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < turns.happened.total() < 200
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert turns.happened.total() == 200


async def test_prompts_that_expire_together_are_aborted_one_by_one(turns: TurnCounter) -> None:
    aborted: set[str] = set()

    class Engine(FakeAsyncEngine):
        async def abort(self, request_id: str) -> None:
            aborted.add(request_id)
            turns.count()

    in_flight = InFlight(Engine())
    deadline = Deadline.of(time.monotonic(), 0.01, None)
    with contextlib.ExitStack() as stack:
        for index in range(1000):
            stack.enter_context(in_flight.track(str(index), deadline))
        while len(aborted) < 1000:
            await asyncio.sleep(0)
    assert set(turns.happened.values()) == {1}


async def test_answers_that_end_together_are_written_one_by_one(
    app: FastAPI, turns: TurnCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = completions.completion_logprobs

    def counted(*values: Any) -> Any:
        turns.count()
        return make(*values)

    monkeypatch.setattr(completions, "completion_logprobs", counted)
    fields = {"model": "base", "prompt": "hi", "max_tokens": SOME_LOGPROBS + 1, "logprobs": 2, "ignore_eos": True}
    async with client_of(app) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=fields) for _ in range(30)))
    assert {answer.status_code for answer in answers} == {200}
    assert set(turns.happened.values()) == {1}
    assert turns.happened.total() == 30


async def test_choices_do_not_repeat_a_long_prompt(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream says the prompt's tokens in the first chunk of each choice; a whole answer says them once."""
    monkeypatch.setattr(openai_api, "MAX_REPEATED_TOKENS", 1000)
    fields: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 1}
    many = fields | {"n": 3, "return_token_ids": True}
    async with client_of(app) as client:
        refused = await client.post("/v1/chat/completions", json=many | {"stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_ids")
        for kept in (many, fields | {"n": 3, "stream": True}, many | {"n": 2, "stream": True}):
            assert (await client.post("/v1/chat/completions", json=kept)).status_code == 200
