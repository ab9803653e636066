"""Names of models: what `model` selects, the cards, and never the base instead of an unknown adapter."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

URL = "/v1/completions"


async def text_of(client: httpx.AsyncClient, **fields: Any) -> str:
    response = await client.post(URL, json={"prompt": "hi", **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "text", "model"),
    [
        ({"model": "base"}, "[base] hi", "base"),
        ({"model": "sql"}, "[sql] hi", "sql"),
        ({"model": "base:sql"}, "[sql] hi", "sql"),
        ({"model": "base", "lora_path": "sql"}, "[sql] hi", "sql"),
        ({"model": "sql", "lora_path": "sql"}, "[sql] hi", "sql"),
        ({"lora_path": "chat"}, "[chat] hi", "chat"),
        ({"model": "base", "lora_path": ["sql"]}, "[sql] hi", "sql"),
        ({"model": "base", "lora_path": [None]}, "[base] hi", "base"),
        ({"model": "base", "lora_path": None}, "[base] hi", "base"),
    ],
)
async def test_what_a_request_means(client: httpx.AsyncClient, fields: dict[str, Any], text: str, model: str) -> None:
    response = await client.post(URL, json={"prompt": "hi", **fields})
    assert response.json()["choices"][0]["text"] == text
    assert response.json()["model"] == model


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "nope"}, "model"),
        ({"model": ""}, "model"),
        ({"model": "SQL"}, "model"),
        ({"model": "base:nope"}, "model"),
        ({"model": "base:"}, "model"),
        ({"model": "nope:sql"}, "model"),
        ({"model": "sql:chat"}, "model"),
        ({"model": "base", "lora_path": "nope"}, "lora_path"),
        ({"model": "base", "lora_path": "base"}, "lora_path"),
        ({"model": "nope", "lora_path": "sql"}, "model"),
    ],
)
@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
async def test_unknown_names_are_404(client: httpx.AsyncClient, url: str, fields: dict[str, Any], param: str) -> None:
    prompt = {"prompt": "hi"} if url == URL else {"messages": [{"role": "user", "content": "hi"}]}
    response = await client.post(url, json={**prompt, **fields})
    assert response.status_code == 404, response.text
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["type"] == "not_found_error"
    assert error["param"] == param


@pytest.mark.parametrize("fields", [{}, {"model": None}])
async def test_no_name_is_400(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await client.post(URL, json={"prompt": "hi", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"


async def test_two_names_for_one_request_are_400(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"prompt": "hi", "model": "sql", "lora_path": "chat"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "lora_path"


async def test_an_adapter_for_each_prompt(client: httpx.AsyncClient) -> None:
    body = {"model": "base", "prompt": ["a", "b", "c"], "lora_path": ["sql", None, "chat"]}
    answer = (await client.post(URL, json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["[sql] a", "[base] b", "[chat] c"]
    assert answer["model"] == "base"


async def test_every_served_name_is_the_base(engine: FakeAsyncEngine) -> None:
    config = ServerConfig(served_model_names=("gpt", "org/gpt:v1"))
    async with client_of(create_app(engine, config)) as client:
        assert await text_of(client, model="gpt") == "[base] hi"
        assert await text_of(client, model="org/gpt:v1") == "[base] hi"
        assert await text_of(client, model="org/gpt:v1:sql") == "[sql] hi"
        assert (await client.post(URL, json={"prompt": "hi", "model": "base"})).status_code == 404
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["gpt", "org/gpt:v1", "sql", "chat"]
        assert {card["parent"] for card in cards[2:]} == {"gpt"}


async def test_cards(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list"
    base, sql, _ = answer["data"]
    assert (base["id"], base["root"], base["parent"], base["max_model_len"]) == ("base", "/models/base", None, 512)
    assert (sql["id"], sql["root"], sql["parent"]) == ("sql", "/adapters/sql", "base")
    assert {card["object"] for card in answer["data"]} == {"model"}
    assert (await client.get("/v1/models/sql")).json() == sql
    assert (await client.get("/v1/models/base:sql")).json() == sql
    assert (await client.get("/v1/models/base")).json() == base
    assert (await client.get("/v1/models/nope")).status_code == 404


async def test_names_with_slashes_and_colons(engine: FakeAsyncEngine, client: httpx.AsyncClient) -> None:
    for name in ("org/sql", "v1:sql"):
        await engine.load_adapter(name, "/adapters/x")
        assert await text_of(client, model=name) == f"[{name}] hi"
        assert (await client.get(f"/v1/models/{name}")).json()["id"] == name


async def test_a_switched_name_answers_with_the_new_adapter(engine: FakeAsyncEngine, client: httpx.AsyncClient) -> None:
    await engine.switch_adapter("sql", "chat")
    assert await text_of(client, model="sql") == "[chat] hi"


async def test_an_unloaded_adapter_is_unknown(engine: FakeAsyncEngine, client: httpx.AsyncClient) -> None:
    await engine.unload_adapter("sql")
    assert (await client.post(URL, json={"prompt": "hi", "model": "sql"})).status_code == 404


async def test_an_adapter_that_is_unloaded_before_its_request_reaches_the_engine(
    engine: FakeAsyncEngine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = engine.registry.resolve if engine.registry else None
    assert resolve is not None

    def resolve_then_unload(name: str) -> object:
        found = resolve(name)
        monkeypatch.undo()
        assert engine.registry is not None
        engine.registry.unload(name)
        return found

    monkeypatch.setattr(engine.registry, "resolve", resolve_then_unload)
    response = await client.post(URL, json={"prompt": "hi", "model": "sql"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "adapter_not_found"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "base"}, 200),
        ({"model": "sql"}, 404),
        ({"model": "base:sql"}, 400),
        ({"model": "base", "lora_path": "sql"}, 400),
    ],
)
async def test_without_lora(fields: dict[str, Any], status: int) -> None:
    async with client_of(create_app(FakeAsyncEngine(enable_lora=False))) as client:
        response = await client.post(URL, json={"prompt": "hi", **fields})
        assert response.status_code == status, response.text
        if status == 400:
            assert response.json()["error"]["code"] == "lora_disabled"
        assert len((await client.get("/v1/models")).json()["data"]) == 1
