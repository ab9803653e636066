"""Attacks on the engine process from outside: stopped, killed repeatedly, kept busy. Requests are answered and it comes
back.

One engine for all tests, over the routes of the server: each test leaves it serving, with its adapters, and without a
reference held.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator

import httpx
import psutil
import pytest
import pytest_asyncio

from loraplex.demo.tasks import adapter_path
from loraplex.frontend import client as client_module
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.supervisor import Supervision
from loraplex.processes.engine_child import ENGINE_MODULE
from loraplex.server import ServerConfig, create_app
from tests.frontend.processes import demo_config, is_running, stretched_base, temporary_folder, until, within
from tests.server.conftest import client_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE_TIMEOUT_S = 3.0
LONG = {"model": "base", "prompt": "banana=", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"model": "upper", "prompt": "banana=", "temperature": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    """With a spare, and one pinned adapter. It runs one request at a time."""
    with temporary_folder(tmp_path_factory.mktemp("t")) as folder:
        config = demo_config(model=stretched_base(tmp_path_factory.mktemp("model") / "base"), max_num_seqs=1)
        supervision = Supervision(engine_timeout_s=ENGINE_TIMEOUT_S, has_standby=True)
        engine = await within(AsyncEngine.start(config, served_model_name="base", supervision=supervision))
        await within(engine.load_adapter("upper", str(adapter_path("upper")), is_pinned=True))
        yield engine
        num_faults = engine.events.counts["fault"]
        with stopped(engine):  # the end of a hung engine is no death: nothing is started after it
            await within(engine.shutdown())
        await asyncio.sleep(0.1)
        assert engine.events.counts["fault"] == num_faults
        assert list(folder.iterdir()) == []
    children = psutil.Process().children(recursive=True)
    assert [child.cmdline() for child in children if is_running(child.pid) and "python" in child.name()] == []


@pytest_asyncio.fixture(loop_scope="module")
async def http(engine: AsyncEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(engine, ServerConfig(probe_timeout_s=0.5))) as http:
        yield http
    await until(lambda: engine.health().is_alive)
    await within(engine.check_integrity())
    assert engine.registry is not None
    assert (engine.num_unfinished, engine.registry.num_references) == (0, 0)
    (info,) = await within(engine.list_adapters())
    assert info.is_pinned


@contextlib.contextmanager
def stopped(engine: AsyncEngine) -> Iterator[int]:
    """The process does nothing any more in this block. It may be killed there."""
    pid = engine.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def answer(http: httpx.AsyncClient) -> str:
    response = await within(http.post("/v1/completions", json=SHORT))
    return str(response.json()["choices"][0]["text"] if response.status_code == 200 else response.text)


async def test_a_hung_engine_is_killed_and_replaced(engine: AsyncEngine, http: httpx.AsyncClient) -> None:
    """Whatever waits for it is answered: requests, reads, verbs."""
    with stopped(engine) as pid:
        posts = [http.post("/v1/completions", json=body) for body in (LONG, SHORT)]
        posts.append(http.post("/v1/adapters/upper/evict", json={}))
        gets = [http.get(url) for url in ("/v1/memory", "/v1/adapters")]
        answers = await within(asyncio.gather(*posts, *gets))
        assert not engine.health().is_alive
        assert "the engine process no longer responds: nothing was heard of it for" in engine.health().message
        for response in answers:
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_dead"
            assert int(response.headers["retry-after"]) >= 1
    await until(lambda: engine.health().is_alive)
    assert not is_running(pid)
    assert await answer(http) == "BANANA"


async def test_reads_do_not_wait_for_a_silent_engine(
    engine: AsyncEngine, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before it counts as hung. When it goes on, so does all."""
    monkeypatch.setattr(client_module, "READ_TIMEOUT_S", 0.2)
    with stopped(engine) as pid:
        for _ in range(2):
            for url in ("/v1/memory", "/v1/adapters"):
                response = await within(http.get(url))
                assert response.status_code == 504
                assert response.json()["error"]["code"] == "engine_timeout"
        assert (await within(http.get("/metrics"))).status_code == 200
    monkeypatch.undo()
    assert (await within(http.get("/v1/memory"))).status_code == 200
    assert engine.engine_pid == pid


async def test_a_probe_sees_what_health_does_not_see_yet(engine: AsyncEngine, http: httpx.AsyncClient) -> None:
    probe = {"probe": "generate"}
    response = await within(http.get("/health", params=probe))
    assert (response.status_code, response.json()["probe_ms"] > 0) == (200, True)
    await asyncio.sleep(0.5)  # its outcome is not given again
    with stopped(engine):
        assert (await http.get("/health")).status_code == 200
        assert (await within(http.get("/health", params=probe))).status_code == 503
    await asyncio.sleep(0.5)
    assert (await within(http.get("/health", params=probe))).status_code == 200


async def test_a_deadline_frees_what_runs_and_what_waits(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
    """One request runs, the others wait behind it."""
    bodies = [{**LONG, "timeout": 0.5}, {**LONG, "model": "upper", "timeout": 0.4}, {**SHORT, "timeout": 0.3}]
    answers = await within(asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies)))
    assert [response.status_code for response in answers] == [504, 504, 504]
    assert await answer(http) == "BANANA"
    stats = await within(engine.stats())
    assert (stats.num_running, stats.num_waiting) == (0, 0)


async def test_a_deadline_holds_while_the_engine_is_silent(engine: AsyncEngine, http: httpx.AsyncClient) -> None:
    with stopped(engine):
        response = await within(http.post("/v1/completions", json={**SHORT, "timeout": 0.2}))
        assert response.status_code == 504
        assert engine.num_unfinished == 0


async def test_a_storm_of_kills(engine: AsyncEngine, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    """Every process of the engine at once, the spare too, again and again, most of them while they start."""
    seen: set[int] = set()
    async with asyncio.timeout(60):
        while len(seen) < 4:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid not in seen and ENGINE_MODULE in child.cmdline():
                        child.kill()
                        seen.add(child.pid)
            await asyncio.sleep(0.01)
    response = await within(http.post("/v1/completions", json=SHORT))
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    pauses = re.findall(r"it is (?:being )?restarted(?: in (\d+) s)?", caplog.text)
    assert len(pauses) >= 3
    assert {*pauses} <= {"", "1"}, "kills make no long pauses"
    await until(lambda: engine.health().is_alive)
    assert await answer(http) == "BANANA"
