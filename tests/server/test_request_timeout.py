"""The deadline of a request: its `timeout` field and the server's --max-request-s, counted from its arrival."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.server.generation import Deadline
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of
from tests.server.live_server import LiveServer
from tests.server.sse import events

COMPLETION = ("/v1/completions", {"model": "sql", "prompt": "hi", "max_tokens": 8})
CHAT = ("/v1/chat/completions", {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8})


@pytest.mark.parametrize(("url", "body"), [COMPLETION, CHAT])
async def test_a_request_that_takes_longer_is_aborted(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, url: str, body: dict[str, Any]
) -> None:
    engine.hold(after_tokens=2)
    response = await client.post(url, json={**body, "timeout": 0.05})
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert "was not finished within 0.05 s (timeout) and was aborted" in error["message"]
    assert response.headers["x-should-retry"] == "false"
    assert len(engine.aborted) == 1
    assert engine.num_running == 0


async def test_one_that_does_not_is_as_ever(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    url, body = COMPLETION
    assert (await client.post(url, json={**body, "timeout": 60})).json()["usage"]["completion_tokens"] == 8
    assert engine.aborted == []


async def test_every_prompt_has_the_deadline(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    body = {"model": "sql", "prompt": ["a", "b", "c"], "max_tokens": 8, "timeout": 0.05}
    assert (await client.post("/v1/completions", json=body)).status_code == 504
    assert len(engine.aborted) == 3


async def test_a_stream_ends_with_an_error_event_after_what_it_had(
    client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    engine.hold(after_tokens=2)
    url, body = COMPLETION
    response = await client.post(url, json={**body, "stream": True, "timeout": 0.05})
    assert response.status_code == 200
    *chunks, error = events(response.text)
    assert sum(bool(chunk["choices"][0]["text"]) for chunk in chunks) == 2
    assert error["error"]["code"] == "request_timeout"
    assert len(engine.aborted) == 1


async def test_a_stream_without_a_token_has_the_status(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.hold()
    url, body = COMPLETION
    assert (await client.post(url, json={**body, "stream": True, "timeout": 0.05})).status_code == 504


async def test_the_servers_limit_holds_for_all(engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    async with client_of(create_app(engine, ServerConfig(max_request_s=0.05))) as client:
        url, body = COMPLETION
        for fields in ({}, {"timeout": 3600}):
            response = await client.post(url, json={**body, **fields})
            assert response.status_code == 504
            assert "within 0.05 s (--max-request-s)" in response.json()["error"]["message"]


@pytest.mark.parametrize("timeout", [0, -1, 1e9, "5", True, [1]])
async def test_what_is_no_timeout(client: httpx.AsyncClient, timeout: Any) -> None:
    url, body = COMPLETION
    response = await client.post(url, json={**body, "timeout": timeout})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")


def test_the_earlier_of_two_limits_counts() -> None:
    assert Deadline.of(100.0, None, None) is None
    assert Deadline.of(100.0, 5.0, None) == Deadline(105.0, 5.0, "timeout")
    assert Deadline.of(100.0, None, 3.0) == Deadline(103.0, 3.0, "--max-request-s")
    assert Deadline.of(100.0, 5.0, 3.0) == Deadline(103.0, 3.0, "--max-request-s")
    assert Deadline.of(100.0, 2.0, 3.0) == Deadline(102.0, 2.0, "timeout")


async def test_a_deadline_that_passed_before_the_engine_was_asked(
    client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    """What came before (the body, the tokens of the prompt) took all of the time."""
    url, body = COMPLETION
    assert (await client.post(url, json={**body, "timeout": 1e-9})).status_code == 504
    assert engine.requests == []


def test_the_openai_sdk_does_not_send_it_again(live: LiveServer) -> None:
    live.call(live.engine.hold)
    sdk = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=5)
    with pytest.raises(openai.APIStatusError) as raised:
        sdk.completions.create(model="a0", prompt="hi", max_tokens=4, extra_body={"timeout": 0.05})
    assert raised.value.status_code == 504
    assert len(live.engine.requests) == 1


async def test_a_client_that_leaves_before_its_deadline(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    url, body = COMPLETION
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.05):
            await client.post(url, json={**body, "timeout": 60})
    assert engine.num_running == 0
