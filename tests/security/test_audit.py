"""Every verb leaves a record of its key's fingerprint, its outcome and its client, which no client can forge or
remove."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loraplex.adapters.registry import LoRARegistry
from loraplex.events import EngineEvent, EventKind
from loraplex.server import ServerConfig, create_app
from loraplex.server.api_keys import fingerprint
from loraplex.server.audit import Audit
from loraplex.testing import FakeAsyncEngine
from tests.security.routes import routes_of
from tests.security.tenancy import tenancy
from tests.server.asgi_call import AsgiCall

KEY, ADMIN = "inference-key-0123456789", "admin-key-0123456789"
VERBS = [
    ("POST", "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/new"}, "new", 200),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "chat"}, "chat", 200),
    ("POST", "/v1/adapters", {"name": "own", "path": "/own"}, "own", 200),
    ("POST", "/v1/adapters/switch", {"old": "sql", "new": "own"}, "sql", 200),
    ("PUT", "/v1/adapters/sql", {"path": "/sql2"}, "sql", 200),
    ("POST", "/v1/adapters/sql/pin", None, "sql", 200),
    ("POST", "/v1/adapters/sql/unpin", None, "sql", 200),
    ("POST", "/v1/adapters/sql/evict", None, "sql", 200),
    ("POST", "/v1/adapters/sql/preload", None, "sql", 200),
    ("POST", "/v1/adapters/sql/rollback", None, "sql", 200),
    ("POST", "/v1/adapters/sql/clone", {"name": "copy"}, "sql", 200),
    ("POST", "/v1/adapters/merge", {"name": "both", "adapters": [{"name": "sql", "weight": 1}]}, "both", 400),
    ("DELETE", "/v1/merges/merge-1", None, None, 404),
    ("DELETE", "/v1/adapters/sql", None, "sql", 200),
    ("DELETE", "/v1/adapters/none", None, "none", 404),
    ("POST", "/v1/adapters", {"name": "odd", "path": "/x", "unknown": 1}, None, 400),
    ("POST", "/v1/profile/start", {}, None, 200),
    ("POST", "/v1/profile/stop", None, None, 200),
    ("POST", "/v1/profile/stop", None, None, 409),
    ("DELETE", "/v1/adapters/sql?unknown=1", None, "sql", 400),
    ("POST", "/v1/adapters/sql/export", None, "sql", 400),
]


def keyed_app(engine: FakeAsyncEngine, **settings: Any) -> FastAPI:
    return create_app(engine, ServerConfig(api_keys=(KEY,), admin_api_keys=(ADMIN,), **settings))


def client_from(app: FastAPI, key: str, address: str = "192.0.2.7") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(address, 5))
    return httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers={"Authorization": f"Bearer {key}"}
    )


def audited(engine: FakeAsyncEngine) -> list[EngineEvent]:
    return [each.event for each in engine.events.after(0).events if each.event.kind is EventKind.AUDIT]


async def test_each_verb_is_recorded_with_its_outcome(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loraplex.audit")
    engine = FakeAsyncEngine({"sql": "/sql", "chat": "/chat"})
    async with client_from(keyed_app(engine), ADMIN) as client:
        for method, path, body, adapter, status in VERBS:
            before = len(audited(engine))
            answer = await client.request(method, path, json=body)
            assert answer.status_code == status, (path, answer.text)
            (event,) = audited(engine)[before:]
            assert event.adapter_name == adapter
            assert event.details["status"] == status
            assert (event.details["key"], event.details["client"]) == (fingerprint(ADMIN), "192.0.2.7")
            assert event.details["method"] == method
            assert event.text == caplog.messages[-1]
            if adapter is not None:
                assert repr(adapter) in event.text
        assert "'sql', 'own'" in next(text for text in caplog.messages if "switch" in text)
        page = (await client.get("/v1/events?stream=false&kind=audit")).json()
        assert len(page["data"]) == len(VERBS)
    assert not any(key in caplog.text for key in (KEY, ADMIN))


def test_no_verb_is_missing_above() -> None:
    paths = {"/sql": "/{name:path}", "/merge-1": "/{merge_id}"}
    bare = [(method, path.partition("?")[0]) for method, path, *_ in VERBS]
    tried = {(method, path.replace(given, known)) for method, path in bare for given, known in paths.items()}
    verbs = {
        (method, route.path)
        for route in routes_of(create_app(FakeAsyncEngine(), ServerConfig()))
        if getattr(route.endpoint, "access", "") in ("verb", "loading")
        for method in route.methods
    }
    assert verbs <= tried


async def test_refusals_are_logged_each_and_wash_no_event_away(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeAsyncEngine({"sql": "/sql"})
    app = keyed_app(engine)
    async with client_from(app, ADMIN) as client:
        await client.post("/v1/adapters/sql/pin")
    async with client_from(app, KEY) as client:
        for _ in range(50):
            assert (await client.delete("/v1/adapters/sql")).status_code == 403
    assert sum("DELETE" in text and text.endswith(": 403") for text in caplog.messages) == 50
    assert all(record.levelno == logging.WARNING for record in caplog.records if "DELETE" in record.message)
    pinned, *refused = audited(engine)
    assert "/pin" in pinned.text
    assert 1 <= len(refused) <= 20  # one a second at most
    assert refused[0].details["key"] == fingerprint(KEY)


def test_one_refusal_a_second_becomes_an_event() -> None:
    times = iter((100.0, 100.5, 101.0, 101.9, 102.0))
    audit = Audit(FakeAsyncEngine().events, lambda: next(times))
    assert [audit._is_refusal_due("") for _ in range(5)] == [True, False, True, False, True]


async def test_what_a_tenant_is_refused_washes_no_event_away(tmp_path: Path) -> None:
    """1,100 unloads of names that are not there took the place of all events that are kept, in a second."""
    with tenancy(tmp_path) as server:
        for name in ("acme", "beta"):
            async with client_from(server.app, server.keys[name]) as client:
                answers = [await client.delete("/v1/adapters/nothing") for _ in range(20)]
                assert {answer.status_code for answer in answers} == {404}
        tenants = [event.details.get("tenant") for event in audited(server.engine)]
    assert 2 <= len(tenants) <= 16  # one a second at most, of each
    assert set(tenants) == {"acme", "beta"}


async def test_audit_events_are_for_admins() -> None:
    engine = FakeAsyncEngine({"sql": "/sql"})
    app = keyed_app(engine)
    async with client_from(app, ADMIN) as client:
        await client.post("/v1/adapters/sql/pin")
    async with client_from(app, KEY) as client:
        for path in ("/v1/events", "/v1/events?stream=false", "/v1/events?stream=false&kind=audit"):
            answer = await client.get(path)
            assert answer.status_code == 403
            assert fingerprint(ADMIN) not in answer.text


async def test_without_keys_a_verb_is_recorded_as_such() -> None:
    engine = FakeAsyncEngine({"sql": "/sql"})
    async with client_from(create_app(engine, ServerConfig()), "not asked for") as client:
        await client.post("/v1/adapters/sql/pin")
        (event,) = (await client.get("/v1/events?stream=false&kind=audit")).json()["data"]
    assert event["details"]["key"] == "no key"
    assert event["text"] == "POST /v1/adapters/{name}/pin on adapter 'sql' from 192.0.2.7 with no key: 200"


@pytest.mark.parametrize(
    "name", ["a\nb", "x" * 200, "\x1b[2J", "\u202eevil", "a' from 10.0.0.1 with key 00000000: 200"]
)
async def test_a_name_cannot_forge_a_record(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loraplex.audit")
    engine = FakeAsyncEngine()
    async with client_from(keyed_app(engine), ADMIN) as client:
        await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
    (event,) = audited(engine)
    assert event.text.isprintable()
    assert repr(name[:40]) in event.text
    assert len(event.text) < 300
    assert [text for text in caplog.messages if text == event.text]


@pytest.mark.parametrize("address", ["a\nb", "<script>", "", "10.0.0.1 with key 00000000"])
async def test_an_address_is_an_address(address: str) -> None:
    engine = FakeAsyncEngine({"sql": "/sql"})
    async with client_from(keyed_app(engine), ADMIN, address) as client:
        await client.post("/v1/adapters/sql/pin")
    assert audited(engine)[0].details["client"] == "an unknown address"


async def test_a_verb_whose_client_leaves_is_recorded() -> None:
    engine = FakeAsyncEngine({"sql": "/sql"})
    app = keyed_app(engine)
    call = AsgiCall(app, "/v1/adapters/sql/pin", {}, headers={"authorization": f"Bearer {ADMIN}"})
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)
    assert audited(engine) == []  # nothing had begun
    release = asyncio.Event()
    begun = asyncio.Event()

    async def pin(verb: object, name: str, check_answer: object) -> bool:
        assert (verb, name) == (LoRARegistry.pin, "sql")
        begun.set()
        await release.wait()
        return True

    engine.on_registry = pin  # type: ignore[method-assign]
    call = AsgiCall(keyed_app(engine), "/v1/adapters/sql/pin", {}, headers={"authorization": f"Bearer {ADMIN}"})
    await begun.wait()
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)
    assert [event.details["status"] for event in audited(engine)] == [499]


async def test_a_mistake_of_the_server_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeAsyncEngine({"sql": "/sql"})

    async def pin(verb: object, name: str, check_answer: object) -> bool:
        raise RuntimeError("bug")

    monkeypatch.setattr(engine, "on_registry", pin)
    async with client_from(keyed_app(engine), ADMIN) as client:
        assert (await client.post("/v1/adapters/sql/pin")).status_code == 500
    assert [event.details["status"] for event in audited(engine)] == [500]


# ------------------------------------------------------------------------------------------------------ who may do what


async def test_an_inference_key_cannot_touch_adapters() -> None:
    """Any key could replace or delete any adapter."""
    engine = FakeAsyncEngine({"sql": "/sql"})
    assert engine.registry is not None
    before = engine.registry.refs()
    async with client_from(keyed_app(engine), KEY) as client:
        for method, path, body, _, _ in VERBS:
            answer = await client.request(method, path, json=body)
            assert answer.status_code == 403, path
            assert answer.json()["error"]["type"] == "permission_error"
        answer = await client.post("/v1/completions", json={"model": "sql", "prompt": "hi", "max_tokens": 1})
        assert answer.status_code == 200
    assert engine.registry.refs() == before
    assert not engine.is_profiling


async def test_without_an_admin_key_existing_controllers_go_on() -> None:
    engine = FakeAsyncEngine({"sql": "/sql", "chat": "/chat"})
    async with client_from(create_app(engine, ServerConfig(api_keys=(KEY,))), KEY) as client:
        for method, path, body, _, status in VERBS:
            assert (await client.request(method, path, json=body)).status_code == status


LOADING = VERBS[:5] + VERBS[9:16]


async def test_dynamic_loading_can_be_off() -> None:
    engine = FakeAsyncEngine({"sql": "/sql", "chat": "/chat"})
    assert engine.registry is not None
    before = engine.registry.refs()
    async with client_from(keyed_app(engine, disable_dynamic_loading=True), ADMIN) as client:
        for method, path, body, _, _ in LOADING:
            answer = await client.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "dynamic_loading_disabled"), path
        assert engine.registry.refs() == before
        for verb in ("pin", "unpin", "evict", "preload"):
            assert (await client.post(f"/v1/adapters/sql/{verb}")).status_code == 200
    app = create_app(engine, ServerConfig(disable_dynamic_loading=True))
    async with client_from(app, "none") as client:
        assert (await client.delete("/v1/adapters/sql")).status_code == 403


async def test_verbs_on_tenants_and_keys_say_which(tmp_path: Path) -> None:
    with tenancy(tmp_path) as server:
        async with client_from(server.app, server.keys["admin"]) as client:
            made = (await client.post("/v1/keys", json={"role": "tenant", "tenant": "acme"})).json()
            verbs: list[tuple[str, str, Any, dict[str, str]]] = [
                ("POST", "/v1/keys", {"role": "tenant", "tenant": "none"}, {"tenant": "none"}),
                ("DELETE", f"/v1/keys/{made['id']}", None, {"key": made["id"]}),
                ("DELETE", "/v1/keys/00000000", None, {"key": "00000000"}),
                ("POST", "/v1/tenants", {"name": "new"}, {"tenant": "new"}),
                ("PUT", "/v1/tenants/new", {"quota": {"pins": 1}}, {"tenant": "new"}),
                ("DELETE", "/v1/tenants/new", None, {"tenant": "new"}),
                ("PUT", "/v1/shares", {"adapter": "private", "tenants": ["acme"]}, {}),
            ]
            for method, path, body, _ in verbs:
                await client.request(method, path, json=body)
        first, *events = audited(server.engine)
        assert (first.details["target_key"], first.details["target_tenant"]) == (made["id"], "acme")
        for event, (_, _, _, target) in zip(events, verbs, strict=True):
            assert {kind: event.details.get(f"target_{kind}") for kind in target} == target
            assert all(f"{kind} {name!r}" in event.text for kind, name in target.items())
        assert events[-1].adapter_name == "private"
        assert made["key"] not in "".join(event.text for event in (first, *events))
