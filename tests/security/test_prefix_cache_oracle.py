"""Attacks through what one key can learn of another's requests: cached prefixes, ids, events, cards, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loraplex.errors import AdapterContentChangedError, EngineDeadError
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.server import ServerConfig, create_app
from loraplex.server.api_keys import fingerprint
from loraplex.testing import FakeAsyncEngine
from tests.frontend.processes import demo_config
from tests.server.asgi_call import AsgiCall
from tests.server.conftest import client_of

ONE, TWO, ADMIN = "key-one-0123456789", "key-two-0123456789", "admin-key-0123456789"
KEYED: dict[str, Any] = {"api_keys": (ONE, TWO), "admin_api_keys": (ADMIN,)}
PROMPT = "the secret of the first key is a phrase that is longer than some blocks of the cache="


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def usage_of(client: httpx.AsyncClient, key: str | None, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}
    answer = await client.post("/v1/completions", json=body, headers={} if key is None else bearer(key))
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


async def cached(client: httpx.AsyncClient, key: str | None, **fields: Any) -> int:
    return int((await usage_of(client, key, **fields))["prompt_tokens_details"]["cached_tokens"])


# ------------------------------------------------------------------------------------------------- with the real engine


async def test_a_key_does_not_learn_what_another_has_sent() -> None:
    engine = await AsyncEngine.start(demo_config(), served_model_name="demo")
    try:
        await check_separate_keys(engine)
        await check_shared_keys(engine)
        async with client_of(create_app(engine, ServerConfig())) as client:  # without keys all is as it was
            assert await cached(client, None, prompt="?" + PROMPT) == 0
            assert await cached(client, None, prompt="?" + PROMPT) > 0
    finally:
        await engine.shutdown()


async def check_separate_keys(engine: AsyncEngine) -> None:
    async with client_of(create_app(engine, ServerConfig(**KEYED))) as client:
        assert await cached(client, ONE) == 0
        assert await cached(client, ONE) > 0
        assert await cached(client, TWO) == 0
        assert await cached(client, ADMIN) == 0
        assert await cached(client, TWO) > 0
        assert await cached(client, ONE, cache_salt="a") == 0  # a client's own salt still separates
        assert await cached(client, ONE, cache_salt="a") > 0
        assert await cached(client, TWO, cache_salt="a") == 0  # and says nothing of another's with the same
    async with client_of(create_app(engine, ServerConfig(**KEYED))) as client:
        assert await cached(client, ONE) == 0  # the secret of another server is another


async def check_shared_keys(engine: AsyncEngine) -> None:
    """Prefixes are reused, and not counted in the answers."""
    async with client_of(create_app(engine, ServerConfig(**KEYED, share_prefix_cache=True))) as client:
        before = (await engine.stats()).num_prefix_hit_tokens
        for key in (ONE, TWO):
            assert (await usage_of(client, key, prompt=PROMPT + "!"))["prompt_tokens_details"] is None
        assert (await engine.stats()).num_prefix_hit_tokens > before


# ---------------------------------------------------------------------------------------------- what reaches the engine


def app_of(engine: FakeAsyncEngine, **settings: Any) -> FastAPI:
    return create_app(engine, ServerConfig(**{**KEYED, **settings}))


async def salts_of(**settings: Any) -> list[str]:
    """What the engine got as salt from both keys, without and with a salt of the client's."""
    engine = FakeAsyncEngine()
    async with client_of(app_of(engine, **settings)) as client:
        for key in (ONE, TWO):
            for salt in (None, "s"):
                body = {"model": "base", "prompt": "hi", "max_tokens": 1, "cache_salt": salt}
                assert (await client.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200
            chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            assert (await client.post("/v1/chat/completions", json=chat, headers=bearer(key))).status_code == 200
    return [request.cache_salt for request in engine.requests]


async def test_salts_are_opaque_and_of_this_process() -> None:
    salts = await salts_of()
    one, one_s, one_chat, two, two_s, two_chat = salts
    assert (one_s, two_s) == (one + "s", two + "s")
    assert (one_chat, two_chat) == (one, two)
    assert one != two
    assert len(one) == len(two) == 64  # of one length: no salt of a client makes one owner another
    for key in (ONE, TWO):
        assert not any(key in salt or fingerprint(key) in salt for salt in salts)
    assert set(salts) & set(await salts_of()) == set()


async def test_shared_salts_are_the_clients_own() -> None:
    assert await salts_of(share_prefix_cache=True) == ["", "s", "", "", "s", ""]


@pytest.mark.parametrize(("keys", "has_count"), [((ONE,), True), ((ONE, TWO), False)])
async def test_a_shared_count_is_shown_when_it_can_only_be_ones_own(keys: tuple[str, ...], has_count: bool) -> None:
    engine = FakeAsyncEngine()
    app = create_app(engine, ServerConfig(api_keys=keys, share_prefix_cache=True))
    async with client_of(app) as client:
        body = {"model": "base", "prompt": "hi", "max_tokens": 1}
        usage = (await client.post("/v1/completions", json=body, headers=bearer(ONE))).json()["usage"]
        assert (usage["prompt_tokens_details"] is not None) == has_count
        chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        for path, fields in (("/v1/completions", body), ("/v1/chat/completions", chat)):
            fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
            text = (await client.post(path, json=fields, headers=bearer(ONE))).text
            assert ("cached_tokens" in text) == has_count


# --------------------------------------------------------------------------------------------------- requests of others


async def test_a_request_id_of_another_key_neither_collides_nor_aborts() -> None:
    engine = FakeAsyncEngine()
    app = app_of(engine)
    engine.hold(after_tokens=1)
    body = {"model": "base", "prompt": "hi", "stream": True, "request_id": "mine", "max_tokens": 4}
    calls = [
        AsgiCall(app, "/v1/completions", body, headers={**bearer(key), "x-request-id": "mine"}) for key in (ONE, TWO)
    ]
    assert [await call.start() for call in calls] == [200, 200]
    assert engine.num_running == 2
    first, second = (request.request_id for request in engine.requests)
    assert first != second
    calls[1].disconnect()
    await calls[1].task
    assert engine.aborted == [second]
    engine.resume()
    assert b"[DONE]" in await calls[0].rest()


async def test_nothing_over_http_ends_a_request_of_another() -> None:
    """There is no route that aborts by id; those that abort by adapter need an admin key."""
    engine = FakeAsyncEngine({"sql": "/sql"})
    app = app_of(engine)
    engine.hold(after_tokens=1)
    body = {"model": "sql", "prompt": "hi", "stream": True, "max_tokens": 4}
    call = AsgiCall(app, "/v1/completions", body, headers=bearer(ONE))
    assert await call.start() == 200
    async with client_of(app) as client:
        request_id = engine.requests[0].request_id
        for path in ("/abort", "/v1/abort", "/abort_request", f"/v1/completions/{request_id}"):
            for method in ("POST", "DELETE"):
                answer = await client.request(method, path, json={"request_id": request_id}, headers=bearer(TWO))
                assert answer.status_code in (404, 405)
        refused = await client.delete("/v1/adapters/sql?force=true&deadline_s=0", headers=bearer(TWO))
        assert refused.status_code == 403
    assert engine.num_running == 1
    engine.resume()
    assert b"[DONE]" in await call.rest()


# -------------------------------------------------------------------------------------------------- what a key may read


SECRET_PATH = "/srv/operators/place/sql"


async def test_an_inference_key_sees_no_path_and_no_use() -> None:
    engine = FakeAsyncEngine({"sql": SECRET_PATH})
    async with client_of(app_of(engine)) as client:
        body = {"model": "sql", "prompt": "hi", "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body, headers=bearer(ONE))).status_code == 200
        for path in ("/v1/models", "/v1/models/sql", "/v1/models/base", "/v1/adapters", "/v1/adapters/sql"):
            brief, full = [(await client.get(path, headers=bearer(key))).text for key in (TWO, ADMIN)]
            assert "/srv" not in brief
            assert "/models/base" not in brief
            assert ("/srv" in full) == ("base" not in path)
        card = (await client.get("/v1/adapters/sql", headers=bearer(TWO))).json()
        shown = {"name", "version", "digest", "rank", "lora_int_id", "alias_of", "aliases", "versions", "brings"}
        shown |= {"max_model_len", "rope_factor"}
        assert set(card) == shown
        assert set(card["versions"][0]) == {"version", "digest", "rank", "state"}
        model = (await client.get("/v1/models/sql", headers=bearer(TWO))).json()
        assert (model["id"], model["root"], model["parent"]) == ("sql", "sql", "base")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            AdapterContentChangedError(f"adapter 'sql': the content of {SECRET_PATH!r} has changed; reload it"),
            "adapter 'sql': the content of (a path of this server) has changed; reload it",
        ),
        (
            AdapterContentChangedError(
                "adapter 'sql' is gone: GET /v1/adapters lists those that are there, and 3 tokens/s"
            ),
            "adapter 'sql' is gone: GET /v1/adapters lists those that are there, and 3 tokens/s",
        ),
        (
            EngineDeadError(f"the engine process ended: {SECRET_PATH}/my.safetensors: truncated"),
            "the engine process ended: (a path of this server): truncated",
        ),
        (
            AdapterContentChangedError("adapter 'org/x': '/a b/c d' and ../up/x.json and ~/x/y (/opt/x) are away"),
            "adapter 'org/x': (a path of this server) and (a path of this server) and (a path of this server) "
            "((a path of this server)) are away",
        ),
    ],
)
async def test_errors_of_a_request_name_no_path_of_the_server(error: Exception, shown: str, is_stream: bool) -> None:
    for key, text in ((ONE, shown), (ADMIN, str(error))):
        engine = FakeAsyncEngine({"sql": SECRET_PATH})
        engine.fail_next(type(error)(str(error)), after_tokens=2)  # type: ignore[arg-type]
        async with client_of(app_of(engine)) as client:
            body = {"model": "sql", "prompt": "hi", "max_tokens": 4, "stream": is_stream}
            answer = await client.post("/v1/completions", json=body, headers=bearer(key))
            assert text in answer.text


async def test_without_admin_keys_every_key_reads_everything() -> None:
    """As before: what is above holds where an operator has a key of its own."""
    engine = FakeAsyncEngine({"sql": SECRET_PATH})
    async with client_of(create_app(engine, ServerConfig(api_keys=(ONE,)))) as client:
        assert SECRET_PATH in (await client.get("/v1/adapters", headers=bearer(ONE))).text
        for path in ("/v1/memory", "/v1/events?stream=false", "/v1/profile"):
            assert (await client.get(path, headers=bearer(ONE))).status_code == 200


async def test_the_open_paths_name_no_path_and_no_key() -> None:
    engine = FakeAsyncEngine({"sql": SECRET_PATH})
    app = app_of(engine)
    engine.hold(after_tokens=1)
    call = AsgiCall(app, "/v1/completions", {"model": "sql", "prompt": "hi", "stream": True}, headers=bearer(ONE))
    assert await call.start() == 200
    async with client_of(app) as client:
        texts = [(await client.get(path)).text for path in ("/health", "/ping", "/version", "/metrics")]
    assert 'running_lora_adapters="sql"' in texts[-1]  # by design: --guard-metrics, or a proxy, hides it
    for secret in (SECRET_PATH, ONE, fingerprint(ONE)):
        assert not any(secret in text for text in texts)
    call.disconnect()
    await asyncio.wait_for(call.task, 60)
