"""Verbs, too, find room at --max-loaded-loras: names that came by need leave for them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from loraplex.adapters.registry import LoRARegistry
from loraplex.adapters.remote.fetched import FetchedFiles
from loraplex.adapters.sources.by_need import LoadsByNeed
from loraplex.server import ServerConfig, create_app
from loraplex.server.sources.room import MAX_LEAVING, NameRoom
from loraplex.tenants.records import TenantTable
from loraplex.testing import FakeAsyncEngine
from loraplex.testing.fake_engine import FakeNeedOpener
from tests.security.tenancy import tenancy
from tests.server.conftest import client_of
from tests.server.sources.test_resolver import Opener, ask, listed
from tests.server.test_tensors import tensors


class FullEngine(FakeAsyncEngine):
    """Has room for three names."""

    def __init__(self, adapters: dict[str, str], **settings: Any) -> None:
        super().__init__(adapters, max_loaded_loras=3, **settings)


FORM = {"name": (None, "new")}
FILES = {
    "config": ("adapter_config.json", b"{}"),
    "weights": ("adapter_model.safetensors", b"weights"),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    for name in ("a", "b", "c"):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "adapter_config.json").write_text("{}")
    return tmp_path / "root"


@asynccontextmanager
async def full(root: Path) -> AsyncIterator[tuple[httpx.AsyncClient, FakeAsyncEngine]]:
    """A server whose names came all by need, but one."""
    engine = FullEngine({"own": "/own"}, open_adapter=Opener())
    config = ServerConfig(adapter_sources=(f"dir={root}",), adapter_output_dir=str(root.parent / "made"))
    (root.parent / "made").mkdir()
    async with client_of(create_app(engine, config)) as client:
        for name in ("a", "b"):
            assert (await ask(client, name)).status_code == 200
        yield client, engine


VERBS = {
    "load": lambda client: client.post("/v1/adapters", json={"name": "new", "path": "/new"}),
    "put": lambda client: client.put("/v1/adapters/new", json={"path": "/new"}),
    "vllm": lambda client: client.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "/new"}),
    "sglang": lambda client: client.post("/load_lora_adapter", json={"lora_name": "new", "lora_path": "/new"}),
    "switch": lambda client: client.post("/v1/adapters/switch", json={"old": "own", "new": "new", "new_path": "/new"}),
    "clone": lambda client: client.post("/v1/adapters/own/clone", json={"name": "new"}),
    "upload": lambda client: client.post("/v1/adapters", files=FORM | FILES, headers={"X-Requested-With": "tests"}),
    "tensors": lambda client: client.put("/v1/adapters/new/tensors", content=tensors(config={})),
}


async def test_a_merge_makes_room_when_it_is_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And takes nothing away before."""
    seen: list[list[str]] = []
    async with full(root) as (client, engine):
        registry = engine.registry
        assert registry is not None

        def make(process: object, job: object, plan: object, folder: Path, max_bytes: int) -> None:
            seen.append(sorted(registry.names()))

        plan = SimpleNamespace(outlines=(), modules=(), nbytes=1)
        monkeypatch.setattr("loraplex.frontend.making._plan", lambda *asked: plan)
        monkeypatch.setattr("loraplex.frontend.making._make", make)
        body = {"name": "new", "adapters": [{"name": "own", "weight": 1.0}]}
        assert (await client.post("/v1/adapters/merge", json=body)).status_code == 202
        while (await client.get("/v1/merges/merge-1")).json()["state"] in ("waiting", "running"):
            await asyncio.sleep(0.005)
        assert seen == [["a", "b", "own"]]
        assert sorted(await listed(client)) == ["b", "new", "own"]


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_makes_room(root: Path, verb: str) -> None:
    """The least recently used goes; an adapter that a verb loaded never does."""
    async with full(root) as (client, _):
        answer = await VERBS[verb](client)
        assert answer.status_code in (200, 201), answer.text
        assert sorted(await listed(client)) == ["b", "new", "own"]


async def test_a_verb_on_a_name_that_is_there_takes_nothing_away(root: Path) -> None:
    async with full(root) as (client, _):
        body = {"name": "own", "path": "/new", "load_inplace": True}
        assert (await client.post("/v1/adapters", json=body)).status_code == 200
        assert (await client.post("/v1/adapters", json={"name": "a", "path": str(root / "a")})).status_code == 200
        assert sorted(await listed(client)) == ["a", "b", "own"]


async def test_without_a_name_that_may_leave_a_verb_is_refused_as_ever(root: Path) -> None:
    async with full(root) as (client, _):
        for name in ("a", "b"):
            assert (await client.post(f"/v1/adapters/{name}/pin")).status_code == 200
        refused = await client.post("/v1/adapters", json={"name": "new", "path": "/new"})
        assert (refused.status_code, "max_loaded_loras is 3" in refused.text) == (400, True)
        assert sorted(await listed(client)) == ["a", "b", "own"]


async def test_verbs_at_the_same_time_each_find_room(root: Path) -> None:
    async with full(root) as (client, _):
        bodies = [{"name": name, "path": f"/{name}"} for name in ("one", "two")]
        answers = await asyncio.gather(*(client.post("/v1/adapters", json=body) for body in bodies))
        assert [each.status_code for each in answers] == [200, 200]
        assert sorted(await listed(client)) == ["one", "own", "two"]


async def test_another_tenants_names_by_need_keep_no_verb_out(tmp_path: Path, root: Path) -> None:
    """A tenant that asks for all that a source has took every place, and kept it."""
    made_with: dict[str, Any] = {"open_adapter": Opener(), "make_engine": FullEngine}
    with tenancy(tmp_path, {}, None, adapter_sources=(f"dir={root}",), **made_with) as made:
        async with client_of(made.app) as client:
            for name in ("a", "b", "c"):
                assert (await ask(client, name, made.keys["acme"])).status_code == 200
            admin = {"authorization": f"Bearer {made.keys['admin']}"}
            body = {"name": "beta/own", "path": "/srv/beta/own"}
            loaded = await client.post("/v1/adapters", json=body, headers=admin)
            assert loaded.status_code == 200, loaded.text
            assert sorted(await listed(client, made.keys["admin"])) == ["acme/b", "acme/c", "beta/own"]


async def test_a_tenant_that_uses_all_its_names_keeps_no_others_out(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that were used just now stay, so requests for all of them, once a second, were 503 to all others."""
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 3600.0)
    made_with: dict[str, Any] = {"open_adapter": Opener(), "max_sourced_adapters": 3}
    with tenancy(tmp_path, {}, None, adapter_sources=(f"dir={root}",), **made_with) as made:
        async with client_of(made.app) as client:
            for name in ("a", "b", "c"):
                assert (await ask(client, name, made.keys["acme"])).status_code == 200
            assert (await ask(client, "a", made.keys["beta"])).status_code == 200
            assert (await ask(client, "b", made.keys["beta"])).status_code == 503, "it is within its share no more"
            assert sorted(await listed(client, made.keys["admin"])) == ["acme/b", "acme/c", "beta/a"]


async def test_pins_of_names_by_need_are_no_more_than_a_share(tmp_path: Path, root: Path) -> None:
    """A tenant pinned all names that may have come by need, and no other had one until it unpinned them."""
    made_with: dict[str, Any] = {"open_adapter": Opener(), "max_sourced_adapters": 3}
    with tenancy(tmp_path, {}, None, adapter_sources=(f"dir={root}",), **made_with) as made:
        async with client_of(made.app) as client:
            key = {"authorization": f"Bearer {made.keys['acme']}"}
            found = []
            for name in ("a", "b"):
                assert (await ask(client, name, made.keys["acme"])).status_code == 200
                found.append(await client.post(f"/v1/adapters/{name}/pin", headers=key))
            again = await client.post("/v1/adapters/a/pin", headers=key)
    assert [each.status_code for each in (*found, again)] == [200, 503, 200]


async def test_a_pin_by_a_versions_address_is_one_of_the_share(tmp_path: Path, root: Path) -> None:
    """`b@1` is pinned as `b`, and the share knew no such name."""
    made_with: dict[str, Any] = {"open_adapter": Opener(), "max_sourced_adapters": 3}
    with tenancy(tmp_path, {}, None, adapter_sources=(f"dir={root}",), **made_with) as made:
        async with client_of(made.app) as client:
            found = []
            for name in ("a", "b"):
                assert (await ask(client, name, made.keys["acme"])).status_code == 200
                found.append(await client.post(f"/v1/adapters/{name}@1/pin", headers=made.headers("acme")))
    assert [each.status_code for each in found] == [200, 503]


async def test_pins_at_the_same_time_are_no_more_than_a_share(tmp_path: Path, root: Path) -> None:
    """Each was checked before any other was noted, so all of them were within the share."""
    made_with: dict[str, Any] = {"open_adapter": Opener(), "max_sourced_adapters": 3}
    with tenancy(tmp_path, {}, None, adapter_sources=(f"dir={root}",), **made_with) as made:
        async with client_of(made.app) as client:
            for name in ("a", "b", "c"):
                assert (await ask(client, name, made.keys["acme"])).status_code == 200
            pins = (client.post(f"/v1/adapters/{name}/pin", headers=made.headers("acme")) for name in ("a", "b", "c"))
            found = await asyncio.gather(*pins)
    assert sorted(each.status_code for each in found) == [200, 503, 503]


async def test_switches_of_names_by_need_are_no_more_than_a_share(tmp_path: Path, root: Path) -> None:
    """They hold what was switched and what answers for it, and no share bound them: a tenant that switched all names
    that may have come by need kept others out."""
    made_with: dict[str, Any] = {"open_adapter": Opener(), "max_sourced_adapters": 2}
    with tenancy(tmp_path, {}, None, adapter_sources=(f"dir={root}",), **made_with) as made:
        async with client_of(made.app) as client:
            for name in ("a", "b"):
                assert (await ask(client, name, made.keys["acme"])).status_code == 200
            wish = {"old": "a", "new": "b"}
            refused = await client.post("/v1/adapters/switch", json=wish, headers=made.headers("acme"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_no_room"), refused.text
            assert (await ask(client, "a", made.keys["beta"])).status_code == 200


async def test_a_rollback_is_a_switch_within_the_share(tmp_path: Path, root: Path) -> None:
    """Switches that were rolled back one by one are all switched again by a second rollback of each."""
    adapters = {"acme/one": "/srv/acme/one", "acme/two": "/srv/acme/two"}
    made_with: dict[str, Any] = {"open_adapter": Opener(), "max_sourced_adapters": 2}
    with tenancy(tmp_path, adapters, None, adapter_sources=(f"dir={root}",), **made_with) as made:
        async with client_of(made.app) as client:

            async def does(verb: str, **wish: str) -> int:
                return (await client.post(f"/v1/adapters/{verb}", json=wish, headers=made.headers("acme"))).status_code

            for old, new in (("one", "a"), ("two", "b")):
                assert (await ask(client, new, made.keys["acme"])).status_code == 200
                assert await does("switch", old=old, new=new) == 200
                assert await does(f"{old}/rollback") == 200
            found = [await does("one/rollback"), await does("two/rollback"), await does("one/rollback")]
            assert found == [200, 503, 200], "the last one goes back, which holds nothing more"
            assert (await ask(client, "a", made.keys["beta"])).status_code == 200


KEEPING = {
    "clone": lambda client, name, key: client.post(f"/v1/adapters/{name}/clone", json={"name": "other"}, headers=key),
    "clone of a version": lambda client, name, key: client.post(
        f"/v1/adapters/{name}@1/clone", json={"name": "other"}, headers=key
    ),
    "pin": lambda client, name, key: client.post(f"/v1/adapters/{name}/pin", headers=key),
    "switch": lambda client, name, key: client.post(
        "/v1/adapters/switch", json={"old": "own", "new": name}, headers=key
    ),
    "tensors": lambda client, name, key: client.put(
        f"/v1/adapters/{name}/tensors", content=tensors(config={}), headers=key
    ),
}


@asynccontextmanager
async def fetched(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, str]]]:
    """A server with acme's key, where acme had a and b fetched; it may keep one of them."""
    files = FetchedFiles(tmp_path / "fetched", 5)
    place = tmp_path / "fetched" / "objects" / "list"
    for name in ("a", "b"):
        (place / name).mkdir(parents=True)
        (place / name / "adapter_config.json").write_text("{}")
    (tmp_path / "fetched").chmod(0o700)
    assert files.bytes_of([str(files.folder / "objects" / "list" / name) for name in ("a", "b")]) == 4
    with tenancy(tmp_path, {"acme/own": "/srv/acme/own"}, None, adapter_sources=(f"dir={place}",)) as made:
        made.engine._by_need = LoadsByNeed(files, FakeNeedOpener(Opener()))
        async with client_of(made.app) as client:
            for name in ("a", "b"):
                assert (await ask(client, name, made.keys["acme"])).status_code == 200
            yield client, made.headers("acme")


@pytest.mark.parametrize("verb", KEEPING)
async def test_what_stays_of_fetched_files_is_no_more_than_a_share(tmp_path: Path, verb: str) -> None:
    """A name leaves for others' files, and a clone of it does not: a tenant that cloned all that it had had fetched
    kept others from having anything fetched."""
    async with fetched(tmp_path) as (client, key):
        for name in ("one", "two"):
            clone = await client.post("/v1/adapters/a/clone", json={"name": name}, headers=key)
            assert clone.status_code == 200, "they have the same files"
        refused = await KEEPING[verb](client, "b", key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_no_room"), refused.text
        for name in ("one", "two"):
            assert (await client.delete(f"/v1/adapters/{name}", headers=key)).status_code == 200
        allowed = await KEEPING[verb](client, "b", key)
        assert allowed.status_code in (200, 201), allowed.text


async def test_clones_at_the_same_time_keep_no_more_than_a_share(tmp_path: Path) -> None:
    async with fetched(tmp_path) as (client, key):
        clones = (
            client.post(f"/v1/adapters/{name}/clone", json={"name": f"{name}-2"}, headers=key) for name in ("a", "b")
        )
        assert sorted(each.status_code for each in await asyncio.gather(*clones)) == [200, 503]


async def test_after_a_limit_was_lowered_so_many_leave_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands in one request's way would hold it, and the interpreter."""
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    engine = FakeAsyncEngine()
    assert engine.registry is not None
    for number in range(MAX_LEAVING + 10):
        engine.registry.load(f"name-{number}", f"/{number}", origin="source:dir")
    room = NameRoom(engine, TenantTable, 1)
    async with room.for_new("new", is_needed=True):
        room.make_for_needed(engine.registry, "new")
        assert len(engine.registry.names()) == 10
        await engine.on_registry(LoRARegistry.load, "new", "/new", origin="source:dir")
    async with room.for_new("other", is_needed=True):
        room.make_for_needed(engine.registry, "other")
        assert engine.registry.names() == ()


@pytest.mark.parametrize("how", ["name", "files"])
async def test_a_name_that_leaves_slowly_keeps_no_other_load_waiting(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Its journal's write and its engine were waited for under the lock of all loads; each has its own name leave."""
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    engine = FakeAsyncEngine()
    registry = engine.registry
    assert registry is not None
    for name in ("a", "b"):
        registry.load(name, f"/{name}", origin="source:dir")
    room, unload_idle = NameRoom(engine, TenantTable, 2), registry.unload_idle
    is_leaving, may_leave = threading.Event(), threading.Event()

    def slowly(name: str, *args: Any) -> bool:
        if name == "a":
            is_leaving.set()
            assert may_leave.wait(30), "others waited for it"
        return unload_idle(name, *args)

    monkeypatch.setattr(registry, "unload_idle", slowly)

    def make_room(name: str) -> None:
        if how == "files":
            assert room.evict(registry, lambda path: True, lambda used_still: True)
        else:
            room.make_for_needed(registry, name)

    async with room.for_new("one", is_needed=True), room.for_new("two", is_needed=True):
        first = asyncio.ensure_future(asyncio.to_thread(make_room, "one"))
        await asyncio.to_thread(is_leaving.wait, 30)
        await asyncio.to_thread(make_room, "two")
        assert registry.names() == ("a",)
        may_leave.set()
        await first
        assert registry.names() == ()


def test_no_name_leaves_for_files_that_would_not_fit_without_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    engine, told = FakeAsyncEngine({"own": "/own"}), list[list[str]]()
    registry = engine.registry
    assert registry is not None
    for name in ("a", "b", "busy"):
        registry.load(name, f"/{name}", origin="source:dir")
    held = registry.acquire("busy")

    def can_fit(used_still: Iterable[str]) -> bool:
        told.append(sorted(used_still))
        return False

    room = NameRoom(engine, TenantTable, 9)
    assert not room.evict(registry, lambda path: True, can_fit)
    assert (told, set(registry.names())) == ([["/busy", "/own"]], {"a", "b", "busy", "own"})
    registry.release(held)


class LookedAt(Counter[str]):
    """Says to a thread what it had when that looked, once it may be said."""

    def __init__(self) -> None:
        super().__init__()
        self.is_looked_at, self.may_say = threading.Event(), threading.Event()

    def __contains__(self, name: object) -> bool:
        found = super().__contains__(name)
        if threading.current_thread() is not threading.main_thread():
            self.is_looked_at.set()
            assert self.may_say.wait(30)
        return found


async def test_a_load_that_is_given_up_meanwhile_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread looked whether it still comes, it was given up, and the thread noted its place for good."""
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    engine = FakeAsyncEngine(max_loaded_loras=1)
    assert engine.registry is not None
    engine.registry.load("a", "/a", origin="source:dir")
    room, coming = NameRoom(engine, TenantTable, 9), LookedAt()
    room._coming = coming

    async def load() -> None:
        async with room.for_new("new"):
            raise AssertionError("it was given up")

    loading = asyncio.ensure_future(load())
    await asyncio.to_thread(coming.is_looked_at.wait, 30)
    loading.cancel()
    await asyncio.wait((loading,))
    coming.may_say.set()
    while engine.registry.names():
        await asyncio.sleep(0.001)
    assert room._placed == set()
