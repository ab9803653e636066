"""Attacks of one tenant on another: by name, number, path, alias, list, error text, salt, and by what verbs answer."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from numpy import float32, full
from safetensors.numpy import save

from loraplex import logs
from loraplex.adapters.registry import LoRARegistry
from loraplex.errors import (
    AdapterContentChangedError,
    AdapterDiskFullError,
    AdapterMemoryError,
    AdapterNoRoomError,
    EngineOverloadedError,
    LoraplexError,
)
from loraplex.events import EventKind
from loraplex.sampling_params import Claim
from loraplex.server.auth import client_of as turns_of
from loraplex.server.pages import PAGE_PATHS
from loraplex.tenants.limits import Limits
from loraplex.tenants.records import Role
from tests.security.routes import routes_of
from tests.security.tenancy import ADAPTERS, Tenancy, bearer, tenancy
from tests.server.conftest import client_of

HIDDEN = ("beta/sql", "beta/secret", "secret", "private", "srv/beta")
SEEN_BY_ACME = {"sql": "acme/sql", "both": "acme/both", "public": "public", "beta/lent": "beta/lent"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Tenancy]:
    with tenancy(tmp_path) as made:
        yield made


@pytest.fixture
async def acme(server: Tenancy) -> Any:
    async with client_of(server.app) as client:
        client.headers.update(server.headers("acme"))
        yield client


async def completed(client: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 40, **fields})


# ------------------------------------------------------------------------------------------------------------ the rule


@pytest.mark.parametrize(("name", "registered"), SEEN_BY_ACME.items())
async def test_a_tenant_uses_its_own_the_public_and_the_granted_ones(
    server: Tenancy, acme: httpx.AsyncClient, name: str, registered: str
) -> None:
    answer = await completed(acme, name)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    assert server.engine.requests[-1].model == registered
    assert f"[{registered}]" in answer.json()["choices"][0]["text"]


async def test_a_full_name_of_its_own_is_the_same(server: Tenancy, acme: httpx.AsyncClient) -> None:
    assert (await completed(acme, "acme/sql")).json()["model"] == "sql"
    assert (await completed(acme, "sql@1")).status_code == 200
    assert (await completed(acme, "base:sql")).status_code == 200
    assert (await acme.get("/v1/adapters/acme/sql")).json() == (await acme.get("/v1/adapters/sql")).json()


async def test_a_mix_is_of_what_it_may_use(server: Tenancy, acme: httpx.AsyncClient) -> None:
    answer = await completed(acme, "sql:0.5,public:0.5")
    assert answer.status_code == 200, answer.text
    assert "acme" not in answer.json()["model"]
    assert str(server.engine.requests[-1].model).startswith("acme/sql:")
    for mix in ("sql:0.5,private:0.5", "sql:0.5,beta/secret:0.5"):
        assert (await completed(acme, mix)).status_code == 404
    merged = {"ids": ["sql", "private"], "weights": [1, 1]}
    assert (await completed(acme, "base", merged_adapters=merged)).status_code in (400, 404)


async def test_lists_have_what_it_may_use_and_no_more(server: Tenancy, acme: httpx.AsyncClient) -> None:
    """Own names hide others of the same spelling, which could not be asked for."""
    adapters = (await acme.get("/v1/adapters")).json()["data"]
    assert sorted(card["name"] for card in adapters) == sorted(SEEN_BY_ACME)
    models = (await acme.get("/v1/models")).json()["data"]
    assert next(card["id"] for card in models) == "base"
    assert sorted(card["id"] for card in models[1:]) == sorted(SEEN_BY_ACME)
    page = (await acme.get("/v1/adapters", params={"limit": 2})).json()
    assert [card["name"] for card in page["data"]] == ["beta/lent", "both"]
    rest = (await acme.get("/v1/adapters", params={"limit": 9, "after": "both"})).json()
    assert [card["name"] for card in rest["data"]] == ["public", "sql"]
    assert (await acme.get("/v1/adapters", params={"prefix": "acme/"})).json()["data"] == []
    for each in adapters:
        assert (await acme.get(f"/v1/adapters/{each['name']}")).json() == each


async def test_operators_see_all_names_as_they_are(server: Tenancy) -> None:
    async with client_of(server.app) as client:
        for role in ("flag admin", "admin", "operator", "read-only"):
            names = (await client.get("/v1/adapters", headers=server.headers(role))).json()["data"]
            assert sorted(card["name"] for card in names) == sorted(ADAPTERS)


async def test_a_key_of_the_command_line_sees_the_operators_own(server: Tenancy) -> None:
    async with client_of(server.app) as client:
        client.headers.update(server.headers("inference"))
        names = (await client.get("/v1/adapters")).json()["data"]
        assert sorted(card["name"] for card in names) == ["both", "private", "public"]
        assert (await completed(client, "private")).status_code == 200
        assert (await completed(client, "acme/sql")).status_code == 404


# ----------------------------------------------------------------------------------------------------- the named holes


async def test_a_second_tenant_does_not_use_what_the_first_one_loaded(server: Tenancy) -> None:
    """LoRAX's hole: whoever names an adapter that is there is answered with it."""
    async with client_of(server.app) as client:
        body = {"name": "mine", "path": "/srv/beta/mine"}
        loaded = await client.post("/v1/adapters", json=body, headers=server.headers("beta"))
        assert loaded.status_code == 200, loaded.text
        used = await client.post(
            "/v1/completions", json={"model": "mine", "prompt": "hi"}, headers=server.headers("beta")
        )
        assert used.json()["model"] == "mine"
        client.headers.update(server.headers("acme"))
        num_requests = len(server.engine.requests)
        for name in ("mine", "beta/mine", "mine@1", "beta/mine@1", "base:mine", "base:beta/mine", "acme/mine"):
            assert (await completed(client, name)).status_code == 404, name
            assert (await completed(client, "base", lora_path=name)).status_code == 404, name
            for path in ("/generate", "/generate_stream", "/"):
                named = await client.post(path, json={"inputs": "hi", "parameters": {"adapter_id": name}})
                assert (named.status_code, named.json()["error_type"]) == (404, "not_found"), named.text
            named = await client.post("/generate", json={"text": "hi", "lora_path": name})
            assert named.status_code == 404
        for path in ("/srv/beta/mine", "srv/beta/mine"):
            assert (await completed(client, path)).status_code == 404
        assert len(server.engine.requests) == num_requests, "nothing reached the engine"


async def test_a_wrong_tenants_adapter_by_number_path_and_alias(server: Tenancy, acme: httpx.AsyncClient) -> None:
    """vLLM's hole: an id that is known selects the weights that were loaded under it, whoever asks."""
    await server.engine.on_registry(LoRARegistry.load, "beta/secret", "/srv/beta/secret", lora_int_id=7)
    for method, url, body in (
        ("POST", "/v1/adapters", {"name": "new", "path": "/srv/acme/new", "lora_int_id": 7}),
        ("PUT", "/v1/adapters/new", {"path": "/srv/acme/new", "lora_int_id": 7}),
        ("PUT", "/v1/adapters/sql", {"lora_int_id": 7}),
        ("POST", "/v1/adapters/sql/clone", {"name": "copy", "lora_int_id": 8}),
    ):
        answer = await acme.request(method, url, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_int_id"), answer.text
    unloaded = await acme.post("/v1/unload_lora_adapter", json={"lora_name": "secret", "lora_int_id": 7})
    assert unloaded.status_code == 404
    for path in ("/srv/beta/secret", "/srv/acme/../beta/secret", "/srv", "hf://beta/secret", "/srv/acmeplus/x"):
        for route, field in (("/v1/adapters", "path"), ("/v1/load_lora_adapter", "lora_path")):
            name = {"path": "name", "lora_path": "lora_name"}[field]
            answer = await acme.post(route, json={name: "stolen", field: path})
            assert answer.status_code == 400, answer.text
            assert "another" not in answer.text
    await server.engine.on_registry(LoRARegistry.switch, "beta/sql", "beta/secret")
    for name in ("beta/sql", "secret", "beta/secret"):
        assert (await completed(acme, name)).status_code == 404
        for url in (f"/v1/adapters/{name}/clone", f"/v1/adapters/{name}/rollback"):
            assert (await acme.post(url, json={"name": "copy"} if "clone" in url else None)).status_code == 404
        switched = await acme.post("/v1/adapters/switch", json={"old": "sql", "new": name})
        assert switched.status_code == 404, switched.text
    names = set(server.engine.registry.names()) if server.engine.registry else set()
    assert names == set(ADAPTERS)


# ------------------------------------------------------------------------------------- what is not there, and what is


def requests_about(name: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    """Every way to name an adapter that may exist."""
    completion = {"prompt": "hi", "max_tokens": 1}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    return [
        ("POST", "/v1/completions", {**completion, "model": name}),
        ("POST", "/v1/completions", {**completion, "model": "base", "lora_path": name}),
        ("POST", "/v1/completions", {**completion, "model": f"base:{name}"}),
        ("POST", "/v1/completions", {**completion, "model": f"{name}@1"}),
        ("POST", "/v1/completions", {**completion, "model": f"{name}:0.5,sql:0.5"}),
        ("POST", "/v1/completions", {**completion, "model": "base", "prompt": ["a", "b"], "lora_path": [None, name]}),
        ("POST", "/v1/chat/completions", {**chat, "model": name}),
        ("POST", "/v1/chat/completions", {**chat, "model": name, "stream": True}),
        ("POST", "/generate", {"text": "hi", "lora_path": name}),
        ("POST", "/generate", {"text": ["a", "b"], "lora_path": [None, name]}),
        ("POST", "/generate", {"inputs": "hi", "parameters": {"adapter_id": name}}),
        ("POST", "/generate_stream", {"inputs": "hi", "parameters": {"adapter_id": name}}),
        ("POST", "/", {"inputs": "hi", "parameters": {"merged_adapters": {"ids": [name, "sql"], "weights": [1, 1]}}}),
        ("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": "/srv/beta/x"}),
        ("POST", "/unload_lora_adapter", {"lora_name": name}),
        ("POST", "/unload_lora_adapter", {"lora_name": f"{name}@1"}),
        ("POST", "/tokenize", {"model": name, "prompt": "hi"}),
        ("POST", "/detokenize", {"model": name, "tokens": [1]}),
        ("GET", f"/v1/models/{name}", None),
        ("GET", f"/v1/adapters/{name}", None),
        ("GET", f"/v1/adapters?prefix={name}", None),
        ("GET", f"/v1/models?contains={name}", None),
        ("GET", f"/v1/usage?adapter={name}", None),
        ("GET", f"/v1/usage?tenant={name.partition('/')[0]}", None),
        ("DELETE", f"/v1/adapters/{name}", None),
        ("DELETE", f"/v1/adapters/{name}@1", None),
        ("PUT", f"/v1/adapters/{name}", {"is_pinned": True}),
        ("PUT", f"/v1/adapters/{name}", {"version": 1}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": name}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": f"{name}@1"}),
        ("POST", "/v1/adapters/switch", {"old": name, "new": "sql"}),
        ("POST", "/v1/adapters/switch", {"old": "sql", "new": name}),
        ("PUT", "/v1/adapters/new", {"path": "/srv/acme/x", "alias_of": name}),
        *(("POST", f"/v1/adapters/{name}/{verb}", None) for verb in ("pin", "unpin", "evict", "preload", "rollback")),
        ("POST", f"/v1/adapters/{name}/clone", {"name": "copy"}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/srv/beta/x"}),
        ("POST", "/v1/adapters", {"name": name, "path": "/srv/beta/x"}),
        ("PUT", f"/v1/adapters/{name}", {"path": "/srv/beta/x"}),
        ("PUT", f"/v1/adapters/{name}/tensors", None),
        ("PUT", f"/v1/adapters/{name}/tensors?expected_version=1", None),
    ]


def test_every_route_with_a_name_is_asked() -> None:
    from loraplex.server import ServerConfig, create_app
    from loraplex.testing import FakeAsyncEngine

    asked = {(method, url.partition("?")[0]) for method, url, _ in requests_about("sql")}
    others = {"/v1/adapters/{name:path}/export", "/v1/adapters/merge", "/dashboard/adapters.js"}
    for route in routes_of(create_app(FakeAsyncEngine(), ServerConfig())):
        if ("name" in route.path or "adapter" in route.path) and route.path not in others:
            for method in route.methods:
                assert (method, route.url) in asked, f"{method} {route.path} is asked for no other tenant's adapter"


@pytest.mark.parametrize("hidden", ["beta/secret", "private"])
async def test_what_it_may_not_see_is_as_if_it_did_not_exist(
    server: Tenancy, acme: httpx.AsyncClient, hidden: str
) -> None:
    """Status, headers and body are the same, but for the name that was sent."""
    absent = hidden[:-1] + "X"
    for there, not_there in zip(requests_about(hidden), requests_about(absent), strict=True):
        answers = [await acme.request(method, url, json=body) for method, url, body in (there, not_there)]
        texts = [answer.text.replace(name, "?") for answer, name in zip(answers, (hidden, absent), strict=True)]
        assert answers[0].status_code == answers[1].status_code, (there, texts)
        assert texts[0] == texts[1], there
        same = [{name: value for name, value in answer.headers.items() if "id" not in name} for answer in answers]
        assert same[0] == same[1]
    assert server.engine.registry is not None
    assert set(server.engine.registry.names()) == set(ADAPTERS)


async def test_nothing_that_it_reads_names_what_it_may_not_see(server: Tenancy, acme: httpx.AsyncClient) -> None:
    await server.engine.on_registry(LoRARegistry.switch, "public", "private")
    await server.engine.on_registry(LoRARegistry.switch, "acme/both", "beta/secret")
    pages = PAGE_PATHS - {"/"}
    urls = [route.url for route in routes_of(server.app) if "GET" in route.methods and route.path not in pages]
    for url in [*urls, *(f"/v1/adapters/{name}" for name in SEEN_BY_ACME), *(f"/v1/models/{n}" for n in SEEN_BY_ACME)]:
        text = (await acme.get(url)).text
        assert not any(each in text for each in HIDDEN), (url, text)
    card = (await acme.get("/v1/adapters/both")).json()
    assert (card["alias_of"], card["aliases"]) == (None, [])
    assert "[beta/secret]" in (await completed(acme, "both")).json()["choices"][0]["text"], "the operator wanted it"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (AdapterContentChangedError("adapter 'private' at '/srv/private' changed"), False),
        (AdapterContentChangedError("adapter 'acme/sql' changed"), True),
        (AdapterNoRoomError("adapter 'acme/sql' needs 7 bytes: 5 of 9 bytes are pinned"), False),
        (AdapterMemoryError("900 adapters are loaded"), False),
        (AdapterDiskFullError("the disk is too full: 5 of 9 bytes are free"), False),
        (EngineOverloadedError("99 requests wait"), False),
    ],
)
async def test_an_error_says_nothing_of_others(
    server: Tenancy, acme: httpx.AsyncClient, is_stream: bool, error: LoraplexError, kept: bool
) -> None:
    if "private" in str(error):
        await server.engine.on_registry(LoRARegistry.switch, "acme/sql", "private")
    server.engine.fail_next(type(error)(str(error)), after_tokens=2 if is_stream else 0)
    text = (await completed(acme, "sql", stream=is_stream)).text
    assert error.http_status == 429 or "error" in text
    for hidden in ("private", "5 of 9", "900 adapters", "99 requests", "acme/"):  # ids and times have digits
        assert hidden not in text
    assert ("'sql' changed" in text) is kept
    async with client_of(server.app) as client:  # the operator reads it as it is
        server.engine.fail_next(type(error)(str(error)))
        client.headers.update(server.headers("operator"))
        assert json.dumps(str(error))[1:-1] in (await completed(client, "acme/sql")).text


async def test_who_was_evicted_is_not_said(tmp_path: Path) -> None:
    """A load that pushed another tenant's adapter out looks as one that pushed none out."""
    with tenancy(tmp_path) as server:
        server.engine.store.max_resident = 1
        async with client_of(server.app) as client:
            client.headers.update(server.headers("acme"))
            for name in ("new", "newer"):
                answer = await client.post("/v1/adapters/" + name + "/preload")
                assert answer.status_code == 404
                loaded = await client.post("/v1/adapters", json={"name": name, "path": f"/srv/acme/{name}"})
                assert loaded.status_code == 200, loaded.text
                assert not any(each.startswith("beta") for each in loaded.json()["evicted"])
                assert (loaded.json()["status"] == "loaded_with_eviction") is bool(loaded.json()["evicted"])
                preloaded = await client.post(f"/v1/adapters/{name}/preload")
                assert all("/" not in each for each in preloaded.json()["evicted"]), preloaded.text


# ----------------------------------------------------------------------------------------------------- salts and verbs


async def test_prefixes_are_salted_by_tenant(server: Tenancy) -> None:
    server.add_key("acme too", Role.TENANT, "acme")
    salts = {}
    async with client_of(server.app) as client:
        for key in ("acme", "acme too", "beta", "inference", "operator", "admin"):
            client.headers.update(server.headers(key))
            assert (await completed(client, "base")).status_code == 200
            salts[key] = server.engine.requests[-1].cache_salt
    assert salts["acme"] == salts["acme too"]
    assert len(set(salts.values())) == 5
    assert all(len(salt) == 64 for salt in salts.values())


async def test_a_salt_of_the_client_comes_on_top(server: Tenancy, acme: httpx.AsyncClient) -> None:
    await completed(acme, "base")
    own = server.engine.requests[-1].cache_salt
    await completed(acme, "base", cache_salt="x")
    assert server.engine.requests[-1].cache_salt == own + "x"


async def test_shared_prefixes_are_not_counted_to_a_tenant(tmp_path: Path) -> None:
    with tenancy(tmp_path, share_prefix_cache=True) as server:
        async with client_of(server.app) as client:
            client.headers.update(server.headers("acme"))
            assert "cached_tokens" not in (await completed(client, "base")).text
            assert server.engine.requests[-1].cache_salt == ""


async def test_a_tenant_changes_its_own_adapters(server: Tenancy, acme: httpx.AsyncClient) -> None:
    loaded = await acme.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "/srv/acme/new"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    again = await acme.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "/srv/acme/new"})
    assert (again.status_code, "'new' has already been loaded" in again.text) == (400, True)
    put = await acme.put("/v1/adapters/other", json={"path": "/srv/acme/other", "is_pinned": True})
    assert (put.status_code, put.json()["name"]) == (201, "other")
    for verb in ("pin", "unpin", "evict", "preload"):
        answer = await acme.post(f"/v1/adapters/new/{verb}")
        assert (answer.status_code, answer.json()["name"]) == (200, "new")
    cloned = await acme.post("/v1/adapters/new/clone", json={"name": "copy"})
    assert (cloned.status_code, cloned.json()["name"]) == (200, "copy")
    switched = await acme.post("/v1/adapters/switch", json={"old": "new", "new": "copy"})
    assert (switched.json()["old"], switched.json()["new"]) == ("new", "copy")
    card = (await acme.get("/v1/adapters/new")).json()
    assert card["alias_of"] == "copy"
    assert (await acme.get("/v1/adapters/copy")).json()["aliases"] == ["new"]
    assert (await acme.post("/v1/adapters/new/rollback")).status_code == 200
    deleted = await acme.delete("/v1/adapters/copy")
    assert (deleted.status_code, deleted.json()["name"]) == (200, "copy")
    unloaded = await acme.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
    assert unloaded.text == "Success: LoRA adapter 'new' removed successfully."
    assert server.engine.registry is not None
    assert set(server.engine.registry.names()) == {*ADAPTERS, "acme/other"}


async def test_a_tenant_updates_its_own_adapters(
    server: Tenancy, acme: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    body = save({"lora_A": full(4, 1, float32)}, {"adapter_config": "{}"})
    before = server.engine.registry.refs() if server.engine.registry else {}
    for name, status, version in (("sql", 200, 2), ("acme/sql", 200, 2), ("new", 201, 1)):
        answer = await acme.put(f"/v1/adapters/{name}/tensors", content=body)
        assert (answer.status_code, answer.json()["version"]) == (status, version), answer.text
        assert answer.json()["name"] == name.removeprefix("acme/")
    events = server.engine.events.after(0).events
    audits = [each.event for each in events if each.event.kind is EventKind.AUDIT]
    assert {each.details["tenant"] for each in audits} == {"acme"}
    operators = {"authorization": server.headers("operator")["authorization"]}
    async with client_of(server.app) as operator:
        given = await operator.put("/v1/adapters/acme/sql/tensors", content=body[:-4] + bytes(4), headers=operators)
        assert (given.status_code, given.json()["version"]) == (200, 3)
        named = await operator.put("/v1/adapters/acme/tensors", json={"path": "/srv/acme/x"}, headers=operators)
        assert (named.status_code, named.json()["name"]) == (201, "acme/tensors")
    assert server.engine.registry is not None
    after = server.engine.registry.refs()
    assert {name for name in after if after[name] != before.get(name)} == {"acme/sql", "acme/new", "acme/tensors"}


@pytest.mark.parametrize("shared", ["public", "beta/lent"])
async def test_what_is_shared_is_used_alone(server: Tenancy, acme: httpx.AsyncClient, shared: str) -> None:
    for method, url, body in (
        ("DELETE", f"/v1/adapters/{shared}", None),
        ("DELETE", f"/v1/adapters/{shared}@1", None),
        ("PUT", f"/v1/adapters/{shared}", {"is_pinned": True}),
        ("PUT", f"/v1/adapters/{shared}/tensors", None),
        ("POST", f"/v1/adapters/{shared}/pin", None),
        ("POST", f"/v1/adapters/{shared}/evict", None),
        ("POST", f"/v1/adapters/{shared}/rollback", None),
        ("POST", f"/v1/adapters/{shared}/clone", {"name": "copy"}),
        ("POST", "/v1/adapters/switch", {"old": "sql", "new": shared}),
        ("PUT", "/v1/adapters/new", {"path": "/srv/acme/x", "alias_of": shared}),
        ("POST", "/v1/adapters/switch", {"old": shared, "new": "sql"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": shared}),
    ):
        answer = await acme.request(method, url, json=body)
        assert answer.status_code == 403, (url, answer.text)
    assert server.engine.registry is not None
    assert set(server.engine.registry.names()) == set(ADAPTERS)


@pytest.mark.parametrize("name", ["beta/x", "a/b", "base", "base:x", "", "x@2", ".."])
async def test_names_that_a_tenant_cannot_give(server: Tenancy, acme: httpx.AsyncClient, name: str) -> None:
    for url, body in (
        ("/v1/adapters", {"name": name, "path": "/srv/acme/x"}),
        ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/srv/acme/x"}),
        ("/v1/adapters/sql/clone", {"name": name}),
    ):
        answer = await acme.post(url, json=body)
        assert answer.status_code == 400, answer.text
    assert server.engine.registry is not None
    assert set(server.engine.registry.names()) == set(ADAPTERS)


async def test_an_operator_gives_a_tenant_an_adapter(server: Tenancy, acme: httpx.AsyncClient) -> None:
    async with client_of(server.app) as client:
        client.headers.update(server.headers("flag admin"))
        first = await client.post("/v1/adapters", json={"name": "acme/first", "path": "/srv/private"})
        assert first.status_code == 200, first.text
        client.headers.update(server.headers("operator"))
        given = await client.post("/v1/adapters", json={"name": "acme/gift", "path": "/srv/private"})
        assert given.status_code == 200, given.text
        assert (await client.post("/v1/adapters", json={"name": "org/x", "path": "/srv/x"})).status_code == 400
        assert (await client.post("/v1/adapters", json={"name": "acme/a/b", "path": "/srv/x"})).status_code == 400
    assert (await completed(acme, "gift")).status_code == 200


# ---------------------------------------------------------------------------------------------------------------- keys


async def test_a_revoked_key_is_401(server: Tenancy, acme: httpx.AsyncClient) -> None:
    assert (await completed(acme, "sql")).status_code == 200
    async with client_of(server.app) as client:
        url = f"/v1/keys/{server.key_ids['acme']}"
        revoked = await client.delete(url, headers=server.headers("admin"))
        assert revoked.json()["is_revoked"]
        unknown = await client.delete("/v1/keys/00000000", headers=server.headers("admin"))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "key_not_found")
    assert (await completed(acme, "sql")).status_code == 401


async def test_keys_and_tenants_over_http(server: Tenancy) -> None:
    async with client_of(server.app) as client:
        client.headers.update(server.headers("admin"))
        made = await client.post("/v1/tenants", json={"name": "gamma", "quota": {"requests_per_s": 2}})
        assert (made.status_code, made.json()["quota"]) == (200, {"requests_per_s": 2.0})
        assert (await client.post("/v1/tenants", json={"name": "gamma"})).status_code == 409
        key = (await client.post("/v1/keys", json={"tenant": "gamma", "label": "app"})).json()
        assert (key["role"], key["label"], key["key"][:3]) == ("tenant", "app", "lp-")
        listed = (await client.get("/v1/keys", params={"tenant": "gamma"})).json()["data"]
        assert [each["id"] for each in listed] == [key["id"]]
        assert "key" not in listed[0]
        own = bearer(key["key"])
        assert (await client.get("/v1/models", headers=own)).status_code == 200
        changed = await client.put("/v1/tenants/gamma", json={"adapter_roots": ["/srv/gamma"]})
        assert changed.json()["adapter_roots"] == ["/srv/gamma"]
        assert changed.json()["quota"] == {"requests_per_s": 2.0}
        shared = await client.put("/v1/shares", json={"adapter": "private", "tenants": ["gamma"]})
        assert shared.json() == {"adapter": "private", "tenants": ["gamma"], "public": False}
        assert shared.json() in (await client.get("/v1/shares")).json()["data"]
        body = {"model": "private", "prompt": "hi"}
        assert (await client.post("/v1/completions", json=body, headers=own)).status_code == 200
        assert [each["name"] for each in (await client.get("/v1/tenants")).json()["data"]] == ["acme", "beta", "gamma"]
        assert (await client.delete("/v1/tenants/gamma")).json()["is_deleted"]
        assert (await client.get("/v1/models", headers=own)).status_code == 401
        assert (await client.get("/v1/tenants/gamma")).status_code == 404
        for body in ({"role": "emperor"}, {"role": "admin", "tenant": "acme"}, {"role": "tenant"}):
            assert (await client.post("/v1/keys", json=body)).status_code == 400


@pytest.mark.parametrize(
    ("method", "url", "body", "param"),
    [
        ("POST", "/v1/tenants", {"name": "a\0"}, "name"),
        ("POST", "/v1/keys", {"tenant": "a\0"}, "tenant"),
        ("POST", "/v1/keys", {"tenant": "acme", "label": "a\0"}, "label"),
        ("PUT", "/v1/shares", {"adapter": "a\0"}, "adapter"),
        ("PUT", "/v1/shares", {"adapter": "public", "tenants": ["acme", "a\0"]}, "tenants"),
        ("PUT", "/v1/tenants/acme", {"adapter_roots": ["/srv/a\0"]}, "adapter_roots"),
        ("POST", "/v1/adapters/switch", {"old": "both", "new": "a\0"}, "new"),
        ("POST", "/v1/adapters/switch", {"old": "both", "new": "a\x1b[2J"}, "new"),
    ],
)
async def test_control_characters_in_a_body_reach_no_database(
    server: Tenancy, method: str, url: str, body: dict[str, Any], param: str
) -> None:
    """PostgreSQL refuses a text with NUL: some of these were 500, as if the database were away."""
    async with client_of(server.app) as client:
        refused = await client.request(method, url, json=body, headers=server.headers("admin"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_changed_service_level_is_in_the_next_request(server: Tenancy, acme: httpx.AsyncClient) -> None:
    assert (await completed(acme, "sql")).status_code == 200
    assert server.engine.requests[-1].claim == Claim("tenant acme")
    async with client_of(server.app) as client:
        client.headers.update(server.headers("admin"))
        level = {"weight": 2.5, "max_priority": 3, "ttft_target_ms": 200, "itl_target_ms": 50}
        changed = await client.put("/v1/tenants/acme", json={"service": level})
        assert (changed.status_code, changed.json()["service"]) == (200, level)
        sent = await acme.post("/v1/completions", json={"model": "sql", "prompt": "hi", "priority": -3})
        assert sent.status_code == 200
        assert server.engine.requests[-1].claim == Claim("tenant acme", 2.5, -3, 200, 50)
        beyond = await acme.post("/v1/completions", json={"model": "sql", "prompt": "hi", "priority": 4})
        assert beyond.status_code == 400
        assert "max_priority of this tenant, 3 allows -3 to 3" in beyond.json()["error"]["message"]
        kept = await client.put("/v1/tenants/acme", json={"quota": {"concurrency": 9}})
        assert kept.json()["service"] == level
        cleared = await client.put("/v1/tenants/acme", json={"service": {}})
        assert (cleared.json()["service"], cleared.json()["quota"]) == ({}, {"concurrency": 9})
        for wrong in ({"weight": 0}, {"weight": 1e4}, {"max_priority": -1}, {"itl_target_ms": 0.5}, {"speed": 1}):
            assert (await client.put("/v1/tenants/acme", json={"service": wrong})).status_code == 400
    assert (await completed(acme, "sql")).status_code == 200
    assert server.engine.requests[-1].claim == Claim("tenant acme")


async def test_no_key_is_in_a_log_or_an_event(server: Tenancy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with client_of(server.app) as client:
        client.headers.update(server.headers("admin"))
        made = (await client.post("/v1/keys", json={"tenant": "acme"})).json()["key"]
        events = (await client.get("/v1/events", params={"stream": "false"})).text
        listing = (await client.get("/v1/keys")).text
    for secret in (*server.keys.values(), made):
        assert secret not in caplog.text
        assert secret not in events
        assert secret not in listing


async def test_a_key_that_is_given_where_its_id_belongs_is_in_no_log(
    server: Tenancy, caplog: pytest.LogCaptureFixture
) -> None:
    """An admin's slip. Nothing of it but that it is one."""
    secret, formatter = server.keys["acme"], logs.LineFormatter()
    async with client_of(server.app) as client:
        client.headers.update({**server.headers("admin"), "X-Request-Id": secret})
        assert (await client.delete(f"/v1/keys/{secret}")).status_code == 404
        await client.post("/v1/tenants", json={"name": secret})
        loaded = await client.post("/v1/adapters", json={"name": secret, "path": "/srv/newer"})
        assert loaded.status_code == 400, "names stand in events, metrics and fields of lines"
        events = (await client.get("/v1/events", params={"stream": "false"})).text
    path = ("127.0.0.1:1", "DELETE", f"/v1/keys/{secret}", "1.1", 404)
    access = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', path, None)
    try:
        raise ValueError(secret)
    except ValueError:
        failed = logging.LogRecord("loraplex.server", logging.ERROR, "", 0, "x", (), sys.exc_info())
    lines = [formatter.format(record) for record in (*caplog.records, access, failed)]
    context = logs.request_context.set(logs.RequestContext(secret, secret, secret))
    lines += [form.format(failed) for form in (formatter, logs.JsonFormatter())]
    logs.request_context.reset(context)
    assert "lp-..." in events
    assert secret[3:12] not in events + "".join(lines)


async def test_a_verb_of_a_tenant_is_audited_with_its_name(server: Tenancy, acme: httpx.AsyncClient) -> None:
    await acme.post("/v1/adapters/sql/pin")
    (event,) = [each.event for each in server.engine.events.after(0).events if each.event.kind is EventKind.AUDIT]
    assert event.details["tenant"] == "acme"
    assert event.details["key"] == server.key_ids["acme"]
    assert "of tenant acme" in event.text


async def test_turns_are_a_tenants_not_a_keys(server: Tenancy) -> None:
    """One with many keys has as many places as one with one key."""
    from fastapi import Request

    server.add_key("acme too", Role.TENANT, "acme")
    ring = server.context.keys
    turns = {}
    for key in ("acme", "acme too", "beta", "inference"):
        caller = ring.caller_of(f"Bearer {server.keys[key]}")
        turns[key] = turns_of(Request({"type": "http", "state": {"caller": caller}, "headers": []}))
    assert turns["acme"] == turns["acme too"] == "tenant acme"
    assert len(set(turns.values())) == 3


@pytest.mark.parametrize("verb", ["pin", "unpin", "evict", "preload"])
async def test_a_name_that_was_switched_to_anothers_moves_no_memory_of_it(
    server: Tenancy, acme: httpx.AsyncClient, verb: str
) -> None:
    await server.engine.on_registry(LoRARegistry.switch, "acme/sql", "private")
    answer = await acme.post(f"/v1/adapters/sql/{verb}")
    assert answer.status_code == 403
    assert "private" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "body", "is_own_after"),
    [
        ("PUT", "/v1/adapters/sql", {}, False),
        ("POST", "/v1/adapters", {"name": "sql", "path": "/srv/acme/sql"}, False),
        ("POST", "/v1/adapters/copy/clone", {"name": "sql"}, False),
        ("PUT", "/v1/adapters/sql", {"version": 1}, True),
        ("PUT", "/v1/adapters/sql", {"path": "/srv/acme/sql"}, True),
    ],
)
@pytest.mark.parametrize("target", ["private", "public", "beta/secret", "twin"])
async def test_nothing_that_is_sent_with_a_pin_pins_what_answers_for_a_switched_name(
    server: Tenancy,
    acme: httpx.AsyncClient,
    target: str,
    method: str,
    path: str,
    body: dict[str, Any],
    is_own_after: bool,
) -> None:
    """twin: the operator's, with the same content."""
    registry = server.engine.registry
    assert registry is not None
    for copy in ("acme/copy", "twin"):
        await server.engine.on_registry(LoRARegistry.clone, "acme/sql", copy)
    for pinned in (True, False) if method == "PUT" else (True,):
        await server.engine.on_registry(LoRARegistry.switch, "acme/sql", target)
        await server.engine.on_registry(LoRARegistry.unpin if pinned else LoRARegistry.pin, target)
        answer = await acme.request(method, path, json={**body, "is_pinned": pinned})
        refused = 400 if path.endswith("/clone") and target != "twin" else 403
        expected = (200, "acme/sql") if is_own_after else (refused, target)
        assert (answer.status_code, registry.resolve("acme/sql").adapter_name) == expected, answer.text
        assert target not in answer.text
        assert registry.describe(target).is_pinned is not pinned
        assert registry.describe("acme/sql").is_pinned is (is_own_after and pinned)


async def test_what_a_load_says_of_a_switched_name_is_nothing_of_anothers(
    server: Tenancy, acme: httpx.AsyncClient
) -> None:
    await server.engine.on_registry(LoRARegistry.load, "private", "/srv/newer", load_inplace=True)
    await server.engine.on_registry(LoRARegistry.switch, "acme/sql", "private")
    told = (await acme.post("/v1/adapters", json={"name": "sql", "path": "/srv/acme/sql"})).json()
    assert (told["status"], told["name"]) == ("already_loaded", "(another adapter)")
    assert (told["version"], told["digest"], told["rank"], told["lora_int_id"]) == (0, "", 0, None)


async def test_a_models_card_says_nothing_of_what_answers_for_a_switched_name(
    server: Tenancy, acme: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when the other tenant had loaded it, which each reload changed, nor where it came from."""
    registry = server.engine.registry
    assert registry is not None
    await server.engine.on_registry(LoRARegistry.switch, "acme/both", "beta/secret")
    monkeypatch.setattr(registry._loader, "_clock", lambda: 2e9)
    await server.engine.on_registry(LoRARegistry.load, "beta/secret", "hf://org/secret", load_inplace=True)
    await server.engine.on_registry(LoRARegistry.load, "acme/sql", "hf://org/sql", load_inplace=True)
    listed = {card["id"]: card for card in (await acme.get("/v1/models")).json()["data"]}
    assert listed["both"] == {**listed["base"], "id": "both", "root": "both", "parent": "base"}
    assert listed["both"] == (await acme.get("/v1/models/both")).json()
    assert listed["sql"]["created"] == 2_000_000_000
    sources = []
    for name in ("both", "sql"):
        answer = await acme.post("/generate", json={"inputs": "hi", "parameters": {"adapter_id": name}})
        assert (answer.status_code, answer.headers["x-adapter-id"]) == (200, name)
        sources.append(answer.headers.get("x-adapter-source"))
    assert sources == [None, "hub"]


async def test_a_tenant_does_not_bring_back_what_an_operator_had_chosen(
    server: Tenancy, acme: httpx.AsyncClient
) -> None:
    """Not what it may not see, and not what it may use alone; a version of its own before it is passed to."""
    for target in ("private", "public"):
        await server.engine.on_registry(LoRARegistry.switch, "acme/sql", target)
        assert (await acme.post("/v1/adapters/sql/rollback")).json()["name"] == "sql"
        again = await acme.post("/v1/adapters/sql/rollback")
        assert (again.status_code, target in again.text) == (404, False)
        assert "[acme/sql]" in (await completed(acme, "sql")).json()["choices"][0]["text"]
    assert (await acme.put("/v1/adapters/sql", json={"path": "/srv/acme/newer"})).json()["version"] == 2
    await server.engine.on_registry(LoRARegistry.switch, "acme/sql", "private")
    await server.engine.on_registry(LoRARegistry.move, "acme/sql")
    assert (await acme.post("/v1/adapters/sql/rollback")).json()["version"] == 1
    async with client_of(server.app) as client:  # the operator goes forth and back
        client.headers.update(server.headers("operator"))
        assert (await client.post("/v1/adapters/acme/sql/rollback")).json()["version"] == 2
        assert (await client.put("/v1/adapters/acme/sql", json={"version": 1})).status_code == 200
        await server.engine.on_registry(LoRARegistry.switch, "acme/sql", "private")
        await server.engine.on_registry(LoRARegistry.move, "acme/sql")
        assert (await client.post("/v1/adapters/acme/sql/rollback")).json()["name"] == "private"


async def test_a_tenant_does_not_clone_what_answers_for_its_name(server: Tenancy, acme: httpx.AsyncClient) -> None:
    await server.engine.on_registry(LoRARegistry.switch, "acme/sql", "private")
    cloned = await acme.post("/v1/adapters/sql/clone", json={"name": "stolen"})
    assert (cloned.status_code, "private" in cloned.text) == (403, False)
    assert (await acme.post("/v1/adapters/sql@1/clone", json={"name": "copy"})).status_code == 200
    assert "[acme/copy]" in (await completed(acme, "copy")).json()["choices"][0]["text"]


async def test_a_clone_that_waits_for_its_turn_takes_nothing_of_anothers(tmp_path: Path) -> None:
    """What its name means is looked up again when it runs: the operator has switched that meanwhile."""
    with tenancy(tmp_path, limits=Limits(adapters=10)) as server:
        async with client_of(server.app) as client:
            turns = server.context.quota._turns
            async with turns.of("acme"), asyncio.timeout(60):
                headers = server.headers("acme")
                cloning = asyncio.create_task(
                    client.post("/v1/adapters/sql/clone", json={"name": "stolen"}, headers=headers)
                )
                while turns._clients["acme"].num_verbs < 2:
                    await asyncio.sleep(0.01)
                await server.engine.on_registry(LoRARegistry.switch, "acme/sql", "private")
            cloned = await cloning
        assert (cloned.status_code, "private" in cloned.text) == (403, False), cloned.text
        assert server.engine.registry is not None
        assert "acme/stolen" not in server.engine.registry.registered()


async def test_a_preload_that_waits_for_its_turn_promotes_nothing_of_anothers(
    server: Tenancy, acme: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_registry = server.engine.on_registry

    async def switched_before(verb: Any, *args: Any, **kwargs: Any) -> Any:
        await on_registry(LoRARegistry.switch, "acme/sql", "private")
        return await on_registry(verb, *args, **kwargs)

    monkeypatch.setattr(server.engine, "on_registry", switched_before)
    answer = await acme.post("/v1/adapters/sql/preload")
    assert (answer.status_code, "private" in answer.text) == (403, False), answer.text


async def test_a_name_of_its_own_is_never_anothers_adapter(server: Tenancy, acme: httpx.AsyncClient) -> None:
    """acme's `both` answers nothing, and the public one of that spelling is not asked."""
    assert server.engine.registry is not None
    await server.engine.on_registry(LoRARegistry.load, "both", "/srv/newer", load_inplace=True)
    assert (await completed(acme, "both@2")).status_code == 404, "the public one has a version 2"
    assert (await acme.post("/v1/adapters/switch", json={"old": "both", "new": "sql"})).status_code == 200
    assert (await acme.delete("/v1/adapters/sql")).status_code == 200
    for name in ("both", "acme/both", "base:both", "both@2", "both:0.5,public:0.5"):
        assert (await completed(acme, name)).status_code == 404, name
    assert (await acme.post("/tokenize", json={"model": "both", "prompt": "hi"})).status_code == 404
    assert (await acme.get("/v1/models/both")).status_code == 404
    assert "both" not in [card["id"] for card in (await acme.get("/v1/models")).json()["data"]]
    card = (await acme.get("/v1/adapters/both")).json()
    assert (card["name"], card["version"], card["alias_of"]) == ("both", 1, "sql")
    assert (await acme.post("/v1/adapters/both/pin")).status_code == 404
    back = await acme.post("/v1/adapters/both/rollback")
    assert (back.status_code, back.json()["name"]) == (200, "both")
    assert "[acme/both]" in (await completed(acme, "both")).json()["choices"][0]["text"]
    assert (await acme.delete("/v1/adapters/both")).status_code == 200
    assert "acme/both" not in server.engine.registry.registered()
    assert "[both]" in (await completed(acme, "both")).json()["choices"][0]["text"], "then it means the public one"


async def test_a_name_whose_hidden_target_is_gone_does_not_name_it(server: Tenancy, acme: httpx.AsyncClient) -> None:
    await server.engine.on_registry(LoRARegistry.switch, "acme/both", "private")
    await server.engine.on_registry(LoRARegistry.unload, "private")
    for method, url, body in (
        ("POST", "/v1/adapters", {"name": "both", "path": "/srv/acme/both"}),
        ("POST", "/v1/adapters/both/pin", None),
        ("POST", "/v1/adapters/both/clone", {"name": "copy"}),
        ("POST", "/v1/completions", {"model": "both", "prompt": "hi"}),
        ("GET", "/v1/adapters/both", None),
        ("GET", "/v1/adapters", None),
        ("DELETE", "/v1/adapters/both", None),
    ):
        answer = await acme.request(method, url, json=body)
        assert answer.status_code == (200 if method in ("GET", "DELETE") else 404), (method, url, answer.text)
        assert "private" not in answer.text


async def test_a_hidden_target_is_not_named_beside_a_name_with_an_apostrophe(
    server: Tenancy, acme: httpx.AsyncClient
) -> None:
    await server.engine.on_registry(LoRARegistry.load, "acme/it's", "/srv/acme/its")
    await server.engine.on_registry(LoRARegistry.switch, "acme/it's", "private")
    await server.engine.on_registry(LoRARegistry.unload, "private")
    answer = await acme.post("/v1/adapters/it's/pin")
    assert (answer.status_code, "private" in answer.text) == (404, False), answer.text


@pytest.mark.parametrize("name", ["sql", "public"])
async def test_a_target_that_is_not_ready_is_not_named(server: Tenancy, acme: httpx.AsyncClient, name: str) -> None:
    """As after a load at another server: its files are not here yet."""
    registry = server.engine.registry
    assert registry is not None
    await server.engine.on_registry(LoRARegistry.switch, "public" if name == "public" else f"acme/{name}", "private")
    registry._table.current["private"].is_ready = False
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for method, url, body in (
        *(each for each in requests_about(name) if each[0] == "POST" and "adapter" not in each[1]),
        ("POST", "/v1/messages", {**chat, "model": name}),
        ("POST", "/v1/messages/count_tokens", {"messages": chat["messages"], "model": name}),
        ("GET", f"/v1/models/{name}", None),
        ("GET", f"/v1/adapters/{name}", None),
        *(("POST", f"/v1/adapters/{name}/{verb}", None) for verb in ("pin", "preload", "evict")),
        ("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": "/srv/acme/x"}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/srv/acme/x"}),
    ):
        answer = await acme.request(method, url, json=body)
        assert "private" not in answer.text, (method, url, answer.text)
        if (body or {}).get("model") == name or url.startswith("/v1/models/"):
            assert answer.status_code == 503, (method, url, answer.text)


async def test_a_target_that_came_while_a_verb_waited_is_not_named(
    server: Tenancy, acme: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_registry = server.engine.on_registry

    async def switched_before(verb: Any, *args: Any, **kwargs: Any) -> Any:
        await on_registry(LoRARegistry.switch, "acme/sql", "private")
        await on_registry(LoRARegistry.unload, "private")
        return await on_registry(verb, *args, **kwargs)

    monkeypatch.setattr(server.engine, "on_registry", switched_before)
    answer = await acme.post("/v1/adapters/sql/evict")
    assert (answer.status_code, "private" in answer.text) == (404, False), answer.text
