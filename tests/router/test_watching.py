"""What polls and events teach the router of a replica, and what a page of any length or form does to it: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.core import Tier
from loraplex.errors import ConfigError
from loraplex.events import EngineEvent, EventKind
from loraplex.metrics import MemoryReport, TierReport
from loraplex.router import watching
from loraplex.router.replica import Replica
from loraplex.router.run import max_clients
from loraplex.router.settings import RouteSettings, replica_urls
from loraplex.router.watching import MAX_BASE_NAMES, MAX_HEALTH_BYTES, MAX_METRICS_BYTES, Watcher
from loraplex.routing import BreakerState
from loraplex.server import ServerConfig
from loraplex.server.listener import max_connections
from tests.router.parts import completion, replicas, router

KEY = "k" * 32


async def test_load_and_memory_are_learned() -> None:
    async with replicas(1) as (a,):
        a.engine.memory = MemoryReport(
            tiers=(TierReport("device", 10, 100, 1, 0.25),), num_kv_blocks=8, num_free_kv_blocks=8
        )
        async with router([a.name]) as front:
            replica: Replica = front.replica(a.name)
            assert replica.num_kv_blocks == 8
            assert replica.adapter_room == 0.75
            assert replica.known.tiers["sql"] in Tier
            a.engine.hold()
            calls = [asyncio.ensure_future(front.client.post("/v1/completions", json=completion())) for _ in range(3)]
            await front.until(lambda: replica.load.num_running == 3)
            assert replica.snapshot().num_requests == 3, "its own requests are not counted twice"
            a.engine.resume()
            await asyncio.gather(*calls)
            assert replica.snapshot().tier_of("sql") is Tier.DEVICE


async def test_names_that_come_and_go_by_need_make_no_list_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of them it was megabytes every ten seconds, of each replica."""
    monkeypatch.setattr(watching, "LIST_AGAIN_S", 0.0)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    async with replicas(1, adapter_sources=(f"dir={tmp_path}",)) as (a,), router([a.name]) as front:
        (watcher,) = front.fleet._watchers
        read: list[str] = []
        listed = watcher._listed

        async def and_count() -> Any:
            read.append("list")
            return await listed()

        monkeypatch.setattr(watcher, "_listed", and_count)
        for name in ("one", "two"):
            assert (await front.client.post("/v1/completions", json=completion(name))).status_code == 200
            await watcher.poll()
        assert a.engine.registry is not None
        a.engine.registry.unload("one")
        a.engine.record_event(EngineEvent(EventKind.UNLOAD, 0.0, "", adapter_name="one"))
        await asyncio.sleep(0.05)
        await watcher.poll()
        assert read == []
        a.engine.registry.load("other", "/other")
        await watcher.poll()
        await front.until(lambda: "other" in (front.replica(a.name).names.held or {}))


async def test_events_move_adapters_and_a_restart_empties_a_replica() -> None:
    def event(kind: EventKind, name: str | None, **details: Any) -> EngineEvent:
        return EngineEvent(kind, 0.0, "", adapter_name=name, details=details)

    async with replicas(1) as (a,), router([a.name]) as front:
        replica: Replica = front.replica(a.name)
        await front.client.post("/v1/completions", json=completion())
        for told, tier in (
            (event(EventKind.EVICT, "sql", tier="device"), Tier.HOST),
            (event(EventKind.EVICT, "sql", tier="host"), Tier.DISK),
            (event(EventKind.LOAD, "sql"), Tier.HOST),
            (event(EventKind.UNLOAD, "sql"), Tier.SOURCE),
        ):
            while replica.snapshot().tier_of("sql") is not tier:  # the stream may not be open yet
                a.engine.record_event(told)
                await asyncio.sleep(0.02)
        await front.client.post("/v1/completions", json=completion())
        assert replica.snapshot().tier_of("sql") is Tier.DEVICE
        a.engine.record_event(event(EventKind.RESTART, None))
        await front.until(lambda: not replica.known.tiers)


async def test_a_replica_that_shows_its_memory_to_admins_alone_needs_the_routers_key() -> None:
    keys = {"api_keys": ("x" * 32,), "admin_api_keys": (KEY,), "guard_metrics": True}
    async with replicas(1, **keys) as (a,):
        async with router([a.name]) as front:
            assert not front.replica(a.name).known.tiers
            headers = {"Authorization": f"Bearer {'x' * 32}"}
            counted = await front.client.post("/tokenize", json={"model": "chat", "prompt": "hi"}, headers=headers)
            assert counted.status_code == 200
            assert not front.replica(a.name).known.tiers, "the adapter has not run"
            answer = await front.client.post("/v1/completions", json=completion(), headers=headers)
            assert answer.status_code == 200
            assert dict(front.replica(a.name).known.tiers) == {"sql": Tier.DEVICE}
        async with router([a.name], key=KEY) as front:
            assert set(front.replica(a.name).known.tiers) == {"sql", "chat"}


class Pages:
    """A replica whose pages the test writes: path to status and body."""

    def __init__(self, pages: dict[str, tuple[int, bytes]]) -> None:
        self.pages = pages

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode().partition("?")[0]
            status, body = self.pages.get(path, (404, b""))
            writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(body)))
            writer.write(body)
            await writer.drain()


@contextlib.asynccontextmanager
async def watched(pages: dict[str, tuple[int, bytes]], now_s: list[float]) -> Any:
    server = await asyncio.start_server(Pages(pages), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = RouteSettings(connect_timeout_s=0.5)
    replica = Replica(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", settings, clock=lambda: now_s[0])
    try:
        yield replica, Watcher(replica, settings, lambda: now_s[0])
    finally:
        replica.close()
        server.close()


METRICS = b"""# HELP vllm:num_requests_running Requests in the batch.
vllm:num_requests_running{engine="0",model_name="base"} 3.0
vllm:num_requests_waiting{engine="0",model_name="base"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.25
"""


@pytest.mark.parametrize(
    "pages",
    [
        {"/metrics": (200, b"x" * (MAX_METRICS_BYTES + 1))},
        {"/metrics": (200, b"vllm:num_requests_running nan\nvllm:num_requests_waiting 1e999\n\xff")},
        {"/metrics": (500, b"")},
        {"/v1/memory": (200, b"{")},
        {"/v1/memory": (200, b'{"kv": 3}')},
        {"/v1/memory": (200, json.dumps({"top_adapters": [{"name": "a", "tier": "moon"}]}).encode())},
        {"/v1/memory": (200, b"[" * 100_000)},
    ],
)
async def test_pages_of_any_form_cost_a_replica_nothing(pages: dict[str, tuple[int, bytes]]) -> None:
    async with watched({"/health": (200, b"{}"), **pages}, [0.0]) as (replica, watcher):
        await watcher.poll()
        assert replica.snapshot().is_open
        assert replica.snapshot().num_requests == 0


async def test_the_numbers_of_a_page() -> None:
    async with watched({"/health": (200, b"{}"), "/metrics": (200, METRICS)}, [0.0]) as (replica, watcher):
        await watcher.poll()
        snapshot = replica.snapshot()
        assert (snapshot.num_running, snapshot.num_waiting) == (3, 4)
        assert replica.base_names == {"base"}


async def test_a_breaker_opens_after_failed_polls_and_a_probe_closes_it() -> None:
    now_s = [0.0]
    pages = {"/health": (200, b"{}")}
    async with watched(pages, now_s) as (replica, watcher):
        await watcher.poll()
        assert replica.snapshot().is_open
        pages["/health"] = (503, b"{}")
        await watcher.poll()
        assert not replica.snapshot().is_open, "what says that it cannot serve gets nothing, from the first time on"
        for _ in range(2):
            await watcher.poll()
        assert replica.breaker.state is BreakerState.OPEN
        pages["/health"] = (200, b"{}")
        await watcher.poll()
        assert replica.breaker.state is BreakerState.OPEN, "it is not asked in its pause"
        now_s[0] = 10.0
        await watcher.poll()
        assert replica.snapshot().is_open


async def test_an_endless_health_is_no_health() -> None:
    async with watched({"/health": (200, b"x" * (MAX_HEALTH_BYTES + 1))}, [0.0]) as (replica, watcher):
        await watcher.poll()
        assert not replica.snapshot().is_open


@pytest.mark.parametrize("path", ["/v1/memory", "/v1/models", "/v1/events"])
@pytest.mark.parametrize("body", [b'{"data":' + b"[" * 100_000, b'{"data":"\xff"}', b'{"kind":' + b"[" * 10_000])
async def test_no_page_ends_the_watching(path: str, body: bytes) -> None:
    body = b"data: " + body + b"\n\n" if path == "/v1/events" else body
    async with watched({"/health": (200, b"{}"), path: (200, body)}, [0.0]) as (replica, watcher):
        task = asyncio.ensure_future(watcher.run())
        await asyncio.sleep(0.2)
        assert not task.done()
        assert any("_follow" in repr(each.get_coro()) for each in asyncio.all_tasks())
        assert replica.snapshot().is_open
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_names_of_a_replica_are_bounded_in_number_and_length() -> None:
    """Each poll could add a name of the base model, each event one of 256 KiB."""
    models = {"data": [{"id": f"{index}" + "x" * (300 * (index % 2)), "parent": None} for index in range(200)]}
    memory = {"top_adapters": [{"name": "x" * 257, "tier": "host"}, {"name": "sql", "tier": "host"}]}
    pages = {
        "/health": (200, b"{}"),
        "/v1/memory": (200, json.dumps(memory).encode()),
        "/v1/models": (200, json.dumps(models).encode()),
    }
    async with watched(pages, [0.0]) as (replica, watcher):
        await watcher.poll()
        assert len(replica.base_names) == MAX_BASE_NAMES
        assert max(map(len, replica.base_names)) <= 256
        for index in range(100):
            pages["/metrics"] = (200, METRICS.replace(b"base", b"base%d" % index))
            await watcher.poll()
        assert len(replica.base_names) == MAX_BASE_NAMES
        assert dict(replica.known.tiers) == {"sql": Tier.HOST}


async def test_what_was_learned_is_bounded() -> None:
    async with watched({}, [0.0]) as (replica, _):
        replica.known.learn_tiers((f"a{index}", Tier.HOST) for index in range(70_000))
        assert len(replica.known.tiers) == 65_536
        assert "a69999" in replica.known.tiers
        assert "a0" not in replica.known.tiers


async def test_a_request_for_the_base_model_is_at_home_everywhere() -> None:
    """It goes to the shorter queue, whichever replica has answered for the base before."""
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        assert front.fleet.base_names == {"base"}
        await front.client.post("/v1/completions", json=completion("base"))
        for each in (a, b):
            each.engine.requests.clear()
            each.engine.hold()
        calls = [asyncio.ensure_future(front.client.post("/v1/completions", json=completion("base"))) for _ in range(4)]
        await front.until(lambda: a.engine.num_running + b.engine.num_running == 4)
        assert a.engine.num_running == b.engine.num_running == 2
        for each in (a, b):
            each.engine.resume()
        await asyncio.gather(*calls)


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["127.0.0.1:1", "http://127.0.0.1:1/"],
        ["http://127.0.0.1:1/prefix"],
        ["http://user:password@127.0.0.1:1"],
        ["ftp://127.0.0.1:1"],
        ["nonsense"],
    ],
)
def test_what_is_no_replica_is_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError):
        replica_urls(given)


@pytest.mark.parametrize(
    "wrong", [{"policy": "magic"}, {"max_attempts": 0}, {"replica_requests": 0}, {"poll_interval_s": 0.0}]
)
def test_what_is_no_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RouteSettings(**wrong)


def test_clients_leave_as_many_descriptors_for_replicas() -> None:
    assert 2 * max_clients(ServerConfig()) <= max_connections(ServerConfig())
    assert max_clients(ServerConfig(max_connections=3)) == 3
