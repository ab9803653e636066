"""Names of models: what `model` selects, the cards, and never the base instead of an unknown adapter."""

from __future__ import annotations

import time
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


MIX = {"ids": ["sql", "chat"], "weights": [0.7, 0.3]}


@pytest.mark.parametrize(
    ("fields", "mix"),
    [
        ({"model": "sql:0.7,chat:0.3"}, "sql:0.7,chat:0.3"),
        ({"model": "chat:1,sql:-.5"}, "chat:1,sql:-0.5"),
        ({"model": "base:sql:1e-2,chat:3"}, "sql:0.01,chat:3"),
        ({"model": "sql@1:2,chat:3"}, "sql@1:2,chat:3"),
        ({"model": "base", "merged_adapters": MIX}, "sql:0.7,chat:0.3"),
        ({"merged_adapters": MIX}, "sql:0.7,chat:0.3"),
        ({"merged_adapters": {"ids": ["sql"], "weights": [1]}}, "sql:1"),
        (
            {"merged_adapters": {**MIX, "merge_strategy": "linear", "density": 0.0, "majority_sign_method": "total"}},
            "sql:0.7,chat:0.3",
        ),
    ],
)
@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
async def test_a_mix_of_adapters(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, url: str, fields: dict[str, Any], mix: str
) -> None:
    prompt = {"prompt": "hi"} if url == URL else {"messages": [{"role": "user", "content": "hi"}]}
    response = await client.post(url, json={**prompt, **fields})
    assert response.json()["model"] == mix
    assert str(engine.requests[-1].model) == mix


async def test_an_adapter_whose_name_looks_like_a_mix_wins(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    await engine.load_adapter("sql:0.7,chat:0.3", "/adapters/odd")
    assert await text_of(client, model="sql:0.7,chat:0.3", max_tokens=40) == "[sql:0.7,chat:0.3] hi"
    assert await text_of(client, model="sql:0.7,chat:0.4", max_tokens=40) == "[sql + chat] hi"


async def test_a_list_of_prompts_through_a_mix(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"prompt": ["a", "b"], "model": "sql:1,chat:2"})
    assert [choice["text"] for choice in response.json()["choices"]] == ["[sql + chat] a", "[sql + chat] b"]


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"model": "sql:0.7,nope:0.3"}, 404, "model", "`nope`"),
        ({"model": "sql:0.7,base:0.3"}, 404, "model", "`base`"),
        ({"model": "sql:0.7,chat"}, 404, "model", "does not exist"),
        ({"model": "sql:0.7,chat:nan"}, 404, "model", "does not exist"),
        ({"model": "sql:0.7"}, 404, "model", "does not exist"),
        ({"model": "sql:1,sql:2"}, 400, None, "'sql' twice"),
        ({"model": "sql:1,chat:1e999"}, 400, None, "weight inf"),
        ({"model": "sql:1,chat:-100.5"}, 400, None, "weights are within"),
        ({"model": ",".join(["sql:1"] * 9)}, 400, None, "a mix has 9 adapters"),
        ({"model": "sql:1,chat:1", "lora_path": "sql"}, 400, "lora_path", "names adapters twice"),
        ({"model": "sql", "merged_adapters": MIX}, 400, "merged_adapters", "names adapters twice"),
        ({"model": "sql:1,chat:1", "merged_adapters": MIX}, 404, "model", "does not exist"),
        ({"merged_adapters": MIX, "lora_path": "sql"}, 400, "merged_adapters", "names adapters twice"),
        ({"merged_adapters": {**MIX, "ids": ["sql", "nope"]}}, 404, "merged_adapters", "`nope`"),
        ({"merged_adapters": {**MIX, "ids": ["sql", "sql"]}}, 400, None, "'sql' twice"),
        ({"merged_adapters": {**MIX, "weights": [1.0]}}, 400, "merged_adapters", "2 ids and 1 weights"),
        ({"merged_adapters": {**MIX, "weights": [1.0, 101.0]}}, 400, "merged_adapters", "weights"),
        ({"merged_adapters": {"ids": [], "weights": []}}, 400, "merged_adapters", "ids"),
        ({"merged_adapters": {**MIX, "merge_strategy": "ties"}}, 400, "merged_adapters", "/v1/adapters/merge"),
        ({"merged_adapters": {**MIX, "density": 0.5}}, 400, "density", "density=0.5 is not supported"),
        ({"merged_adapters": {**MIX, "majority_sign_method": "frequency"}}, 400, "majority_sign_method", "frequency"),
    ],
)
async def test_what_is_no_mix_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    response = await client.post(URL, json={"prompt": "hi", **fields})
    error = response.json()["error"]
    assert (response.status_code, words in error["message"]) == (status, True), error
    assert (error["param"] or "").startswith(param or "")


async def test_a_mix_has_no_card_and_counts_tokens(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/sql:1,chat:1")).status_code == 404
    response = await client.post("/tokenize", json={"prompt": "hi", "model": "sql:1,chat:1"})
    assert response.status_code == 200


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


async def test_an_adapter_is_created_when_it_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base model's card says when the server started."""
    engine = FakeAsyncEngine({"old": "/old"})
    assert engine.registry is not None
    began = int(time.time())
    async with client_of(create_app(engine, ServerConfig())) as client:
        monkeypatch.setattr(engine.registry._loader, "_clock", lambda: 2e9 + 0.75)
        assert (await client.post("/v1/adapters", json={"name": "new", "path": "/new"})).status_code == 200
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert cards["new"]["created"] == 2_000_000_000
        assert cards["base"]["created"] - began in range(60)
        assert (await client.get("/v1/models/new")).json()["created"] == 2_000_000_000
        listed = {card["name"]: card for card in (await client.get("/v1/adapters")).json()["data"]}
        assert listed["new"]["loaded_time"] == 2e9 + 0.75
        assert int(listed["old"]["loaded_time"]) == cards["old"]["created"]
