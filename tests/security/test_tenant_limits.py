"""What a tenant may use over HTTP, and what it has used: 429, headers, adapters, and whose usage a caller reads."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from numpy import float32, full
from safetensors.numpy import save

from loraplex.adapter_store import AddOutcome, MemoryQuota
from loraplex.adapters.registry import OpenedAdapter
from loraplex.core import RequestOutput
from loraplex.errors import (
    AdapterNoRoomError,
    AdapterQuotaError,
    DatabaseUnavailableError,
    EngineDeadError,
    EngineOverloadedError,
    EngineShutdownError,
    JournalError,
    LoraplexError,
)
from loraplex.server import ServerConfig, adapter_api, create_app, verb_turns
from loraplex.server.tenants import adapter_quota, usage_api
from loraplex.tenants.limits import Limits
from loraplex.tenants.records import Role
from loraplex.testing import FakeAsyncEngine
from loraplex.testing.fake_adapter_store import FakeAdapterStore
from loraplex.testing.fake_engine import FakeText
from loraplex.testing.fake_tokenizer import FakeTokenizer
from tests.security.tenancy import Tenancy, tenancy
from tests.server.asgi_call import AsgiCall
from tests.server.conftest import client_of

BODY: dict[str, Any] = {"model": "sql", "prompt": "hello", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Tenancy]:
    with tenancy(tmp_path) as made:
        yield made


def limit(server: Tenancy, **limits: Any) -> None:
    server.store.change_tenant("acme", limits=Limits(**limits))
    server.refresh()


def hang_slow(server: Tenancy) -> tuple[threading.Event, threading.Event]:
    """What a load of /srv/acme/slow waits for, and what says that it has begun."""
    hang, began = threading.Event(), threading.Event()
    registry = server.engine.registry
    assert registry is not None
    open_adapter = registry._loader._open_adapter

    def slow(path: str) -> OpenedAdapter:
        if path == "/srv/acme/slow":
            began.set()
            hang.wait(60)
        return open_adapter(path)

    registry._loader._open_adapter = slow
    return hang, began


def client_as(server: Tenancy, role: str) -> httpx.AsyncClient:
    client = client_of(server.app)
    client.headers.update(server.headers(role))
    return client


# -------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(("url", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_too_many_requests(server: Tenancy, url: str, body: dict[str, Any], is_stream: bool) -> None:
    limit(server, requests_per_s=0.001)
    async with client_as(server, "acme") as client:
        first = await client.post(url, json={**body, "stream": is_stream})
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "1"
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-ratelimit-limit-tokens" not in first.headers
        num_requests = len(server.engine.requests)
        refused = await client.post(url, json={**body, "stream": is_stream})
        assert refused.status_code == 429
        assert 900 < int(refused.headers["retry-after"]) <= 1000
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["code"] == "tenant_limit"
        assert len(server.engine.requests) == num_requests, "it was not queued"
    async with client_as(server, "beta") as client:  # another tenant's are its own
        for _ in range(5):
            assert (await client.post(url, json={**body, "stream": is_stream})).status_code == 200


async def test_keys_of_a_tenant_share_its_limits(server: Tenancy) -> None:
    limit(server, requests_per_s=0.001)
    server.add_key("acme too", Role.TENANT, "acme")
    async with client_of(server.app) as client:
        statuses = [
            (await client.post("/v1/completions", json=BODY, headers=server.headers(key))).status_code
            for key in ("acme", "acme too")
        ]
    assert statuses == [200, 429]


async def test_tokens_of_prompts_and_answers(server: Tenancy) -> None:
    limit(server, tokens_per_minute=20)
    async with client_as(server, "acme") as client:
        first = await client.post("/v1/completions", json={**BODY, "max_tokens": 30})
        assert first.status_code == 200
        num_tokens = first.json()["usage"]["total_tokens"]
        assert num_tokens > 20
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        due = num_tokens - 20 + first.json()["usage"]["prompt_tokens"]
        assert 0 < int(refused.headers["retry-after"]) <= due * 3


async def test_a_prompt_that_the_engine_refuses_is_given_back(server: Tenancy) -> None:
    limit(server, tokens_per_minute=20)
    async with client_as(server, "acme") as client:
        for error in (EngineOverloadedError("full"), EngineDeadError("gone")) * 3:
            server.engine.fail_next(error)
            refused = await client.post("/v1/completions", json={**BODY, "prompt": "x" * 18})
            assert refused.status_code == error.http_status
            assert refused.json()["error"].get("code") != "tenant_limit"
        answer = await client.post("/v1/completions", json={**BODY, "prompt": "x" * 18})
        assert answer.status_code == 200
        server.engine.fail_next(EngineDeadError("gone"), after_tokens=1)
        refused = await client.post("/v1/completions", json={**BODY, "prompt": "x" * 18})
        assert refused.json()["error"]["code"] == "tenant_limit"


async def test_a_debt_ends_with_its_limit(server: Tenancy) -> None:
    limit(server, tokens_per_minute=20)
    async with client_as(server, "acme") as client:
        assert (await client.post("/v1/completions", json={**BODY, "max_tokens": 30})).status_code == 200
        limit(server)
        for _ in range(5):
            assert (await client.post("/v1/completions", json={**BODY, "max_tokens": 30})).status_code == 200
        await usage_of(client)
        limit(server, tokens_per_minute=20)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_completions_at_a_time_and_their_end(server: Tenancy) -> None:
    limit(server, concurrency=2)
    server.engine.hold(1)
    async with client_as(server, "acme") as client:
        call = AsgiCall(server.app, "/v1/completions", {**BODY, "n": 2, "stream": True}, headers=server.headers("acme"))
        assert await call.start() == 200
        refused = await client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        too_many = await client.post("/v1/completions", json={**BODY, "n": 3})
        assert too_many.status_code == 400
        call.disconnect()
        await call.task
        server.engine.resume()
        for _ in range(3):  # its places are free again, whatever became of it
            assert (await client.post("/v1/completions", json={**BODY, "n": 2})).status_code == 200
        for _ in range(3):
            server.engine.fail_next(EngineDeadError("gone"))
            assert (await client.post("/v1/completions", json={**BODY, "n": 2})).status_code == 503
        assert (await client.post("/v1/completions", json={**BODY, "n": 2})).status_code == 200


async def test_a_context_is_bounded(server: Tenancy) -> None:
    limit(server, max_context=10)
    async with client_as(server, "acme") as client:
        for body in ({**BODY, "max_tokens": 6}, {**BODY, "prompt": "x" * 10}, {**BODY, "prompt": ["a", "x" * 11]}):
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await client.post("/v1/completions", json={**BODY, "max_tokens": 4})).status_code == 200
        limit(server, max_context=40)
        chat = await client.post(
            "/v1/chat/completions", json={"model": "sql", "messages": [{"role": "user", "content": "x"}]}
        )
        assert chat.status_code == 200, chat.text
        assert chat.json()["usage"]["total_tokens"] <= 40, "what it does not say is what fits"
    assert server.engine.num_running == 0


@pytest.mark.parametrize(("url", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
async def test_a_default_of_a_model_is_made_smaller(server: Tenancy, url: str, body: dict[str, Any]) -> None:
    """`max_new_tokens` of a generation_config.json is not what the client asked for."""
    server.engine.texts["acme/sql"] = FakeText(FakeTokenizer(), defaults={"max_tokens": 2048}, digest="d" * 64)
    limit(server, max_context=100)
    async with client_as(server, "acme") as client:
        silent = {name: value for name, value in body.items() if name != "max_tokens"}
        answer = await client.post(url, json=silent)
        assert answer.status_code == 200, answer.text
        sent = server.engine.requests[-1]
        assert sent.params.max_tokens == 100 - len(sent.prompt_token_ids)
        refused = await client.post(url, json={**body, "max_tokens": 2048})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_parameters_of_many_prompts_are_checked_once(server: Tenancy) -> None:
    """A thousand prompts with many biases were made to fit one by one, and held the loop for 300 ms."""
    server.engine.texts["acme/sql"] = FakeText(FakeTokenizer(), defaults={"max_tokens": 2048}, digest="d" * 64)
    limit(server, max_context=100)
    body = {"model": "sql", "prompt": ["x" * (1 + number) for number in range(20)], "logit_bias": {"7": 1}}
    async with client_as(server, "acme") as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        sent = server.engine.requests
        assert [each.params.max_tokens for each in sent] == [100 - len(each.prompt_token_ids) for each in sent]
        assert len({id(each.params.logit_bias) for each in sent}) == 1
        refused = await client.post("/v1/completions", json={**body, "min_tokens": 90})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


async def test_adapters_and_pins(server: Tenancy) -> None:
    """acme has two adapters."""
    limit(server, adapters=3, pins=1)
    async with client_as(server, "acme") as client:
        bodies = [{"name": f"n{index}", "path": f"/srv/acme/{index}"} for index in range(6)]
        answers = await asyncio.gather(*(client.post("/v1/adapters", json=body) for body in bodies))
        assert sorted(answer.status_code for answer in answers) == [200, 429, 429, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "60"
        for method, url, body in (
            ("PUT", "/v1/adapters/other", {"path": "/srv/acme/other"}),
            ("POST", "/v1/adapters/sql/clone", {"name": "copy"}),
            ("POST", "/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "/srv/acme/other"}),
            ("POST", "/v1/adapters/switch", {"old": "sql", "new": "other", "new_path": "/srv/acme/other"}),
        ):
            assert (await client.request(method, url, json=body)).status_code == 429, url
        again = await client.put("/v1/adapters/sql", json={"path": "/srv/acme/sql2"})
        assert again.status_code == 200, "a reload adds no name"
        assert (await client.post("/v1/adapters/sql/pin")).status_code == 200
        assert (await client.post("/v1/adapters/sql/pin")).status_code == 200
        assert (await client.post("/v1/adapters/both/pin")).status_code == 429
        assert (await client.put("/v1/adapters/both", json={"is_pinned": True})).status_code == 429
        assert (await client.post("/v1/adapters/sql/unpin")).status_code == 200
        assert (await client.post("/v1/adapters/both/pin")).status_code == 200
        assert (await client.delete("/v1/adapters/both")).status_code == 200
        assert (await client.put("/v1/adapters/other", json={"path": "/srv/acme/other"})).status_code == 201


async def test_pins_beyond_a_share_of_memory(server: Tenancy, monkeypatch: pytest.MonkeyPatch) -> None:
    """They bind a tenant's own keys, whichever verb pins; an operator may give it more."""

    def check_pins(self: FakeAdapterStore, tenant: str, adapter_id: int | None) -> None:
        raise AdapterNoRoomError(f"{tenant} has its share")

    monkeypatch.setattr(FakeAdapterStore, "check_pins", check_pins)
    async with client_as(server, "acme") as client:
        pinned = {"name": "new", "path": "/srv/acme/new", "is_pinned": True}
        answers = [await client.post("/v1/adapters/sql/pin"), await client.post("/v1/adapters", json=pinned)]
        answers.append(await client.put("/v1/adapters/sql", json={"is_pinned": True}))
        assert [(each.status_code, each.json()["error"]["code"]) for each in answers] == [(503, "adapter_no_room")] * 3
        assert (await client.get("/v1/adapters/new")).status_code == 404
        assert (await client.post("/v1/adapters/sql/unpin")).status_code == 200
    async with client_as(server, "operator") as client:
        assert (await client.post("/v1/adapters/acme%2Fsql/pin")).status_code == 200


async def test_pins_ask_the_engine_in_their_turn_alone(server: Tenancy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand pins of a tenant took every thread of verbs, and other tenants' adapters were not loaded."""
    held, asked = threading.Event(), []
    monkeypatch.setattr(
        FakeAdapterStore, "check_pins", lambda self, tenant, number: asked.append(tenant) or held.wait(60)
    )
    routes = create_app(server.engine, server.app.state.context.config)
    async with client_of(routes) as client:
        url = "/v1/adapters/sql/pin"
        pins = [asyncio.ensure_future(client.post(url, headers=server.headers("acme"))) for _ in range(30)]
        while not asked:
            await asyncio.sleep(0.001)
        unpinned = await client.post("/v1/adapters/sql/unpin", headers=server.headers("beta"))
        assert unpinned.status_code == 200, "beta's has threads, and turns"
        assert asked == ["acme"]
        held.set()
        assert {answer.status_code for answer in await asyncio.gather(*pins)} == {200}


async def test_pins_that_wait_for_a_tenants_load_take_no_turn(server: Tenancy) -> None:
    """A tenant with a limit changes one adapter after another; what waited for its slow load kept others' places."""
    limit(server, adapters=9, pins=9)
    hang, began = hang_slow(server)
    async with client_as(server, "acme") as client, client_as(server, "operator") as operator:
        body = {"name": "slow", "path": "/srv/acme/slow"}
        loading = asyncio.ensure_future(client.post("/v1/adapters", json=body))
        await asyncio.to_thread(began.wait, 60)
        pins = [client.post("/v1/adapters/sql/pin") for _ in range(20)]
        pins += [client.put("/v1/adapters/sql", json={"is_pinned": True}) for _ in range(20)]
        waiting = [asyncio.ensure_future(pin) for pin in pins]
        await asyncio.sleep(0.1)
        assert (await operator.post("/v1/adapters/beta%2Fsql/evict")).status_code == 200
        assert (await client.post("/v1/adapters/sql/evict")).status_code == 200, "its own, too"
        hang.set()
        assert (await loading).status_code == 200
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


async def test_loads_that_wait_for_a_tenants_load_take_no_place(
    server: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them works at a time: 32 of a tenant with a limit held 31 places for nothing, and three tenants all."""
    limit(server, adapters=99)
    monkeypatch.setattr(adapter_api, "MAX_LOADS", 2)
    app = create_app(server.engine, server.app.state.context.config)
    hang, began = hang_slow(server)
    async with client_of(app) as client:
        acme, beta = server.headers("acme"), server.headers("beta")
        body = {"name": "slow", "path": "/srv/acme/slow"}
        waiting = [asyncio.ensure_future(client.post("/v1/adapters", json=body, headers=acme))]
        await asyncio.to_thread(began.wait, 60)
        for number in range(8):
            body = {"name": f"n{number}", "path": f"/srv/acme/{number}"}
            waiting.append(asyncio.ensure_future(client.post("/v1/adapters", json=body, headers=acme)))
        await asyncio.sleep(0.05)
        body = {"name": "new", "path": "/srv/beta/new"}
        answer = await asyncio.wait_for(client.post("/v1/adapters", json=body, headers=beta), 30)
        assert answer.status_code == 200
        hang.set()
        assert {each.status_code for each in await asyncio.gather(*waiting)} == {200}


@asynccontextmanager
async def during_a_slow_load(server: Tenancy) -> AsyncIterator[httpx.AsyncClient]:
    """A client of acme, whose turn a load has until the block ends."""
    hang, began = hang_slow(server)
    async with client_as(server, "acme") as client:
        body = {"name": "slow", "path": "/srv/acme/slow"}
        loading = asyncio.ensure_future(client.post("/v1/adapters", json=body))
        await asyncio.to_thread(began.wait, 60)
        try:
            yield client
        finally:
            hang.set()
            assert (await loading).status_code == 200


async def test_what_waits_for_a_tenants_load_is_refused_after_a_while(
    server: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited without an end, though its client might be gone."""
    limit(server, adapters=99, pins=99)
    verbs: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("POST", "/v1/adapters", {"json": {"name": "new", "path": "/srv/acme/new"}}),
        ("PUT", "/v1/adapters/new", {"json": {"path": "/srv/acme/new"}}),
        ("POST", "/v1/adapters/sql/clone", {"json": {"name": "new"}}),
        ("POST", "/v1/adapters/switch", {"json": {"old": "sql", "new": "new", "new_path": "/srv/acme/new"}}),
        ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "new", "lora_path": "/srv/acme/new"}}),
        ("POST", "/load_lora_adapter", {"json": {"lora_name": "new", "lora_path": "/srv/acme/new"}}),
        ("PUT", "/v1/adapters/sql/tensors", {"content": save({"lora_A": full(4, 1, float32)})}),
        ("POST", "/v1/adapters/sql/pin", {}),
    )
    async with during_a_slow_load(server) as client:
        monkeypatch.setattr(verb_turns, "PATIENCE_S", 0.01)
        for method, url, body in verbs:
            refused = await asyncio.wait_for(client.request(method, url, **body), 30)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1"), url
            assert "too_many_verbs" in refused.text or "as many changes" in refused.text, url
        assert (await client.post("/v1/adapters/sql/evict")).status_code == 200
        monkeypatch.undo()
    async with client_as(server, "acme") as client:
        assert (await client.post("/v1/adapters/sql/pin")).status_code == 200


async def test_so_many_changes_of_a_tenant_wait_for_its_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of loads of clients that had gone waited, and all were done later."""
    monkeypatch.setattr(adapter_quota, "MAX_WAITING", 2)
    with tenancy(tmp_path, limits=Limits(adapters=99)) as server:
        async with during_a_slow_load(server) as client:
            bodies = [{"name": f"n{number}", "path": f"/srv/acme/{number}"} for number in range(5)]
            posts = [asyncio.ensure_future(client.post("/v1/adapters", json=body)) for body in bodies]
            refused, waiting = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
            while len(refused) < 3:
                more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                refused |= more
            codes = [each.result().json()["error"]["code"] for each in refused]
            assert (codes, [each.result().status_code for each in refused]) == (["too_many_verbs"] * 3, [429] * 3)
            body = {"name": "new", "path": "/srv/beta/new"}
            other = await client.post("/v1/adapters", json=body, headers=server.headers("beta"))
            assert other.status_code == 200
        assert {(await each).status_code for each in waiting} == {200}


async def test_a_change_goes_by_what_is_known_of_its_caller_when_its_turn_comes(server: Tenancy) -> None:
    """A key was revoked, or a limit lowered, while a load waited for a slow one: it was done all the same."""
    limit(server, adapters=99)
    async with during_a_slow_load(server) as client:
        server.add_key("revoked", Role.TENANT, "acme")
        bodies = [{"name": f"n{number}", "path": f"/srv/acme/{number}"} for number in range(2)]
        headers = server.headers("revoked"), server.headers("acme")
        waiting = [
            asyncio.ensure_future(client.post("/v1/adapters", json=body, headers=head))
            for body, head in zip(bodies, headers, strict=True)
        ]
        await asyncio.sleep(0.05)
        server.store.revoke_key(server.key_ids["revoked"])
        limit(server, adapters=3)
    codes = [each.json()["error"]["code"] for each in await asyncio.gather(*waiting)]
    assert codes == ["invalid_api_key", "tenant_limit"]


async def test_a_root_that_a_tenant_lost_while_its_load_waited_is_not_read(tmp_path: Path) -> None:
    """Those of the hub and of stores were looked at before its turn came, and then no more."""
    path = "s3://bucket/acme/new"
    verbs: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("POST", "/v1/adapters", {"name": "new", "path": path}),
        ("PUT", "/v1/adapters/new", {"path": path}),
        ("POST", "/v1/adapters/switch", {"old": "sql", "new": "new", "new_path": path}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": path}),
    )
    with tenancy(tmp_path, limits=Limits(adapters=99), adapter_roots=("/srv", "s3://bucket")) as server:
        server.store.change_tenant("acme", ["/srv/acme", "s3://bucket/acme"])
        server.refresh()
        async with during_a_slow_load(server) as client:
            waiting = [asyncio.ensure_future(client.request(method, url, json=body)) for method, url, body in verbs]
            await asyncio.sleep(0.05)
            server.store.change_tenant("acme", ["/srv/acme"])
            server.refresh()
        errors = [each.json()["error"] for each in await asyncio.gather(*waiting)]
    assert [each["code"] for each in errors] == ["adapter_path_forbidden"] * 4
    assert [each["param"] for each in errors] == ["path", "path", "new_path", "lora_path"]


async def test_bytes_of_adapters(server: Tenancy) -> None:
    """One of the fake engine's has 1024; acme has two."""
    limit(server, adapter_bytes=3 * 1024 + 10)
    async with client_as(server, "acme") as client:
        first = await client.post("/v1/adapters", json={"name": "one", "path": "/srv/acme/one"})
        assert first.status_code == 200
        second = await client.post("/v1/adapters", json={"name": "two", "path": "/srv/acme/two"})
        assert second.status_code == 429, second.text
        assert (await client.get("/v1/adapters/two")).status_code == 404, "what was too large is gone"
        assert "4096 bytes" in second.text
    async with client_as(server, "operator") as client:  # the operator gives beyond a tenant's limits
        given = await client.post("/v1/adapters", json={"name": "acme/gift", "path": "/srv/private"})
        assert given.status_code == 200


async def test_bytes_in_memory_are_told_to_the_engine(server: Tenancy) -> None:
    """With each change, whoever made it, and in a server that starts."""
    server.store.change_tenant("acme", limits=Limits(device_bytes=7, pins=1))
    server.refresh()
    assert server.engine.store.quotas == {"acme": MemoryQuota(device_bytes=7)}
    async with client_as(server, "admin") as client:
        changed = await client.put("/v1/tenants/beta", json={"quota": {"host_bytes": 9, "device_bytes": 0}})
        assert changed.json()["quota"] == {"host_bytes": 9, "device_bytes": 0}
        told = {"acme": MemoryQuota(device_bytes=7), "beta": MemoryQuota(9, 0)}
        assert server.engine.store.quotas == told
        server.engine.store.quotas = {}
        create_app(server.engine, ServerConfig())
        assert server.engine.store.quotas == told
        assert (await client.put("/v1/tenants/beta", json={"quota": {}})).status_code == 200
        assert (await client.delete("/v1/tenants/acme")).status_code == 200
        assert server.engine.store.quotas == {"acme": MemoryQuota(device_bytes=7)}, "its adapters are still there"
        for bad in ({"host_bytes": -1}, {"device_bytes": 1.5}):
            assert (await client.put("/v1/tenants/beta", json={"quota": bad})).status_code in (400, 422)


async def test_a_limit_in_memory_is_answered_as_no_room(server: Tenancy, monkeypatch: pytest.MonkeyPatch) -> None:
    def promote(self: FakeAdapterStore, adapter_id: int) -> AddOutcome:
        raise AdapterQuotaError("adapter 'acme/sql' needs 9 bytes, and device_bytes of tenant acme is 7 bytes", "acme")

    monkeypatch.setattr(FakeAdapterStore, "promote_adapter", promote)
    async with client_as(server, "acme") as client:
        answer = await client.post("/v1/adapters/sql/preload")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_quota")
        assert answer.json()["error"]["message"].startswith("adapter 'sql' needs 9 bytes, and device_bytes of tenant")


async def test_bytes_of_tensors(server: Tenancy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as those of a directory, and gone when they are refused."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    limit(server, adapter_bytes=4 * 1024)
    async with client_as(server, "acme") as client:
        for size, status in ((2**8, 200), (2**12, 429), (2**8 + 1, 200)):
            body = save({"lora_A": full(size, 1, float32)})
            answer = await client.put("/v1/adapters/sql/tensors", content=body)
            assert answer.status_code == status, answer.text
        assert (await client.get("/v1/adapters/sql")).json()["version"] == 3
        new = await client.put("/v1/adapters/new/tensors", content=body)
        assert new.status_code == 404
    assert len(list(tmp_path.glob(".making-uploads-*/*-*"))) == 2


async def test_what_is_too_large_leaves_nothing_behind(tmp_path: Path) -> None:
    """No version to roll back to, no bytes that count, no version pushed out; versions that go make room."""

    def opened(path: str) -> OpenedAdapter:
        return OpenedAdapter(path, hashlib.sha256(path.encode()).hexdigest(), 100_000 if "big" in path else 1024, 8)

    with tenancy(tmp_path, open_adapter=opened) as server:
        registry = server.engine.registry
        assert registry is not None
        limit(server, adapter_bytes=3 * 1024)
        async with client_as(server, "acme") as client:
            newer = await client.put("/v1/adapters/sql", json={"path": "/srv/acme/newer"})
            assert (newer.status_code, newer.json()["version"]) == (200, 2)
            before, cards = registry.specs(), (await client.get("/v1/adapters")).json()
            for method, url, body in (
                ("PUT", "/v1/adapters/sql", {"path": "/srv/acme/big"}),
                ("POST", "/v1/adapters", {"name": "sql", "path": "/srv/acme/big", "load_inplace": True}),
                ("POST", "/v1/adapters", {"name": "new", "path": "/srv/acme/big"}),
                ("POST", "/v1/adapters/both/clone", {"name": "new"}),
                ("PUT", "/v1/adapters/both", {"path": "/srv/acme/newer"}),
                ("POST", "/v1/adapters/switch", {"old": "both", "new": "new", "new_path": "/srv/acme/big"}),
            ):
                refused = await client.request(method, url, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit"), (url, body)
                assert registry.specs() == before
                assert (await client.get("/v1/adapters")).json() == cards
            assert (await client.post("/v1/adapters/sql/rollback")).json()["version"] == 1
            assert (await client.put("/v1/adapters/sql", json={"version": 3})).status_code == 404
            again = await client.put("/v1/adapters/sql", json={"path": "/srv/acme/newest"})
            assert again.status_code == 200, "one version comes and one goes"
            limit(server, adapter_bytes=1024)
            same = await client.put("/v1/adapters/sql", json={"path": "/srv/acme/latest"})
            assert same.status_code == 200, "it has no more than before"


# --------------------------------------------------------------------------------------------------------------- usage


async def usage_of(client: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get("/v1/usage", params=query)
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


async def test_usage_is_what_answers_said(server: Tenancy) -> None:
    expected = {"prompt_tokens": 0, "generated_tokens": 0, "requests": 0}
    async with client_as(server, "acme") as client:
        for max_tokens in (1, 3, 20):
            answer = await client.post("/v1/completions", json={**BODY, "max_tokens": max_tokens, "n": 2})
            expected["prompt_tokens"] += answer.json()["usage"]["prompt_tokens"]
            expected["generated_tokens"] += answer.json()["usage"]["completion_tokens"]
            expected["requests"] += 1
        (row,) = await usage_of(client)
        assert {name: row[name] for name in expected} == expected
        assert (row["key"], row["tenant"], row["adapter"]) == (server.key_ids["acme"], "acme", "sql")
        assert row["waiting_s"] > 0
        streamed = {**BODY, "model": "public", "stream": True, "max_tokens": 7}
        assert (await client.post("/v1/completions", json=streamed)).status_code == 200
        (row,) = await usage_of(client, adapter="public")
        assert (row["generated_tokens"], row["prompt_tokens"]) == (7, 6)
        await client.post("/v1/completions", json={**BODY, "model": "sql:0.5,public:0.5"})
        await client.post("/v1/completions", json={**BODY, "model": "base"})
        await client.post("/v1/completions", json={**BODY, "model": "sql@1"})
        rows = {row["adapter"]: row["requests"] for row in await usage_of(client)}
        assert rows == {"sql": 4, "public": 1, "//mix": 1, "": 1}
        server.store.share("public", [])
        server.refresh()
        assert (await client.delete("/v1/adapters/sql")).status_code == 200
        for adapter, num in rows.items():  # a row that is listed is found by its name, whatever became of the adapter
            assert [row["requests"] for row in await usage_of(client, adapter=adapter)] == [num]


async def test_a_prompt_that_is_echoed_alone_costs_no_token_of_an_answer(server: Tenancy) -> None:
    """The engine draws one that the client does not get."""
    limit(server, tokens_per_minute=1000)
    async with client_as(server, "acme") as client:
        answer = await client.post("/v1/completions", json={**BODY, "max_tokens": 0, "echo": True, "n": 2})
        assert answer.json()["usage"]["completion_tokens"] == 0
        (row,) = await usage_of(client)
        assert (row["requests"], row["generated_tokens"]) == (1, 0)
        assert row["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("error", "requests"),
    [(EngineOverloadedError("full"), 0), (EngineShutdownError("ends"), 0), (EngineDeadError("gone"), 1)],
)
async def test_what_a_router_sends_elsewhere_is_counted_there(
    server: Tenancy, error: LoraplexError, requests: int
) -> None:
    async with client_as(server, "acme") as client:
        server.engine.fail_next(error)
        assert (await client.post("/v1/completions", json=BODY)).status_code >= 400
        rows = await usage_of(client)
        assert sum(row["requests"] for row in rows) == sum(row["errors"] for row in rows) == requests
        assert sum(row["prompt_tokens"] for row in rows) == 0


async def test_aborts_and_errors_are_counted_as_far_as_they_came(server: Tenancy) -> None:
    async with client_as(server, "acme") as client:
        server.engine.fail_next(EngineDeadError("gone"), after_tokens=2)
        await client.post("/v1/completions", json={**BODY, "stream": True, "max_tokens": 9})
        server.engine.hold(3)
        call = AsgiCall(
            server.app,
            "/v1/completions",
            {**BODY, "stream": True, "max_tokens": 9},
            headers=server.headers("acme"),
        )
        assert await call.start() == 200
        for _ in range(3):
            await call.next_chunk()
        (row,) = await usage_of(client)  # while it runs
        assert row["generated_tokens"] == 2 + 3
        call.disconnect()
        await call.task
        server.engine.resume()
        (row,) = await usage_of(client)
        assert (row["requests"], row["errors"], row["generated_tokens"]) == (2, 1, 5)


class DrawsOn(FakeAsyncEngine):
    """As an engine does: it does not wait for the reader of what it draws."""

    async def generate(  # type: ignore[override]
        self, *values: Any, on_output: Callable[[RequestOutput], None], **named: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        for output in [output async for output in super().generate(*values, on_output=on_output, **named)]:
            yield output


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_what_was_drawn_and_not_read_is_counted(tmp_path: Path, num_prompts: int) -> None:
    with tenancy(tmp_path, make_engine=DrawsOn) as server:
        limit(server, tokens_per_minute=10 * num_prompts)
        body = {**BODY, "prompt": ["hello"] * num_prompts, "stream": True, "max_tokens": 12}
        call = AsgiCall(server.app, "/v1/completions", body, headers=server.headers("acme"))
        assert await call.start() == 200
        await call.next_chunk()
        call.disconnect()
        await call.task
        async with client_as(server, "acme") as client:
            (row,) = await usage_of(client)
            assert (row["generated_tokens"], row["requests"]) == (12 * num_prompts, num_prompts)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 429


async def test_whose_usage_a_caller_reads(server: Tenancy) -> None:
    async with client_of(server.app) as client:
        for role, model in (("acme", "sql"), ("beta", "sql"), ("inference", "private"), ("operator", "beta/sql")):
            body = {**BODY, "model": model}
            answer = await client.post("/v1/completions", json=body, headers=server.headers(role))
            assert answer.status_code == 200, answer.text
    seen = {}
    for role in ("acme", "acme read-only", "beta", "inference", "operator", "admin", "read-only"):
        async with client_as(server, role) as client:
            seen[role] = {(row["tenant"], row["adapter"]) for row in await usage_of(client)}
    everything = {("acme", "acme/sql"), ("beta", "beta/sql"), ("", "private"), ("", "beta/sql")}
    assert seen == {
        "acme": {("acme", "sql")},
        "acme read-only": {("acme", "sql")},
        "beta": {("beta", "sql")},
        "inference": {("", "private")},
        "operator": everything,
        "admin": everything,
        "read-only": everything,
    }
    async with client_as(server, "acme") as client:
        for query in ({"tenant": "beta"}, {"key": server.key_ids["beta"]}, {"adapter": "beta/sql"}):
            assert await usage_of(client, **query) == []
    async with client_as(server, "operator") as client:
        assert len(await usage_of(client, tenant="beta")) == 1
        assert len(await usage_of(client, adapter="beta/sql")) == 2


@pytest.mark.parametrize("is_shared", [False, True])
async def test_usage_does_not_tell_what_others_had_cached(tmp_path: Path, is_shared: bool) -> None:
    with tenancy(tmp_path, share_prefix_cache=is_shared) as server:
        async with client_as(server, "acme") as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            (row,) = await usage_of(client)
            assert (row["cached_tokens"] is None) is is_shared
            text = (await client.get("/v1/usage", params={"format": "csv"})).text
            (line,) = csv.DictReader(io.StringIO(text))
            assert (line["cached_tokens"] == "") is is_shared
        async with client_as(server, "operator") as client:
            assert (await usage_of(client))[0]["cached_tokens"] is not None


async def test_looks_at_usage_that_hang_hold_nothing_else_up(server: Tenancy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.context.accounts is not None
    is_silent, barrier = threading.Event(), threading.Barrier(3)

    def rows(*_: Any) -> list[dict[str, Any]]:
        barrier.wait(30)
        is_silent.wait(30)
        return []

    monkeypatch.setattr(server.context.accounts.book, "rows", rows)
    async with client_of(server.app) as client:
        looks = [
            asyncio.ensure_future(client.get("/v1/usage", headers=server.headers(role))) for role in ("acme", "beta")
        ]
        await asyncio.to_thread(barrier.wait, 30)
        try:
            async with asyncio.timeout(10):
                for url in ("/v1/models", "/v1/adapters"):
                    assert (await client.get(url, headers=server.headers("operator"))).status_code == 200
        finally:
            is_silent.set()
        assert [(await look).status_code for look in looks] == [200, 200]


@pytest.mark.parametrize("error", [JournalError, DatabaseUnavailableError])
async def test_a_database_that_is_away_is_not_named_to_a_tenant(
    server: Tenancy, monkeypatch: pytest.MonkeyPatch, error: type[JournalError]
) -> None:
    assert server.context.accounts is not None

    def fails(*_: Any) -> None:
        raise error('connection to server at "10.0.0.5" failed for user "loraplex"')

    monkeypatch.setattr(server.context.accounts.book, "rows", fails)
    for role, is_told in (("acme", False), ("operator", True)):
        async with client_as(server, role) as client:
            answer = await client.get("/v1/usage")
            assert (answer.status_code, "10.0.0.5" in answer.text) == (error.http_status, is_told)


async def test_a_look_at_usage_ends_where_the_database_is_silent(
    server: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.context.accounts is not None
    ended = threading.Event()
    monkeypatch.setattr(server.context.accounts.book, "rows", lambda *_: ended.wait(60) and [])
    monkeypatch.setattr(usage_api, "MAX_LOOK_S", 0.05)
    async with client_as(server, "acme") as client:
        try:
            answer = await client.get("/v1/usage")
        finally:
            ended.set()
    assert answer.status_code == 503
    assert "try again later" in answer.json()["error"]["message"]


async def test_usage_as_csv_and_in_pages(server: Tenancy) -> None:
    async with client_as(server, "acme") as client:
        for model in ("sql", "public", "both", "base"):
            await client.post("/v1/completions", json={**BODY, "model": model})
        text = await client.get("/v1/usage", params={"format": "csv"})
        assert text.headers["content-type"].startswith("text/csv")
        rows = list(csv.DictReader(io.StringIO(text.text)))
        assert {row["adapter"] for row in rows} == {"", "sql", "public", "both"}
        assert all(row["requests"] == "1" for row in rows)
        found, after = [], {}
        while True:
            page = (await client.get("/v1/usage", params={"limit": 3, **after})).json()
            found += [row["adapter"] for row in page["data"]]
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert len(found) == len(set(found)) == 4
        rows, after = [], {}
        while True:
            text = await client.get("/v1/usage", params={"format": "csv", "limit": 1, **after})
            assert text.status_code == 200
            rows += list(csv.DictReader(io.StringIO(text.text)))
            if "x-next" not in text.headers:
                break
            after = {"after": text.headers["x-next"]}
        assert sorted(row["adapter"] for row in rows) == sorted(found)
        days = ({"first_day": "yesterday"}, {"last_day": "0000-00-00"})
        for query in (*days, {"after": "x"}, {"after": "x|y|%00"}, {"limit": 0}, {"color": "red"}):
            assert (await client.get("/v1/usage", params=query)).status_code == 400  # type: ignore[arg-type]


async def test_without_tenants_nothing_is_counted() -> None:
    app = create_app(FakeAsyncEngine({"sql": "/sql"}), ServerConfig())
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert not any(name.startswith("x-ratelimit") for name in answer.headers)
        assert (await client.get("/v1/usage")).json()["error"]["code"] == "no_tenants"
        for url in ("/v1/tenants", "/v1/keys", "/v1/shares"):
            assert (await client.get(url)).json()["error"]["code"] == "no_state"
    assert app.state.context.accounts is None
