"""Tenants on the routes in other servers' forms: nothing there passes by what holds on /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.registry import LoRARegistry
from loraplex.errors import AdapterFaultError
from loraplex.events import EventKind
from loraplex.tenants.limits import Limits
from tests.security.tenancy import Tenancy, tenancy
from tests.server.conftest import client_of

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi", "max_output_tokens": 5},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}
GENERATING = list(BODIES)[:2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Tenancy]:
    with tenancy(tmp_path) as made:
        yield made


def client_as(server: Tenancy, role: str) -> httpx.AsyncClient:
    """With the key as Anthropic's clients send it."""
    client = client_of(server.app)
    client.headers["x-api-key"] = server.keys[role]
    return client


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["model", "lora_path"])
async def test_an_adapter_of_another_tenant_is_as_one_that_is_not_there(server: Tenancy, path: str, field: str) -> None:
    async with client_as(server, "acme") as client:
        texts = []
        for name in ("beta/secret", "beta/nosuch", "private"):
            answer = await client.post(path, json={"model": "base", **BODIES[path], field: name})
            assert answer.status_code == 404
            told = answer.json()["error"]
            texts.append((told["type"], told["code"], told["param"], told["message"].replace(name, "NAME")))
        assert texts[0] == texts[1] == texts[2]
        for name in ("sql", "both", "public", "beta/lent"):
            assert (await client.post(path, json={**BODIES[path], "model": name})).status_code == 200
    names = [request.model for request in server.engine.requests]
    assert names == (["acme/sql", "acme/both", "public", "beta/lent"] if path in GENERATING else [])


@pytest.mark.parametrize("path", GENERATING)
async def test_usage_and_limits_are_the_tenants(server: Tenancy, path: str) -> None:
    async with client_as(server, "acme") as client:
        usage = (await client.post(path, json={**BODIES[path], "model": "sql"})).json()["usage"]
        (row,) = (await client.get("/v1/usage")).json()["data"]
        assert (row["adapter"], row["requests"], row["key"]) == ("sql", 1, server.key_ids["acme"])
        assert (row["prompt_tokens"], row["generated_tokens"]) == (usage["input_tokens"], usage["output_tokens"])
        server.store.change_tenant("acme", limits=Limits(requests_per_s=0.001))
        server.refresh()
        first = await client.post(path, json={**BODIES[path], "model": "sql"})
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        refused = await client.post(path, json={**BODIES[path], "model": "sql", "stream": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) > 1
        server.store.change_tenant("acme", limits=Limits(max_context=10))
        server.refresh()
        long = await client.post(path, json={**BODIES[path], "model": "sql"})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert long.json()["error"]["param"] in BODIES[path]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_error_says_nothing_of_others(server: Tenancy, path: str, is_stream: bool) -> None:
    await server.engine.on_registry(LoRARegistry.switch, "acme/sql", "private")
    error = AdapterFaultError("adapter 'acme/sql' answers with 'private', which is damaged at /srv/private")
    server.engine.fail_next(error, after_tokens=2 if is_stream else 0)
    async with client_as(server, "acme") as client:
        text = (await client.post(path, json={**BODIES[path], "model": "sql", "stream": is_stream})).text
    assert "error" in text
    assert "private" not in text
    assert "acme/" not in text


@pytest.mark.parametrize("path", GENERATING)
async def test_prefixes_are_salted_by_tenant(server: Tenancy, path: str) -> None:
    for role in ("acme", "beta"):
        async with client_as(server, role) as client:
            assert (await client.post(path, json={**BODIES[path], "model": "base"})).status_code == 200
    acme, beta = (request.cache_salt for request in server.engine.requests)
    assert acme != beta


async def test_a_key_is_one_whichever_header_it_comes_in(server: Tenancy) -> None:
    async with client_of(server.app) as client:
        given = {"x-api-key": server.keys["acme"]}
        assert (await client.get("/v1/usage", headers=given)).status_code == 200
        loaded = {"name": "new", "path": "/srv/acme/new"}
        assert (await client.post("/v1/adapters", json=loaded, headers=given)).status_code == 200
        audits = [each.event for each in server.engine.events.after(0).events if each.event.kind == EventKind.AUDIT]
        assert audits[-1].details["key"] == server.key_ids["acme"]
        both = {**given, "authorization": "Bearer wrong"}
        assert (await client.get("/v1/usage", headers=both)).status_code == 401, "the standard's header is what counts"
        read_only = {"x-api-key": server.keys["acme read-only"]}
        refused = await client.post("/v1/messages", json={**BODIES["/v1/messages"], "model": "sql"}, headers=read_only)
        assert (refused.status_code, refused.json()["type"]) == (403, "error")
        assert refused.json()["error"]["type"] == "permission_error"
