"""GET /v1/memory: every part of the report is there under its name."""

from __future__ import annotations

import httpx

from loraplex.metrics import ChunkRun, MemoryMode, MemoryReport, MemorySample, TierReport
from loraplex.server import create_app
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

REPORT = MemoryReport(
    mode=MemoryMode.LOW_MEMORY,
    tiers=(TierReport("device", 5, 10, 2, 0.5), TierReport("host", 7, 20, 3, 0.25)),
    pinned_bytes=1,
    in_use_bytes=2,
    retiring_bytes=3,
    num_adapters=4,
    num_loading=5,
    chunk_bytes=1024,
    chunks=(ChunkRun("kv", 3), ChunkRun("adapters", 2), ChunkRun("free", 4), ChunkRun("adapters", 1)),
    fragmentation=0.125,
    kv_block_bytes=100,
    num_kv_blocks=10,
    num_free_kv_blocks=4,
    workspace_bytes=6,
    quarantined={1: "NaN", 99: "gone"},
    counters={"hits": 3, "load_seconds": 0.5},
    history=(MemorySample(1.5, MemoryMode.NORMAL, {"host": 0.5}, {"host": 5, "kv": 3}, 0.25),),
    merged=(1, 99),
    found={"device": 3, "disk": 1},
)


async def test_the_whole_report(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.memory = REPORT
    assert engine.registry is not None
    (name,) = [ref.adapter_name for ref in engine.registry.refs().values() if ref.adapter_id == 1]
    assert (await client.get("/v1/memory")).json() == {
        "object": "memory",
        "mode": "low_memory",
        "tiers": [
            {"tier": "device", "used_bytes": 5, "max_bytes": 10, "adapters": 2, "pressure": 0.5},
            {"tier": "host", "used_bytes": 7, "max_bytes": 20, "adapters": 3, "pressure": 0.25},
        ],
        "pinned_bytes": 1,
        "in_use_bytes": 2,
        "retiring_bytes": 3,
        "workspace_bytes": 6,
        "adapters": 4,
        "loading": 5,
        "fragmentation": 0.125,
        "chunk_bytes": 1024,
        "chunks": [
            {"owner": "kv", "chunks": 3},
            {"owner": "adapters", "chunks": 2},
            {"owner": "free", "chunks": 4},
            {"owner": "adapters", "chunks": 1},
        ],
        "chunks_by_owner": {"kv": 3, "adapters": 3, "free": 4},
        "kv": {"block_bytes": 100, "blocks": 10, "free_blocks": 4, "used_bytes": 600, "max_bytes": 1000},
        "quarantined": [
            {"adapter_id": 1, "adapter": name, "reason": "NaN"},
            {"adapter_id": 99, "adapter": None, "reason": "gone"},
        ],
        "counters": {"hits": 3, "load_seconds": 0.5},
        "history": [
            {
                "time": 1.5,
                "mode": "normal",
                "pressure": {"host": 0.5},
                "used_bytes": {"host": 5, "kv": 3},
                "fragmentation": 0.25,
            }
        ],
        "merged": [{"adapter_id": 1, "adapter": name}, {"adapter_id": 99, "adapter": None}],
        "found": {"device": 3, "disk": 1},
        "top_adapters": None,
    }


async def test_the_top_adapters(client: httpx.AsyncClient) -> None:
    reply = (await client.get("/v1/memory?adapters=true")).json()
    assert [each["name"] for each in reply["top_adapters"]] == ["chat", "sql"]
    recent = (await client.get("/v1/memory?adapters=true&order=last_used")).json()["top_adapters"]
    assert [each["last_used_time"] for each in recent] == sorted((e["last_used_time"] for e in recent), reverse=True)
    assert len((await client.get("/v1/memory?adapters=true&top=1")).json()["top_adapters"]) == 1


async def test_what_is_refused(client: httpx.AsyncClient) -> None:
    for query in ("top=0", "top=1001", "adapters=x", "order=name", "nope=1"):
        assert (await client.get(f"/v1/memory?{query}")).status_code == 400


async def test_without_lora_there_is_a_report() -> None:
    reply = (await client_of(create_app(FakeAsyncEngine(enable_lora=False))).get("/v1/memory?adapters=true")).json()
    assert (reply["tiers"], reply["top_adapters"]) == ([], [])


async def test_a_dead_engine_is_503(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.die()
    assert (await client.get("/v1/memory")).status_code == 503
