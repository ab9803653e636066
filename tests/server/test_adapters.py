"""vLLM's load and unload routes, word for word, and Loraplex's own."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loraplex.adapters.registry import LoRARegistry
from loraplex.errors import (
    AdapterPathNotFoundError,
    AdapterTruncatedError,
    AdapterUnloadedError,
    AdapterValidationError,
    LoraplexError,
)
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine
from tests.server.asgi_call import AsgiCall
from tests.server.conftest import client_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NEW = {"lora_name": "new", "lora_path": "/adapters/new"}


async def names_of(client: httpx.AsyncClient) -> list[str]:
    return [card["id"] for card in (await client.get("/v1/models")).json()["data"][1:]]


# ------------------------------------------------------------------------------------------------------------ vLLM's


async def test_vllm_load_and_unload(client: httpx.AsyncClient) -> None:
    response = await client.post(LOAD, json=NEW)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert response.headers["x-loraplex-load-status"] == "loaded"
    assert await names_of(client) == ["sql", "chat", "new"]
    response = await client.post(UNLOAD, json={"lora_name": "new"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert await names_of(client) == ["sql", "chat"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"lora_name": "x"},
        {"lora_path": "/x"},
        {"lora_name": "", "lora_path": "/x"},
        {"lora_name": "x", "lora_path": None},
    ],
)
async def test_vllm_load_without_its_fields(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post(LOAD, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == "Both 'lora_name' and 'lora_path' must be provided."
    assert error["type"] == "InvalidUserInput"


@pytest.mark.parametrize("path", ["/adapters/sql", "/adapters/other"])
async def test_vllm_load_of_a_known_name(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(LOAD, json={"lora_name": "sql", "lora_path": path})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set 'load_inplace' "
        "to True."
    )
    assert response.json()["error"]["type"] == "InvalidUserInput"


async def test_vllm_load_in_place(client: httpx.AsyncClient) -> None:
    body = {"lora_name": "sql", "lora_path": "/adapters/other", "load_inplace": True}
    response = await client.post(LOAD, json=body)
    assert response.text == "Success: LoRA adapter 'sql' added successfully."
    assert response.headers["x-loraplex-load-status"] == "reloaded"
    assert (await client.get("/v1/adapters/sql")).json()["version"] == 2
    assert (await client.post(LOAD, json={**NEW, "load_inplace": True})).status_code == 200


@pytest.mark.parametrize("name", ["base", "base:x"])
async def test_vllm_load_under_a_name_of_the_base(client: httpx.AsyncClient, name: str) -> None:
    response = await client.post(LOAD, json={"lora_name": name, "lora_path": "/x"})
    assert response.status_code == 400
    assert "base" in response.json()["error"]["message"]


async def test_vllm_unload_errors(client: httpx.AsyncClient) -> None:
    response = await client.post(UNLOAD, json={})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "'lora_name' needs to be provided to unload a LoRA adapter."
    response = await client.post(UNLOAD, json={"lora_name": "nope"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "The lora adapter 'nope' cannot be found."
    assert response.json()["error"]["type"] == "NotFoundError"


async def test_vllm_unload_checks_the_number_it_is_sent(client: httpx.AsyncClient) -> None:
    await client.post("/v1/adapters", json={"name": "n", "path": "/n", "lora_int_id": 7})
    assert (await client.post(UNLOAD, json={"lora_name": "n", "lora_int_id": 8})).status_code == 400
    assert (await client.post(UNLOAD, json={"lora_name": "n", "lora_int_id": 7})).status_code == 200


@pytest.mark.parametrize("body", [{**NEW, "is_3d_lora_weight": True}, {**NEW, "x": 1}, {**NEW, "load_inplace": "yes"}])
async def test_vllm_load_refuses_what_it_does_not_honour(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await client.post(LOAD, json=body)).status_code == 400
    assert (await client.post(LOAD, json={**NEW, "is_3d_lora_weight": False})).status_code == 200


@pytest.mark.parametrize("url", [LOAD, "/v1/adapters"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (AdapterPathNotFoundError("no such path"), 404, "adapter_path_not_found"),
        (AdapterTruncatedError("cut off"), 400, "adapter_truncated"),
        (AdapterValidationError.from_reasons("new", ["r is 0", "no lora_B"]), 400, "adapter_validation"),
    ],
)
async def test_load_errors_are_distinct_and_not_sticky(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, url: str, error: LoraplexError, status: int, code: str
) -> None:
    body = NEW if url == LOAD else {"name": "new", "path": "/adapters/new"}
    engine.errors_by_path["/adapters/new"] = error
    response = await client.post(url, json=body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["message"] == str(error)
    del engine.errors_by_path["/adapters/new"]
    assert (await client.post(url, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("url", "body", "meant"),
    [
        (LOAD, {"name": "x", "lora_path": "/x"}, "lora_name"),
        (LOAD, {"lora_name": "x", "path": "/x"}, "lora_path"),
        (UNLOAD, {"name": "x"}, "lora_name"),
        ("/v1/adapters", {"lora_name": "x", "path": "/x"}, "name"),
        ("/v1/adapters", {"name": "x", "lora_path": "/x"}, "path"),
    ],
)
async def test_fields_of_the_other_load_route_are_pointed_at_this_one(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], meant: str
) -> None:
    error = (await client.post(url, json=body)).json()["error"]
    assert error["message"].endswith(f": did you mean {meant!r}?")
    assert error["code"] == "unknown_field"


async def test_ten_loads_of_one_adapter_at_once(client: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(client.post(LOAD, json=NEW) for _ in range(10)))
    assert {answer.status_code for answer in answers} <= {200, 400}
    assert 200 in {answer.status_code for answer in answers}
    assert (await client.get("/v1/adapters/new")).json()["version"] == 1


# --------------------------------------------------------------------------------------------------------------- own


async def test_own_load_says_what_happened() -> None:
    engine = FakeAsyncEngine(max_resident=1)
    async with client_of(create_app(engine)) as client:
        answers = [
            (await client.post("/v1/adapters", json=body)).json()
            for body in (
                {"name": "a", "path": "/a", "lora_int_id": 3},
                {"name": "a", "path": "/a"},
                {"name": "b", "path": "/b"},
                {"name": "b", "path": "/c", "load_inplace": True},
            )
        ]
        assert [answer["status"] for answer in answers] == [
            "loaded",
            "already_loaded",
            "loaded_with_eviction",
            "reloaded",
        ]
        assert answers[2]["evicted"] == ["a"]
        assert answers[0]["lora_int_id"] == 3
        assert answers[3]["version"] == 2
        response = await client.post("/v1/adapters", json={"name": "a", "path": "/other"})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "adapter_conflict"


async def test_list_and_show(client: httpx.AsyncClient) -> None:
    cards = (await client.get("/v1/adapters")).json()["data"]
    assert [card["name"] for card in cards] == ["sql", "chat"]
    card = cards[0]
    assert card == (await client.get("/v1/adapters/sql")).json()
    for field in ("tier", "bytes", "rank", "references", "last_used_time", "version", "digest", "path", "is_pinned"):
        assert field in card
    assert (card["tier"], card["rank"], card["references"]) == ("device", 8, 0)
    response = await client.get("/v1/adapters/nope")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "adapter_not_found"


async def test_references_are_counted_while_a_request_runs(
    app: FastAPI, client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    engine.hold(after_tokens=1)
    call = AsgiCall(app, "/v1/completions", {"model": "sql", "prompt": "hi", "stream": True})
    await call.start()
    assert (await client.get("/v1/adapters/sql")).json()["references"] == 1
    answer = (await client.delete("/v1/adapters/sql")).json()
    assert answer == {"name": "sql", "version": 1, "is_drained": False, "references": 1, "aborted": 0}
    assert (await client.post("/v1/completions", json={"model": "sql", "prompt": "hi"})).status_code == 404
    engine.resume()
    assert b"error" not in await call.rest()


async def test_pin_unpin_evict_preload(client: httpx.AsyncClient) -> None:
    async def post(verb: str) -> bool:
        response = await client.post(f"/v1/adapters/sql/{verb}")
        assert response.status_code == 200, response.text
        return bool(response.json()["has_changed"])

    async def card() -> dict[str, Any]:
        answer: dict[str, Any] = (await client.get("/v1/adapters/sql")).json()
        return answer

    assert [await post("pin"), await post("pin")] == [True, False]
    assert (await card())["is_pinned"]
    assert [await post("unpin"), await post("unpin")] == [True, False]
    assert [await post("evict"), await post("evict")] == [True, False]
    assert (await card())["tier"] == "host"
    assert [await post("preload"), await post("preload")] == [True, False]
    assert (await card())["tier"] == "device"
    for verb in ("pin", "unpin", "evict", "preload"):
        assert (await client.post(f"/v1/adapters/nope/{verb}")).status_code == 404


async def test_switch(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/adapters/switch", json={"old": "sql", "new": "chat"})).json()
    assert (answer["old"], answer["new"], answer["is_old_active"]) == ("sql", "chat", True)
    assert answer["evict_s"] is not None
    assert (await client.get("/v1/adapters/sql")).json()["alias_of"] == "chat"
    body = {"old": "chat", "new": "fresh", "new_path": "/fresh"}
    assert (await client.post("/v1/adapters/switch", json=body)).status_code == 200
    back = (await client.post("/v1/adapters/chat/rollback")).json()
    assert (back["status"], back["name"], back["previous_version"]) == ("moved", "chat", None)
    forth = (await client.post("/v1/adapters/chat/rollback")).json()
    assert (forth["status"], forth["name"], forth["previous_version"]) == ("moved", "fresh", 1)
    assert (await client.post("/v1/adapters/switch", json={"old": "sql", "new": "nope"})).status_code == 404
    assert (await client.post("/v1/adapters/switch", json={"old": "sql", "new": "sql"})).status_code == 400
    assert (await client.post("/v1/adapters/switch", json={"old": "sql"})).status_code == 400


async def test_a_switch_says_whether_there_was_something_to_evict(client: httpx.AsyncClient) -> None:
    """Loaded or not is another question: an `old` on the host is redirected all the same."""
    await client.post("/v1/adapters/sql/evict")
    answer = (await client.post("/v1/adapters/switch", json={"old": "sql", "new": "chat"})).json()
    assert not answer["is_old_active"]
    assert (await client.get("/v1/adapters/sql")).json()["alias_of"] == "chat"
    answer = (await client.post("/v1/adapters/switch", json={"old": "nope", "new": "chat"})).json()
    assert not answer["is_old_active"]
    assert (await client.get("/v1/adapters/nope")).status_code == 404


async def test_put_creates_reloads_and_keeps_what_is_equal(client: httpx.AsyncClient) -> None:
    async def put(**body: Any) -> tuple[int, dict[str, Any]]:
        response = await client.put("/v1/adapters/new", json=body)
        return response.status_code, response.json()

    status, created = await put(path="/one", lora_int_id=9)
    assert (status, created["status"], created["version"], created["lora_int_id"]) == (201, "loaded", 1, 9)
    status, again = await put(path="/one")
    assert (status, again["status"], again["version"]) == (200, "already_loaded", 1)
    status, replaced = await put(path="/two", is_pinned=True)
    assert (status, replaced["status"], replaced["version"], replaced["previous_version"]) == (200, "reloaded", 2, 1)
    assert (await client.get("/v1/adapters/new")).json()["is_pinned"]
    status, moved = await put(version=1, is_pinned=False)
    assert (status, moved["status"], moved["version"]) == (200, "moved", 1)
    assert not (await client.get("/v1/adapters/new")).json()["is_pinned"]
    assert (await put(is_pinned=True))[1]["status"] == "already_loaded"
    assert (await client.get("/v1/adapters/new")).json()["is_pinned"]
    assert (await put(version=3))[0] == 404


async def test_put_of_an_alias_leaves_the_pin_of_what_answers(client: httpx.AsyncClient) -> None:
    await client.post("/v1/adapters/chat/pin")
    body = {"path": "/one", "alias_of": "chat", "is_pinned": False}
    for status in (201, 200):
        answer = await client.put("/v1/adapters/new", json=body)
        assert (answer.status_code, answer.json()["name"]) == (status, "chat")
    card = (await client.get("/v1/adapters/new")).json()
    assert (card["path"], card["alias_of"], card["version"]) == ("/one", "chat", 1)
    assert (await client.get("/v1/adapters/chat")).json()["is_pinned"]


async def test_put_gives_a_number(client: httpx.AsyncClient) -> None:
    assert (await client.put("/v1/adapters/sql", json={"lora_int_id": 4})).json()["lora_int_id"] == 4
    assert (await client.put("/v1/adapters/sql", json={"lora_int_id": 5})).status_code == 400
    assert (await client.put("/v1/adapters/chat", json={"lora_int_id": 4})).status_code == 400


@pytest.mark.parametrize("body", [{"lora_int_id": 4}, {"is_pinned": True}])
async def test_put_without_a_path_loads_nothing_that_is_unloaded_meanwhile(
    engine: FakeAsyncEngine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    """What bounds loads is not asked by it: the tenant's quota, its roots, the turns of what opens files."""
    on_registry = engine.on_registry

    async def too_late(verb: Any, *args: Any, **kwargs: Any) -> Any:
        if verb is not LoRARegistry.describe:
            monkeypatch.setattr(engine, "on_registry", on_registry)
            await on_registry(LoRARegistry.unload, "sql")
        return await on_registry(verb, *args, **kwargs)

    monkeypatch.setattr(engine, "on_registry", too_late)
    response = await client.put("/v1/adapters/sql", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "adapter_not_found")
    assert await names_of(client) == ["chat"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "nothing is to be changed"),
        ({"path": None}, "nothing is to be changed"),
        ({"path": "/x", "version": 1}, "path and version exclude each other"),
        ({"path": "/x", "text_digest": ""}, "send digest too"),
        ({"alias_of": "chat"}, "send path"),
        ({"path": "/x", "alias_of": "chat", "is_pinned": True}, "no is_pinned"),
        ({"path": "/x", "alias_of": "sql"}, "cannot answer for itself"),
        ({"version": 0}, "version"),
        ({"path": "/x", "colour": 1}, "unknown field 'colour'"),
    ],
)
async def test_put_refuses(client: httpx.AsyncClient, body: dict[str, Any], text: str) -> None:
    response = await client.put("/v1/adapters/sql", json=body)
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]
    assert (await client.get("/v1/adapters/sql")).json()["version"] == 1


@pytest.mark.parametrize(
    ("method", "url", "body", "param"),
    [
        ("POST", "/v1/adapters", {"name": "base", "path": "/x"}, "name"),
        ("POST", "/v1/adapters", {"name": "x@2", "path": "/x"}, "name"),
        ("POST", "/v1/adapters", {"name": "x", "path": " "}, "path"),
        ("POST", "/v1/adapters", {"name": "sql", "path": "/other"}, "path"),
        ("PUT", "/v1/adapters/base", {"path": "/x"}, "name"),
        ("PUT", "/v1/adapters/sql", {}, "path"),
        ("PUT", "/v1/adapters/sql", {"path": "/x", "version": 1}, "version"),
        ("POST", LOAD, {"lora_name": "base:x", "lora_path": "/x"}, "lora_name"),
        ("POST", LOAD, {"lora_name": "x", "lora_path": " "}, "lora_path"),
        ("POST", LOAD, {"lora_name": "x"}, "lora_path"),
        ("POST", LOAD, {"lora_name": "sql", "lora_path": "/x"}, "lora_name"),
        ("POST", UNLOAD, {"lora_name": "sql", "lora_int_id": 5}, "lora_int_id"),
        ("POST", "/v1/adapters/switch", {"old": "base", "new": "sql"}, "old"),
        ("POST", "/v1/adapters/switch", {"old": "sql", "new": "sql"}, "new"),
    ],
)
async def test_the_field_that_is_refused_is_named(
    client: httpx.AsyncClient, method: str, url: str, body: dict[str, Any], param: str
) -> None:
    response = await client.request(method, url, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert "Value error" not in response.text


async def test_an_unload_during_a_load_is_409(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.errors_by_path["/called/off"] = AdapterUnloadedError("adapter 'x' was unloaded while it was being loaded")
    response = await client.put("/v1/adapters/x", json={"path": "/called/off"})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "adapter_unloaded")


async def test_put_reads_what_the_server_may_read_only() -> None:
    config = ServerConfig(adapter_roots=("/nowhere",))
    async with client_of(create_app(FakeAsyncEngine(), config)) as client:
        response = await client.put("/v1/adapters/x", json={"path": "/etc"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "adapter_path_forbidden")


async def test_verbs_look_one_name_up(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unload copied the table of all names, in the event loop, to look one up."""
    monkeypatch.setattr(LoRARegistry, "refs", lambda registry: pytest.fail("all names were copied"))
    assert (await client.post(LOAD, json=NEW)).status_code == 200
    assert (await client.post(UNLOAD, json={"lora_name": "new"})).status_code == 200
    assert (await client.post("/v1/adapters/sql/clone", json={"name": "copy"})).status_code == 200


async def test_versions_and_rollback(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/adapters/sql/rollback")).status_code == 404
    await client.put("/v1/adapters/sql", json={"path": "/adapters/better"})
    answer = (await client.post("/v1/adapters/sql/rollback")).json()
    assert (answer["status"], answer["version"], answer["previous_version"]) == ("moved", 1, 2)
    card = (await client.get("/v1/adapters/sql")).json()
    assert [(each["version"], each["state"], each["path"]) for each in card["versions"]] == [
        (2, "kept", "/adapters/better"),
        (1, "current", "/adapters/sql"),
    ]
    assert (card["loads"], card["requests"]) == (2, 0)
    for model, status in (("sql@2", 200), ("base:sql@1", 200), ("sql@3", 404), ("nope@1", 404)):
        response = await client.post("/v1/completions", json={"model": model, "prompt": "hi"})
        assert response.status_code == status, model
    response = await client.get("/v1/models/sql@2")
    assert (response.json()["id"], response.json()["root"]) == ("sql@2", "/adapters/better")
    assert (await client.get("/v1/models/sql@3")).status_code == 404
    assert (await client.post("/v1/adapters", json={"name": "sql@4", "path": "/x"})).status_code == 400
    assert (await client.post("/v1/adapters/sql@2/pin")).status_code == 400


async def test_verbs_on_a_kept_version(client: httpx.AsyncClient) -> None:
    """What can be done to one version is done to it; what is done to a name says so; 404: no such version."""
    await client.put("/v1/adapters/sql", json={"path": "/adapters/better"})
    card = (await client.get("/v1/adapters/sql@1")).json()
    assert (card["name"], card["version"], card["path"], card["is_pinned"]) == ("sql", 1, "/adapters/sql", False)
    assert (await client.get("/v1/adapters/sql@2")).json()["version"] == 2
    assert (await client.post("/v1/adapters/sql@1/preload")).json()["has_changed"]
    assert (await client.get("/v1/adapters/sql@1")).json()["tier"] == "device"
    assert (await client.get("/v1/adapters/sql")).json()["tier"] == "device"
    assert (await client.post("/v1/adapters/sql@1/evict")).json() == {
        "name": "sql@1",
        "has_changed": True,
        "evicted": [],
    }
    assert (await client.get("/v1/adapters/sql@1")).json()["tier"] != "device"
    assert not (await client.post("/v1/adapters/sql@1/unpin")).json()["has_changed"]
    response = await client.post("/v1/adapters/sql@1/pin")
    assert (response.status_code, response.json()["error"]["message"]) == (
        400,
        "'sql@1' is not the version that answers for 'sql', and only that is pinned; move the name to it first, or "
        "preload it",
    )


WHOLE_NAME_VERBS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("DELETE", "/v1/adapters/{}", None),
    ("POST", "/v1/adapters/{}/rollback", None),
    ("PUT", "/v1/adapters/{}", {"version": 1}),
    ("POST", "/v1/adapters/switch", {"old": "chat", "new": "{}"}),
    ("POST", UNLOAD, {"lora_name": "{}"}),
]


@pytest.mark.parametrize(("method", "url", "body"), WHOLE_NAME_VERBS)
async def test_verbs_on_a_name_refuse_its_versions(
    client: httpx.AsyncClient, method: str, url: str, body: dict[str, Any] | None
) -> None:
    async def said(address: str) -> tuple[int, str]:
        json = body and {key: address if value == "{}" else value for key, value in body.items()}
        response = await client.request(method, url.format(address), json=json)
        return response.status_code, response.json()["error"]["message"]

    await client.put("/v1/adapters/sql", json={"path": "/adapters/better"})
    for address in ("sql@1", "sql@2"):
        assert await said(address) == (
            400,
            f"'{address}' is one version of adapter 'sql', and this is done to all; name 'sql'",
        )
    for address, message in (
        ("sql@9", "adapter 'sql' has not kept version 9; it has 1, 2 (max_versions_kept is 2)"),
        ("nope@1", "adapter 'nope@1' is not loaded; load it first"),
    ):
        expected = f"The lora adapter '{address}' cannot be found." if url == UNLOAD else message
        assert await said(address) == (404, expected)
    assert len((await client.get("/v1/adapters/sql")).json()["versions"]) == 2


async def test_unload_by_delete(client: httpx.AsyncClient) -> None:
    answer = (await client.delete("/v1/adapters/sql", params={"deadline_s": 0, "force": "true"})).json()
    assert answer["is_drained"]
    assert (await client.delete("/v1/adapters/sql")).status_code == 404
    for query in ({"deadline_s": -1}, {"deadline_s": "nan"}, {"force": "maybe"}, {"x": 1}):
        response = await client.delete("/v1/adapters/chat", params=query)
        assert response.status_code == 400, query
        assert response.json()["error"]["param"] == next(iter(query))


async def test_names_with_slashes(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    """The operator may give them, clients may not."""
    response = await client.post("/v1/adapters", json={"name": "org/x", "path": "/x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "name")
    await engine.load_adapter("org/x", "/x")
    assert (await client.post("/v1/adapters", json={"name": "org/x", "path": "/x"})).status_code == 200
    assert (await client.get("/v1/adapters/org/x")).json()["name"] == "org/x"
    assert (await client.get("/v1/adapters/org%2Fx")).json()["name"] == "org/x"
    assert (await client.post("/v1/adapters/org/x/pin")).json()["has_changed"]
    assert (await client.delete("/v1/adapters/org/x")).status_code == 200


@pytest.mark.parametrize("name", ["", " x", "a\nb", "x" * 257])
async def test_names_that_cannot_be(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.post("/v1/adapters", json={"name": name, "path": "/x"})).status_code == 400


@pytest.mark.parametrize(
    ("method", "url", "body"),
    [
        ("POST", LOAD, NEW),
        ("POST", UNLOAD, {"lora_name": "x"}),
        ("POST", "/v1/adapters", {"name": "x", "path": "/x"}),
        ("POST", "/v1/adapters/switch", {"old": "x", "new": "y"}),
        ("POST", "/v1/adapters/x/pin", None),
        ("POST", "/v1/adapters/x/preload", None),
        ("GET", "/v1/adapters/x", None),
        ("DELETE", "/v1/adapters/x", None),
        ("PUT", "/v1/adapters/x", {"path": "/x"}),
        ("POST", "/v1/adapters/x/rollback", None),
    ],
)
async def test_without_lora(method: str, url: str, body: dict[str, Any] | None) -> None:
    async with client_of(create_app(FakeAsyncEngine(enable_lora=False))) as client:
        response = await client.request(method, url, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "lora_disabled"
        assert (await client.get("/v1/adapters")).json()["data"] == []
