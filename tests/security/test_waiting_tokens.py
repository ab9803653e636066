"""Prompts that wait are bounded in tokens: each is kept as a number in two processes."""

from __future__ import annotations

import asyncio

import httpx

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
