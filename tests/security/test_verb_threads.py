"""Verbs that wait (a hub that does not answer, a drain of a day) take threads of their own, and nothing else's."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import save

from loraplex.adapter_store import AddOutcome
from loraplex.adapters.registry import OpenedAdapter
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.sources.named import NamedSource
from loraplex.config import EngineConfig
from loraplex.errors import AdapterPathNotFoundError
from loraplex.frontend import messages as msg
from loraplex.frontend.async_engine import NUM_VERB_THREADS, AsyncEngine
from loraplex.frontend.engine_loop import EngineProcess
from loraplex.frontend.store import STORE_METHODS
from loraplex.processes.loader_threads import LoaderThreads, ReadSlots
from loraplex.server import ServerConfig, adapter_api, create_app, verb_turns
from loraplex.server.adapter_roots import AdapterRoots
from loraplex.server.api_error import ApiError
from loraplex.server.sources import resolver
from loraplex.server.verb_turns import VerbTurns
from loraplex.testing import FakeAsyncEngine
from tests.security.tenancy import tenancy


async def test_an_engine_gets_its_adapters_again_while_every_verb_thread_waits() -> None:
    """It stayed 503 until a verb ended: its adapters waited for a thread behind 128 loads."""
    engine = cast(Any, AsyncEngine(EngineConfig(model="/m"), None, None))
    release, restored = threading.Event(), threading.Event()
    engine._front = SimpleNamespace(registry=SimpleNamespace(restore=restored.set))
    for _ in range(NUM_VERB_THREADS):
        engine._verbs.submit(release.wait)
    try:
        await asyncio.wait_for(engine._restore(engine._runners.first), 5)
    finally:
        release.set()
    assert restored.is_set()


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """What hangs waits for it."""
    release = threading.Event()
    yield release
    release.set()


def client_at(app: FastAPI, address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(address, 1)), base_url="http://localhost")


async def begin_request(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, name: str
) -> asyncio.Future[httpx.Response]:
    """One that runs until the engine goes on."""
    running = asyncio.ensure_future(client.post("/v1/completions", json={"model": name, "prompt": "x"}))
    while not engine.num_running:
        await asyncio.sleep(0.001)
    return running


def test_loads_of_each_kind_together_leave_threads_for_verbs() -> None:
    """Loads by need took those of unload and pin."""
    assert NUM_VERB_THREADS - adapter_api.MAX_LOADS - resolver.MAX_LOADS >= adapter_api.MAX_VERBS


async def test_verbs_of_one_client_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb_turns, "PATIENCE_S", 0.01)
    turns = VerbTurns("loads", 3, 2)
    async with AsyncExitStack() as running:
        for client in ("a", "a", "b"):
            await running.enter_async_context(turns.of(client))
        for client, status in (("a", 429), ("b", 503)):
            with pytest.raises(ApiError, match="none of them ended for") as error:
                await running.enter_async_context(turns.of(client))
            assert error.value.status == status
    async with turns.of("a"):
        assert set(turns._clients) == {"a"}


async def test_a_verb_that_waits_gets_the_place_of_one_that_ends() -> None:
    turns, began = VerbTurns("loads", 1, 1), asyncio.Event()

    async def verb() -> None:
        async with turns.of("b"):
            began.set()

    async with turns.of("a"):
        waiting = asyncio.ensure_future(verb())
        await asyncio.sleep(0)
        assert not began.is_set()
    await asyncio.wait_for(waiting, 30)


async def test_loads_that_hang_leave_other_verbs_and_other_clients_alone(
    hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took all threads: no adapter could be pinned, or unloaded, and no client was told."""
    monkeypatch.setattr(verb_turns, "PATIENCE_S", 0.05)
    monkeypatch.setattr(adapter_api, "MAX_LOADS_OF_A_CLIENT", 1)
    engine = FakeAsyncEngine({"sql": "/adapters/sql"})
    open_adapter = engine._open_adapter
    assert engine.registry is not None
    engine.registry._loader._open_adapter = lambda path: (
        hang.wait(60) and open_adapter(path) if path == "/hung" else open_adapter(path)
    )
    app = create_app(engine, ServerConfig())
    async with client_at(app, "10.0.0.1") as client, client_at(app, "10.0.0.2") as other:
        hung = asyncio.ensure_future(client.post("/v1/adapters", json={"name": "hung", "path": "/hung"}))
        while engine.registry._table.load_under_way("hung") is None:
            await asyncio.sleep(0.001)
        refused = await client.post("/v1/adapters", json={"name": "x", "path": "/x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_verbs")
        assert "Retry-After" in refused.headers
        assert (await other.post("/v1/adapters", json={"name": "y", "path": "/y"})).status_code == 200
        assert (await client.post("/v1/adapters/sql/pin")).status_code == 200
        assert (await client.delete("/v1/adapters/hung")).status_code == 200, "which calls the load off"
        hang.set()
        assert (await hung).json()["error"]["code"] == "adapter_unloaded"


@pytest.mark.parametrize("verb", ["unload", "switch", "switch to a path"])
async def test_a_verb_that_waits_for_requests_takes_no_place_of_others(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request that ran on was enough: two tenants took all places for a day, and nothing else was unloaded."""
    monkeypatch.setattr(verb_turns, "PATIENCE_S", 2.0)
    for kind in ("VERBS", "LOADS"):
        monkeypatch.setattr(adapter_api, f"MAX_{kind}", 1)
        monkeypatch.setattr(adapter_api, f"MAX_{kind}_OF_A_CLIENT", 1)
    engine = FakeAsyncEngine({"sql": "/adapters/sql", "chat": "/adapters/chat"})
    assert engine.registry is not None
    engine.hold()
    async with client_at(create_app(engine, ServerConfig()), "10.0.0.1") as client:
        before = engine.registry.refs()["sql"]
        running = await begin_request(client, engine, "sql")
        body = {"old": "sql", "new": "chat", "deadline_s": 86400}
        if verb == "unload":
            asking = client.delete("/v1/adapters/sql", params={"deadline_s": 86400})
        elif verb == "switch":
            asking = client.post("/v1/adapters/switch", json=body)
        else:
            asking = client.post("/v1/adapters/switch", json={**body, "new": "new", "new_path": "/new"})
        waiting = asyncio.ensure_future(asking)
        while engine.registry.refs().get("sql") == before and not waiting.done():
            await asyncio.sleep(0.001)
        assert (await client.post("/v1/adapters/chat/pin")).status_code == 200
        assert (await client.post("/v1/adapters", json={"name": "x", "path": "/x"})).status_code == 200
        assert not waiting.done()
        engine.resume()
        answer = (await waiting).json()
        assert (answer["references"], answer["aborted"]) == (0, 0)
        assert (await running).status_code == 200


async def test_force_ends_requests_whose_verb_has_no_client_any_more() -> None:
    engine = FakeAsyncEngine({"sql": "/adapters/sql"})
    assert engine.registry is not None
    engine.hold()
    async with client_at(create_app(engine, ServerConfig()), "10.0.0.1") as client:
        running = await begin_request(client, engine, "sql")
        query = {"deadline_s": 0.05, "force": "true"}
        waiting = asyncio.ensure_future(client.delete("/v1/adapters/sql", params=query))
        while engine.registry.names():
            await asyncio.sleep(0.001)
        waiting.cancel()
        while not engine.store.aborted_adapters:
            await asyncio.sleep(0.001)
        engine.resume()
        assert (await running).status_code == 200, "of the fake, whose store ends no request"


async def test_ends_of_a_clients_waits_leave_a_thread_to_others(hang: threading.Event) -> None:
    """They ask the engine, which may be slow: those of 128 verbs stood before any other client's."""

    class Ending:
        """Waits for no request any more."""

        result, waits_for = 0, ([], 1.0)

        def __init__(self, end: Callable[[], object]) -> None:
            self._end = end

        def go_on(self) -> None:
            self._end()
            self.waits_for = None

    async def begin(ending: Any) -> Any:
        return ending

    drains, began = verb_turns.DrainWaits(), threading.Semaphore(0)
    flood = [
        asyncio.ensure_future(drains.run("a", 1.0, partial(begin, Ending(lambda: (began.release(), hang.wait(60))))))
        for _ in range(4)
    ]
    assert await asyncio.to_thread(began.acquire, timeout=60)
    await asyncio.wait_for(drains.run("b", 1.0, partial(begin, Ending(lambda: None))), 60)
    assert not any(each.done() for each in flood)
    hang.set()
    assert await asyncio.gather(*flood) == [0] * 4


async def test_verbs_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is refused before it changes anything."""
    monkeypatch.setattr(verb_turns, "PATIENCE_S", 0.05)
    monkeypatch.setattr(verb_turns, "MAX_WAITS_OF_A_CLIENT", 1)
    engine = FakeAsyncEngine({"sql": "/adapters/sql", "chat": "/adapters/chat"})
    assert engine.registry is not None
    engine.hold()
    async with client_at(create_app(engine, ServerConfig()), "10.0.0.1") as client:
        running = await begin_request(client, engine, "sql")
        waiting = asyncio.ensure_future(client.delete("/v1/adapters/sql", params={"deadline_s": 60}))
        while "sql" in engine.registry.names():
            await asyncio.sleep(0.001)
        assert (await client.delete("/v1/adapters/chat", params={"deadline_s": 60})).status_code == 429
        assert (await client.delete("/v1/adapters/chat")).status_code == 200
        engine.resume()
        assert ((await waiting).status_code, (await running).status_code) == (200, 200)


async def test_a_path_is_looked_at_in_threads_of_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In those of long answers, six links on a file system that hangs held all of them up."""
    threads: list[str] = []
    monkeypatch.setattr(AdapterRoots, "check", lambda *values: threads.append(threading.current_thread().name))
    app = create_app(FakeAsyncEngine(), ServerConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        await client.post("/v1/adapters", json={"name": "x", "path": "/x"})
    assert [name.rpartition("_")[0] for name in threads] == ["path-check"]


async def test_a_tenants_root_that_hangs_holds_up_its_own_loads_alone(
    hang: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was resolved in the event loop: with one mount that was dead no request of anything was answered."""
    began, resolve = asyncio.Event(), Path.resolve
    loop = asyncio.get_running_loop()

    def resolved(path: Path, strict: bool = False) -> Path:
        if str(path) == "/srv/acme":
            loop.call_soon_threadsafe(began.set)
            assert hang.wait(20)
        return resolve(path, strict)

    with tenancy(tmp_path) as server:
        monkeypatch.setattr(Path, "resolve", resolved)
        async with client_at(server.app, "10.0.0.1") as client:
            body = {"name": "new", "path": "/srv/acme/new"}
            load = asyncio.ensure_future(client.post("/v1/adapters", json=body, headers=server.headers("acme")))
            await asyncio.wait_for(began.wait(), 60)
            assert (await client.get("/health")).status_code == 200
            pin = await client.post("/v1/adapters/sql/pin", headers=server.headers("beta"))
            assert pin.status_code == 200
            assert not load.done()
            hang.set()
            assert (await load).status_code == 200


@pytest.mark.parametrize("verb", ["load", "tensors", "switch to a path"])
async def test_a_tenants_roots_are_resolved_in_threads(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What opens files resolved them a second time, before it went to its thread."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads, resolve = set[threading.Thread](), Path.resolve

    def resolved(path: Path, strict: bool = False) -> Path:
        if str(path) == "/srv/acme":
            threads.add(threading.current_thread())
        return resolve(path, strict)

    def open_adapter(path: str) -> OpenedAdapter:
        AdapterSource().roots_of(Path(path))
        return OpenedAdapter(path, "0" * 64, 1, 1, None)

    with tenancy(tmp_path, open_adapter=open_adapter) as server:
        monkeypatch.setattr(Path, "resolve", resolved)
        async with client_at(server.app, "10.0.0.1") as client:
            client.headers.update(server.headers("acme"))
            if verb == "load":
                answer = await client.post("/v1/adapters", json={"name": "new", "path": "/srv/acme/new"})
            elif verb == "tensors":
                tensors = save({"lora_A": np.ones(4, np.float32)}, {"adapter_config": "{}"})
                answer = await client.put("/v1/adapters/new/tensors", content=tensors)
            else:
                body = {"old": "sql", "new": "new", "new_path": "/srv/acme/new"}
                answer = await client.post("/v1/adapters/switch", json=body)
        assert answer.is_success, answer.text
    assert threading.current_thread() not in threads
    assert verb == "tensors" or len(threads) == 2, "of checks, and of what opens"


async def test_a_tenants_root_that_is_a_loop_of_links_has_nothing(tmp_path: Path) -> None:
    """Python before 3.13 raises RuntimeError for it, which was a 500."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with tenancy(tmp_path) as server:
        server.store.change_tenant("acme", [str(loop)])
        server.refresh()
        async with client_at(server.app, "10.0.0.1") as client:
            body = {"name": "new", "path": "/srv/acme/new"}
            answer = await client.post("/v1/adapters", json=body, headers=server.headers("acme"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_path_forbidden")


def test_jobs_that_hang_are_replaced(hang: threading.Event) -> None:
    """Two sources on a dead disk, and no adapter of any tenant was loaded any more."""
    loader, done = LoaderThreads(2, stuck_s=0.01), threading.Event()
    for _ in range(2):
        loader.submit(lambda: cast(None, hang.wait()))
    loader.submit(done.set)
    assert done.wait(60)
    hang.set()
    ends = [threading.Event() for _ in range(20)]
    for end in ends:
        loader.submit(end.set)
    assert all(end.wait(60) for end in ends)
    loader.close()
    assert not loader._threads


def test_jobs_of_a_tenant_keep_no_other_ones_waiting(hang: threading.Event) -> None:
    """200 files with a slow pattern, and another tenant's request waited for ten minutes."""
    loader, done, others = LoaderThreads(2), threading.Event(), []
    for number in range(200):
        loader.submit(lambda number=number: others.append(number) or hang.wait(60), "acme")  # type: ignore[misc]
    loader.submit(done.set, "beta")
    assert done.wait(60)
    assert others == [0, 1], "two at a time, in order"
    hang.set()
    loader.close()
    assert not loader._threads


def test_threads_stay_for_the_next_job_and_no_more_than_that() -> None:
    loader, barrier = LoaderThreads(2), threading.Barrier(7)
    for number in range(6):
        loader.submit(lambda: cast(None, barrier.wait(60)), f"t{number}")
    barrier.wait(60)
    while loader._lanes or loader._num_idle < len(loader._threads):
        time.sleep(0.001)
    kept = set(loader._threads)
    assert len(kept) == 2
    done = threading.Event()
    loader.submit(done.set)
    assert done.wait(60)
    assert loader._threads == kept
    loader.close()


def test_a_job_that_fails_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Its thread was gone and counted as idle: the next job waited for it."""
    loader, done = LoaderThreads(1), threading.Event()

    def fail() -> None:
        raise MemoryError("no memory for a copy")

    loader.submit(fail)
    while loader._lanes:
        time.sleep(0.001)
    (thread,) = loader._threads
    loader.submit(done.set)
    assert done.wait(60)
    assert loader._threads == {thread}
    assert "no memory for a copy" in caplog.text
    loader.close()


def test_reads_that_hang_take_no_place_of_others(hang: threading.Event) -> None:
    slots, done = ReadSlots(1, stuck_s=0.01), threading.Event()
    reading = threading.Event()

    def read(began: threading.Event) -> None:
        with slots.of(""):
            began.set()
            hang.wait()

    threads = [threading.Thread(target=read, args=(began,)) for began in (reading, done)]
    for thread in threads:
        thread.start()
    assert reading.wait(60)
    assert done.wait(60)
    hang.set()
    for thread in threads:
        thread.join()
    assert not slots._running


def test_reads_wait_for_a_place(hang: threading.Event) -> None:
    slots, began = ReadSlots(1), threading.Event()

    def read() -> None:
        with slots.of(""):
            began.set()

    with slots.of(""):
        thread = threading.Thread(target=read)
        thread.start()
        assert not began.wait(0.05)
    assert began.wait(60)
    thread.join()


@pytest.mark.parametrize("has_tenants", [False, True])
def test_a_tenant_leaves_a_place_to_read_to_others(has_tenants: bool) -> None:
    """One that cycled through a few adapters of gigabytes had both, and another's small one waited for seconds."""
    slots, began = ReadSlots(2, is_shared=lambda: has_tenants), threading.Event()

    def read() -> None:
        with slots.of("a"):
            began.set()

    thread = threading.Thread(target=read)
    with slots.of("a"):
        thread.start()
        assert began.wait(0.05 if has_tenants else 60) is not has_tenants
        if has_tenants:
            with slots.of("b"):
                assert not began.is_set()
    assert began.wait(60)
    thread.join(60)
    assert not slots._running


def test_a_single_place_to_read_is_any_tenants() -> None:
    slots = ReadSlots(1)
    with slots.of("a"):
        pass
    with slots.of("b"):
        pass


async def test_lists_of_a_source_have_two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 lists at once went over a directory in as many threads, and the event loop waited for all of them."""
    running, most, lists = [0], [0], NamedSource.names

    def counted(source: NamedSource, *values: Any) -> list[str]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        threading.Event().wait(0.02)
        found = lists(source, *values)
        running[0] -= 1
        return found

    monkeypatch.setattr(NamedSource, "names", counted)
    config = ServerConfig(adapter_sources=(f"dir={tmp_path}",))
    app = create_app(FakeAsyncEngine(), config)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answers = await asyncio.gather(*(client.get("/v1/adapters?source=dir") for _ in range(12)))
    assert {answer.status_code for answer in answers} == {200}
    assert most[0] <= adapter_api.NUM_LIST_THREADS


async def test_a_path_of_many_parts_is_refused_unresolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 paths of 4,000 characters at once were a stall of 0.4 s."""
    monkeypatch.setattr(Path, "resolve", lambda path, **options: pytest.fail("a call of the system for each part"))
    roots = AdapterRoots(("/srv",), (Path("/srv"),))
    with pytest.raises(AdapterPathNotFoundError, match=r"has 65 slashes, and a path may have 64"):
        roots.check("/x" * 65)


async def test_opens_and_pins_of_another_tenant_take_no_thread_of_pins_and_loads(hang: threading.Event) -> None:
    """Files with a slow pattern in eight threads, and no adapter was loaded for any request."""
    process = cast(Any, object.__new__(EngineProcess))
    process._loads, process._opens, process._quick_verbs = (LoaderThreads(1) for _ in range(3))
    process._ended, process._replies = [], queue.SimpleQueue()
    process._wake_write = os.open(os.devnull, os.O_WRONLY)
    store = SimpleNamespace(**dict.fromkeys(STORE_METHODS))
    store.open_adapter = lambda path, name, tenant, roots: hang.wait(60)
    store.promote_adapter = lambda adapter_id: (adapter_id == 6 and hang.wait(60)) or AddOutcome(True)
    store.tenant_of = {6: "acme", 7: "beta"}.get
    process._engine = SimpleNamespace(adapters=store, abort_adapter=None)
    try:
        process._call_store(msg.CallStore(1, "open_adapter", ("/a", "a", "acme", ())))
        process._call_store(msg.CallStore(3, "promote_adapter", (6,)))
        process._call_store(msg.CallStore(2, "promote_adapter", (7,)))
        reply = await asyncio.to_thread(process._replies.get, timeout=30)
        assert msg.decode_from_engine(reply).call_id == 2
    finally:
        hang.set()
        for threads in (process._loads, process._opens, process._quick_verbs):
            threads.close(60)
        os.close(process._wake_write)
