"""Verbs on adapters through the router: on all replicas or on none, and what is said when that did not work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from numpy import float32, full
from safetensors.numpy import save

from loraplex.adapters.registry import AdapterText, DatabaseHealth, DatabaseState, OpenedAdapter
from loraplex.adapters.sources.uploads import UploadLimits, UploadStore
from loraplex.errors import AdapterFileFormatError, AdapterPathNotFoundError
from loraplex.router import exchange
from loraplex.testing import FakeAsyncEngine
from loraplex.testing.fake_engine import FakeHealth
from tests.router.parts import FakeReplica, RawReplica, Router, completion, replicas, router

HEADER = "X-Loraplex-Replicas"
NEW = {"name": "new", "path": "/adapters/new"}
STATE = ("path", "alias_of", "is_pinned")


async def cards(replica: FakeReplica) -> dict[str, tuple[Any, ...]]:
    """What a replica has, by name: path, alias, pin."""
    async with httpx.AsyncClient(base_url=f"http://{replica.name}", trust_env=False) as client:
        listed = (await client.get("/v1/adapters")).json()["data"]
    return {card["name"]: tuple(card[field] for field in STATE) for card in listed}


VERBS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/adapters", NEW),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/adapters/new"}),
    ("POST", "/v1/adapters", {"name": "sql", "path": "/adapters/other", "load_inplace": True}),
    ("PUT", "/v1/adapters/sql", {"path": "/adapters/other", "is_pinned": True}),
    ("PUT", "/v1/adapters/new", {"path": "/adapters/new"}),
    ("POST", "/v1/adapters/sql/clone", {"name": "copy"}),
    ("POST", "/v1/adapters/switch", {"old": "sql", "new": "chat"}),
    ("POST", "/v1/adapters/sql/pin", None),
    ("DELETE", "/v1/adapters/sql", None),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}),
]
EACH_VERB = pytest.mark.parametrize(
    ("method", "path", "body"), VERBS, ids=[f"{method} {path} {index}" for index, (method, path, _) in enumerate(VERBS)]
)


async def lost(request: bytes, writer: asyncio.StreamWriter) -> None:
    """It says that it has the adapter `sql`, and no other; in a verb its connection breaks."""
    if request.startswith(b"GET /v1/adapters/"):
        has_it = request.startswith(b"GET /v1/adapters/sql ")
        status, body = (b"200 OK", b'{"name":"sql","path":"/adapters/sql"}') if has_it else (b"404 Not Found", b"")
        head = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        writer.write(head + body)


def with_other(part: str) -> Callable[[str], OpenedAdapter]:
    """Opens any path, and finds other weights, or another text, than a fake engine does."""
    opened = FakeAsyncEngine()._open_unread

    def of(path: str) -> OpenedAdapter:
        if part == "weights":
            return replace(opened("/adapters/other"), path=path)
        return replace(opened(path), text=AdapterText.of({"chat_templates": {"default": "of another tenant"}}))

    return of


@EACH_VERB
async def test_a_verb_is_done_by_all(method: str, path: str, body: dict[str, Any] | None) -> None:
    async with replicas(2) as (a, b), replicas(1) as (alone,), router([a.name, b.name]) as front:
        before = await cards(a)
        await front.until(lambda: front.fleet.num_open == 2)
        answer = await front.client.request(method, path, json=body)
        async with httpx.AsyncClient(base_url=f"http://{alone.name}", trust_env=False) as client:
            wanted = await client.request(method, path, json=body)
        assert answer.status_code == wanted.status_code
        assert wanted.is_success
        assert answer.headers["content-type"] == wanted.headers["content-type"]
        assert answer.headers[HEADER] == f"{a.name}, {b.name}"
        assert await cards(a) == await cards(b) == await cards(alone) != before


@EACH_VERB
async def test_a_verb_that_one_replica_fails_is_undone_at_the_others(
    method: str, path: str, body: dict[str, Any] | None
) -> None:
    """The second replica has the names too, and is lost in the middle of the verb."""

    async with replicas(1) as (a,), RawReplica(lost).running() as raw, router([a.name, raw.name]) as front:
        before = await cards(a)
        answer = await front.client.request(method, path, json=body)
        reply = answer.json()
        assert answer.status_code == 502
        assert reply["error"]["code"] == "replicas_disagree"
        assert raw.name in reply["error"]["message"]
        by_name = {card["replica"]: card for card in reply["replicas"]}
        assert by_name[a.name] == {"replica": a.name, "status": by_name[a.name]["status"], "is_restored": True}
        assert by_name[a.name]["status"] in (200, 201)
        assert by_name[raw.name]["status"] == 0
        assert by_name[raw.name]["message"]
        assert await cards(a) == before


async def test_a_load_that_one_replica_refuses_leaves_all_as_they_were() -> None:
    async with replicas(3) as fleet, router([each.name for each in fleet]) as front:
        await front.until(lambda: front.fleet.num_open == 3)
        before = await cards(fleet[0])
        fleet[2].engine.errors_by_path["/adapters/new"] = AdapterPathNotFoundError("no such path: /adapters/new")
        answer = await front.client.post("/v1/adapters", json=NEW)
        reply = answer.json()
        assert (answer.status_code, reply["error"]["type"]) == (409, "conflict_error")
        assert "no such path" in reply["error"]["message"]
        assert "all are what they were before" in reply["error"]["message"]
        assert [card["status"] for card in reply["replicas"]] == [200, 200, 404]
        assert [await cards(each) for each in fleet] == [before] * 3


async def test_what_cannot_be_put_back_is_said() -> None:
    """The first replica has unloaded it, the second is lost, and meanwhile the directory is gone."""

    async with replicas(1) as (a,), RawReplica(lost).running() as raw, router([a.name, raw.name]) as front:
        a.engine.errors_by_path["/adapters/sql"] = AdapterPathNotFoundError("the directory is gone")
        answer = await front.client.delete("/v1/adapters/sql")
        reply = answer.json()
        assert answer.status_code == 502
        assert f"{a.name} could not be put back" in reply["error"]["message"]
        assert [card["is_restored"] for card in reply["replicas"]] == [False, True]


@pytest.mark.parametrize("part", ["weights", "text"])
async def test_what_has_other_content_now_is_not_put_back(part: str) -> None:
    """It was loaded again by its path, with an operator's key: a link that a tenant put there led to another one's."""

    async with replicas(1) as (a,), RawReplica(lost).running() as raw, router([a.name, raw.name]) as front:
        a.engine._open_source = with_other(part)
        answer = await front.client.delete("/v1/adapters/sql")
        assert [card["is_restored"] for card in answer.json()["replicas"]] == [False, True]
        assert "sql" not in await cards(a)


async def test_an_alias_whose_unload_another_replica_fails_is_one_again() -> None:
    """It was switched, with nothing loaded under its name, which changes nothing."""
    async with replicas(1) as (a,), RawReplica(lost).running() as raw, router([a.name, raw.name]) as front:
        a.engine.registry.switch("sql", "chat")
        before = await cards(a)
        answer = await front.client.delete("/v1/adapters/sql")
        assert [card["is_restored"] for card in answer.json()["replicas"]] == [True, True]
        assert await cards(a) == before


async def test_a_reload_that_changed_the_text_alone_is_undone() -> None:
    async with replicas(1) as (a,), RawReplica(lost).running() as raw, router([a.name, raw.name]) as front:
        a.engine._open_source = with_other("text")
        answer = await front.client.put("/v1/adapters/sql", json={"path": "/adapters/sql"})
        assert [card["is_restored"] for card in answer.json()["replicas"]] == [True, True]
        assert a.engine.registry.describe("sql").ref.text is None


async def test_a_replica_that_no_longer_says_what_it_has_is_not_restored_and_the_others_are() -> None:
    """Its refusal of the look ended the verb with 500, and nothing was said of the other replicas."""
    is_dead = False

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal is_dead
        is_dead |= request.startswith(b"DELETE")
        if is_dead:
            body = b'{"error":{"message":"the engine is dead","code":"engine_dead"}}'
            head = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
        else:
            await lost(request, writer)

    async with (
        replicas(2) as (a, b),
        RawReplica(answer).running() as raw,
        router([a.name, raw.name, b.name]) as front,
    ):
        await front.until(lambda: front.fleet.num_open == 3)
        before = await cards(a)
        deleted = await front.client.delete("/v1/adapters/sql")
        reply = deleted.json()
        assert (deleted.status_code, reply["error"]["code"]) == (502, "replicas_disagree")
        assert f"{raw.name} could not be put back" in reply["error"]["message"]
        assert [card["is_restored"] for card in reply["replicas"]] == [True, False, True]
        assert await cards(a) == await cards(b) == before


async def test_a_refusal_of_the_first_is_the_answer_and_nothing_has_happened() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await front.until(lambda: front.fleet.num_open == 2)
        for each in (a, b):
            each.engine.errors_by_path["/adapters/new"] = AdapterFileFormatError("rank must be >= 1, got 0")
        before = await cards(a)
        answer = await front.client.post("/v1/adapters", json=NEW)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_file_format")
        unknown = await front.client.delete("/v1/adapters/none")
        assert unknown.status_code == 404
        assert await cards(a) == await cards(b) == before


async def test_a_verb_for_named_replicas_is_theirs_alone() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await front.until(lambda: front.fleet.num_open == 2)
        answer = await front.client.post("/v1/adapters", json=NEW, headers={HEADER: b.name})
        assert answer.status_code == 200
        assert "new" not in await cards(a)
        assert "new" in await cards(b)
        union = await front.client.get("/v1/adapters", params={"limit": 2})
        page = union.json()
        assert [card["name"] for card in page["data"]] == ["chat", "new"]
        assert page["has_more"]
        unknown = await front.client.post("/v1/adapters", json=NEW, headers={HEADER: "elsewhere:1"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, HEADER)


async def test_a_verb_needs_every_replica_that_it_is_for() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await b.kill()
        await front.until(lambda: front.fleet.num_open == 1)
        answer = await front.client.post("/v1/adapters", json=NEW)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_unavailable")
        assert b.name in answer.json()["error"]["message"]
        assert "new" not in await cards(a)
        assert (await front.client.post("/v1/adapters", json=NEW, headers={HEADER: a.name})).status_code == 200
        await b.start()


async def test_a_key_that_may_not_is_refused_by_the_replica() -> None:
    keys = {"api_keys": ("k" * 32,), "admin_api_keys": ("a" * 32,)}
    async with replicas(2, **keys) as (a, b), router([a.name, b.name]) as front:
        await front.until(lambda: front.fleet.num_open == 2)
        for key, status in (("", 401), ("k" * 32, 403), ("a" * 32, 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            answer = await front.client.post("/v1/adapters", json=NEW, headers=headers)
            assert answer.status_code == status, key


async def test_a_tenants_verb_whose_replica_is_lost_is_a_502() -> None:
    """Its key gets 403 for what an admin's may see, and the verb is the replica's to judge: status 0 was answered."""

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET"):
            writer.write(b"HTTP/1.1 403 Forbidden\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")

    async with RawReplica(answer).running() as raw, router([raw.name]) as front:
        await front.until(lambda: front.fleet.num_open == 1)
        lost = await front.client.post("/v1/adapters", json=NEW)
        assert raw.requests[-1].startswith(b"POST /v1/adapters")
        assert (lost.status_code, lost.json()["error"]["code"]) == (502, "replica_lost")


async def test_a_refusal_of_a_key_is_the_replicas_and_names_the_verb(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "loraplex.audit")
    keys = {"api_keys": ("k" * 32,), "admin_api_keys": ("a" * 32,)}
    async with replicas(1, **keys) as (a,), router([a.name]) as front:
        await front.until(lambda: front.fleet.num_open == 1)
        answer = await front.client.post("/v1/adapters/sql/pin", headers={"Authorization": f"Bearer {'k' * 32}"})
        assert "POST /v1/adapters/sql/pin needs an admin key" in answer.json()["error"]["message"]
    assert "POST /v1/adapters/{name}/pin on adapter 'sql'" in caplog.text


# ---------------------------------------------------------------------------------------------------------------- turns

ADMIN = {"Authorization": "Bearer admin"}


class Slow:
    """Answers clients without a key with 401, looks at once, and verbs when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        status, body = b"200 OK", b"{}"
        if b"bearer admin" not in request.lower():
            status = b"401 Unauthorized"
        elif request.startswith(b"GET /v1/adapters/"):
            status = b"404 Not Found"
        elif not request.startswith(b"GET "):
            await self.release.wait()
        head = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        writer.write(head + body)


def verbs_of(raw: RawReplica) -> list[bytes]:
    return [request.split(b" ")[1] for request in raw.requests if not request.startswith(b"GET ")]


def pin(front: Router, name: str, *, at: RawReplica, headers: dict[str, str]) -> asyncio.Future[httpx.Response]:
    path = f"/v1/adapters/{name}/pin"
    return asyncio.ensure_future(front.client.post(path, headers={**headers, HEADER: at.name}))


async def test_clients_without_a_key_wait_for_no_turn_and_keep_none_from_an_admin() -> None:
    """40 of them took all 32 places: an admin's verbs were refused for as long as they liked."""
    slow = Slow()
    async with RawReplica(slow).running() as raw, router([raw.name]) as front:
        running = pin(front, "one", at=raw, headers=ADMIN)
        await front.until(lambda: len(verbs_of(raw)) == 1)
        refused = await asyncio.gather(*(pin(front, "none", at=raw, headers={}) for _ in range(40)))
        assert [answer.status_code for answer in refused] == [401] * 40
        waiting = [pin(front, f"next{index}", at=raw, headers=ADMIN) for index in range(40)]
        slow.release.set()
        answers = await asyncio.gather(running, *waiting)
        assert [answer.status_code for answer in answers] == [200] * 41
        assert len(verbs_of(raw)) == 41


async def test_verbs_of_one_address_with_invented_keys_are_one_clients() -> None:
    """At replicas without keys each had a turn of its own."""
    slow = Slow()
    async with RawReplica(slow).running() as raw, router([raw.name]) as front:
        turns = front.replica(raw.name).verb_turns
        calls = [pin(front, "sql", at=raw, headers={"Authorization": f"Bearer admin{index}"}) for index in range(5)]
        await front.until(lambda: sum(each.num_verbs for each in turns._clients.values()) == 5)
        assert len(turns._clients) == 1
        slow.release.set()
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}


async def test_a_replica_that_hangs_holds_no_verb_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request without a key held the verbs of all admins for as long as its replica did not answer: 300 s."""
    monkeypatch.setattr(exchange, "LOOK_TIMEOUT_S", 0.3)

    async def silent(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    slow = Slow()
    async with (
        RawReplica(silent).running() as hung,
        RawReplica(slow).running() as slow_one,
        RawReplica(slow).running() as other,
        router([hung.name, slow_one.name, other.name]) as front,
    ):
        keyless = pin(front, "sql", at=hung, headers={})
        await front.until(lambda: len(hung.requests) == 1)
        running = pin(front, "sql", at=slow_one, headers=ADMIN)
        await front.until(lambda: len(verbs_of(slow_one)) == 1)
        verb = pin(front, "sql", at=other, headers=ADMIN)
        await front.until(lambda: len(verbs_of(other)) == 1)
        assert not running.done()
        slow.release.set()
        assert [(await each).status_code for each in (running, verb)] == [200, 200]
        lost = await keyless
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "replica_unavailable")
        assert "nothing was changed" in lost.json()["error"]["message"]
        assert verbs_of(hung) == []


async def test_a_client_that_goes_away_gives_up_its_turn_but_not_a_verb_that_has_begun() -> None:
    slow = Slow()
    async with (
        RawReplica(slow).running() as raw,
        RawReplica(slow).running() as other,
        router([raw.name, other.name]) as front,
    ):
        begun = asyncio.ensure_future(front.client.post("/v1/adapters/begun/pin", headers=ADMIN))
        await front.until(lambda: len(verbs_of(raw)) == 1)
        gone, stays = (pin(front, name, at=raw, headers=ADMIN) for name in ("gone", "stays"))
        await front.until(lambda: sum(b"/v1/merges" in request for request in raw.requests) == 3)
        for call in (begun, gone):
            call.cancel()
        await asyncio.gather(begun, gone, return_exceptions=True)
        await asyncio.sleep(0.1)  # until the router has seen it
        slow.release.set()
        assert (await stays).status_code == 200
        assert verbs_of(raw) == [b"/v1/adapters/begun/pin", b"/v1/adapters/stays/pin"]
        assert verbs_of(other) == [b"/v1/adapters/begun/pin"], "all or none"


async def completion_at(replica: FakeReplica, model: str = "sql") -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{replica.name}", trust_env=False, timeout=20.0) as client:
        return await client.post("/v1/completions", json=completion(model))


async def test_a_replica_that_was_lost_while_a_verb_waited_gets_none() -> None:
    slow = Slow()
    async with RawReplica(slow).running() as raw, router([raw.name]) as front:
        running = pin(front, "one", at=raw, headers=ADMIN)
        await front.until(lambda: len(verbs_of(raw)) == 1)
        waiting = pin(front, "two", at=raw, headers=ADMIN)
        await front.until(lambda: sum(b"/v1/merges" in request for request in raw.requests) == 2)
        raw.health = b"HTTP/1.1 503 Service Unavailable"
        await front.until(lambda: front.fleet.num_open == 0)
        slow.release.set()
        assert (await running).status_code == 200
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_unavailable")
        assert verbs_of(raw) == [b"/v1/adapters/one/pin"]


async def test_names_of_replicas_are_not_sent_back() -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        await front.until(lambda: front.fleet.num_open == 1)
        answer = await front.client.post("/v1/adapters/sql/pin", headers={HEADER: "z" * 10_000})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, HEADER)
        assert "z" * 41 not in answer.text


async def test_models_are_the_union_and_a_page_of_it() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await front.until(lambda: front.fleet.num_open == 2)
        await front.client.post("/v1/adapters", json=NEW, headers={HEADER: b.name})
        everything = (await front.client.get("/v1/models")).json()
        assert sorted(card["id"] for card in everything["data"]) == ["base", "chat", "new", "sql"]
        first = (await front.client.get("/v1/models", params={"limit": 2})).json()
        assert [card["id"] for card in first["data"]] == ["base", "chat"]
        rest = (await front.client.get("/v1/models", params={"limit": 9, "after": first["last_id"]})).json()
        assert [card["id"] for card in rest["data"]] == ["new", "sql"]
        assert not rest["has_more"]
        bad = await front.client.get("/v1/models", params={"limit": "many"})
        assert bad.status_code == 400


WRITING = [
    ("POST", "/v1/adapters/merge", {"name": "both", "adapters": [{"name": "sql", "weight": 1.0}]}),
    ("POST", "/v1/adapters/sql/export", None),
    ("GET", "/v1/merges", None),
    ("DELETE", "/v1/merges/m1", None),
]


@pytest.mark.parametrize(("method", "path", "body"), WRITING, ids=[path for _, path, _ in WRITING])
async def test_what_writes_files_is_for_the_one_replica_that_is_named(method: str, path: str, body: Any) -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await front.until(lambda: front.fleet.num_open == 2)
        for named in ({}, {HEADER: f"{a.name}, {b.name}"}):
            refused = await front.client.request(method, path, json=body, headers=named)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_routed")
            assert HEADER in refused.json()["error"]["message"]
        answer = await front.client.request(method, path, json=body, headers={HEADER: b.name})
        async with httpx.AsyncClient(base_url=f"http://{b.name}", trust_env=False) as client:
            wanted = await client.request(method, path, json=body)
        assert (answer.status_code, answer.content) == (wanted.status_code, wanted.content)
        assert answer.headers[HEADER] == b.name


async def test_evict_and_preload_go_to_all() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await front.until(lambda: front.fleet.num_open == 2)
        for verb in ("preload", "evict"):
            answer = await front.client.post(f"/v1/adapters/sql/{verb}")
            assert (answer.status_code, answer.headers[HEADER]) == (200, f"{a.name}, {b.name}")


async def test_of_replicas_that_share_their_names_one_that_is_open_does_a_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reload at each of them would be a version more."""
    async with replicas(2) as (a, b):
        for replica in (a, b):
            shared = FakeHealth(True, database=DatabaseHealth(DatabaseState.CONNECTED, 0.0))
            monkeypatch.setattr(replica.engine, "health", lambda shared=shared: shared)
        async with router([a.name, b.name]) as front:
            answer = await front.client.post("/v1/adapters", json=NEW)
            assert (answer.status_code, answer.headers[HEADER]) == (200, a.name)
            assert ("new" in await cards(a), "new" in await cards(b)) == (True, False)
            answer = await front.client.post("/v1/adapters/sql/preload")
            assert answer.headers[HEADER] == f"{a.name}, {b.name}"
            await a.kill()
            await front.until(lambda: front.fleet.num_open == 1)
            answer = await front.client.post("/v1/adapters", json=NEW)
            assert (answer.status_code, answer.headers[HEADER]) == (200, b.name)
            assert "new" in await cards(b)
            await a.start()


# -------------------------------------------------------------------------------------------------------------- tensors


def tensors(value: float, size: int = 4) -> bytes:
    return save({"lora_A": full(size, value, float32)})


async def with_uploads(stack: AsyncExitStack, tmp_path: Path, count: int) -> list[FakeReplica]:
    found = [FakeReplica(UploadStore(tmp_path / str(number))) for number in range(count)]
    for each in found:
        await each.start()
        stack.push_async_callback(each.stop)
    return found


async def test_tensors_reach_all_replicas(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        a, b = await with_uploads(stack, tmp_path, 2)
        front = await stack.enter_async_context(router([a.name, b.name], max_upload_bytes=2**23))
        await front.until(lambda: front.fleet.num_open == 2)
        body = tensors(1.0, 2**20)  # longer than other bodies of verbs
        answer = await front.client.put("/v1/adapters/sql/tensors", content=body)
        assert (answer.status_code, answer.headers[HEADER]) == (200, f"{a.name}, {b.name}"), answer.text
        assert await cards(a) == await cards(b)
        assert (await cards(a))["sql"][0].startswith("upload://")
        for headers, status in (
            ({"if-match": '"0123"'}, 412),
            ({"content-digest": f"sha-256=:{'A' * 43}=:"}, 400),
            ({"if-match": answer.headers["etag"]}, 200),
        ):
            again = await front.client.put("/v1/adapters/sql/tensors", content=tensors(2.0), headers=headers)
            assert again.status_code == status, again.text
        too_long = await front.client.put("/v1/adapters/sql/tensors", content=bytes(2**23 + 1))
        assert too_long.status_code == 413


async def test_tensors_that_one_replica_refuses_are_undone_at_the_others(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        a, b = await with_uploads(stack, tmp_path, 2)
        b.engine.uploads.limits = UploadLimits(64, 64)
        front = await stack.enter_async_context(router([a.name, b.name]))
        await front.until(lambda: front.fleet.num_open == 2)
        before = await cards(a)
        answer = await front.client.put("/v1/adapters/sql/tensors", content=tensors(1.0))
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "replicas_disagree"), answer.text
        assert await cards(a) == await cards(b) == before
