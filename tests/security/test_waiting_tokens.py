"""Prompts that wait are bounded in tokens: each is kept as a number in two processes."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import httpx
import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine


async def test_prompts_of_more_tokens_than_may_wait_are_refused() -> None:
    engine = FakeAsyncEngine()
    engine.hold()
    app = create_app(engine, ServerConfig(max_waiting_tokens=250))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def ask(num_tokens: int) -> httpx.Response:
            fields = {"model": "base", "prompt": [5] * num_tokens, "max_tokens": 1}
            return await client.post("/v1/completions", json=fields)

        waiting = [asyncio.ensure_future(ask(100)) for _ in range(2)]
        while engine.num_running < 2:
            await asyncio.sleep(0)
        refused = await ask(51)
        assert refused.status_code == 429
        assert "have 200 tokens, this one has 51, and 250 are the limit" in refused.json()["error"]["message"]
        fits = asyncio.ensure_future(ask(50))
        while engine.num_running < 3:
            await asyncio.sleep(0)
        engine.resume()
        assert [answer.status_code for answer in await asyncio.gather(*waiting, fits)] == [200] * 3
        assert (await ask(300)).status_code == 200  # what comes alone has room


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream", "/"])
async def test_a_body_is_not_kept_while_its_request_waits(path: str) -> None:
    """A name in a frame kept it: a schema of 25 KB was 500 KB for as long as a request waits."""
    engine = FakeAsyncEngine({})
    schema: dict[str, Any] = {"type": "object", "examples": [{"kept": [number]} for number in range(500)]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    bodies: dict[str, Any] = {
        "/v1/completions": {"model": "base", "prompt": "hi", **form},
        "/v1/chat/completions": {"model": "base", "messages": [{"role": "user", "content": "hi"}], **form},
    }
    lorax = {"inputs": "hi", "parameters": {"response_format": {"type": "json_object", "schema": schema}}}
    engine.hold()
    transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
    gc.freeze()  # what other tests left need not be walked
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answering = asyncio.ensure_future(client.post(path, json=bodies.get(path, lorax)))
        while not engine.num_running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        gc.collect()
        kept = [each for each in gc.get_objects() if type(each) is dict and each.keys() == {"kept"}]
        num_kept = len([each for each in kept if not any(each is own for own in schema["examples"])])
        engine.resume()
        assert (await answering).status_code == 200
    gc.unfreeze()
    assert num_kept == 0
