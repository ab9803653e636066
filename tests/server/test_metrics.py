"""/metrics: names, labels and what they count. Values of times are not looked at."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from loraplex.cpu import CpuUse
from loraplex.events import EngineEvent, EventKind
from loraplex.metrics import EngineStats, MemoryReport, StepTimes, TierReport
from loraplex.server import health_api
from loraplex.server.metrics_page import MetricsPage
from loraplex.testing import FakeAsyncEngine
from tests.server.asgi_call import AsgiCall
from tests.server.test_memory import REPORT

Samples = dict[str, list[tuple[dict[str, str], float]]]


def parse(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


async def scrape(client: httpx.AsyncClient) -> Samples:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse(response.text)


def value(samples: Samples, name: str) -> float:
    ((labels, found),) = samples[name]
    assert (labels["model_name"], labels["engine"]) == ("base", "0")
    return found


async def test_latencies_are_counted(client: httpx.AsyncClient) -> None:
    body = {"model": "sql", "prompt": "hi", "max_tokens": 5}
    await client.post("/v1/completions", json=body)
    await client.post("/v1/completions", json={**body, "stream": True})
    samples = await scrape(client)
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 2
    assert value(samples, "vllm:inter_token_latency_seconds_count") == 8
    assert value(samples, "vllm:e2e_request_latency_seconds_count") == 2
    assert value(samples, "loraplex:adapters") == 2
    assert value(samples, "loraplex:engine_up") == 1


async def test_adapters_of_running_requests(app: FastAPI, client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    calls = [
        AsgiCall(app, "/v1/completions", {"model": model, "prompt": "hi", "stream": True})
        for model in ("sql", "chat", "sql", "base")
    ]
    for call in calls:
        await call.start()
    samples = await scrape(client)
    assert value(samples, "vllm:num_requests_running") == 4
    ((labels, time),) = samples["vllm:lora_requests_info"]
    assert labels == {"max_lora": "0", "running_lora_adapters": "chat,sql", "waiting_lora_adapters": ""}
    assert time > 1e9
    engine.resume()
    for call in calls:
        await call.rest()


async def test_scrapes_that_come_together_are_one(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page needs no key, and takes 5 ms with thousands of adapters: eight scrapers took the event loop."""
    rendered: list[bytes] = []
    render = MetricsPage.render
    monkeypatch.setattr(MetricsPage, "render", lambda *values: rendered.append(render(*values)) or rendered[-1])
    monkeypatch.setattr(health_api, "KEPT_S", 1000.0)
    answers = await asyncio.gather(*(client.get("/metrics") for _ in range(20)))
    answers.append(await client.get("/metrics"))
    assert [answer.content for answer in answers] == rendered * 21
    monkeypatch.setattr(health_api, "KEPT_S", 0.0)
    await client.get("/metrics")
    assert len(rendered) == 2


async def test_a_dead_engine_leaves_a_page(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.die()
    samples = await scrape(client)
    assert value(samples, "loraplex:engine_up") == 0
    assert "vllm:num_requests_running" not in samples


@pytest.mark.parametrize(
    ("name", "label", "expected"),
    [
        ("vllm:num_requests_waiting", None, 3),
        ("vllm:kv_cache_usage_perc", None, 0.5),
        ("vllm:prompt_tokens_total", None, 10),
        ("vllm:generation_tokens_total", None, 20),
        ("vllm:num_preemptions_total", None, 1),
        ("vllm:spec_decode_num_drafts_total", None, 22),
        ("vllm:spec_decode_num_draft_tokens_total", None, 23),
        ("vllm:spec_decode_num_accepted_tokens_total", None, 24),
        ("loraplex:num_pauses_total", None, 2),
        ("vllm:prefix_cache_queries_total", None, 8),
        ("vllm:prefix_cache_hits_total", None, 6),
        ("vllm:request_success_total", {"finished_reason": "length"}, 4),
        ("loraplex:requests_waiting_by_cause", {"cause": "room"}, 2),
        ("loraplex:requests_admitted_total", {"waited_for": "load"}, 14),
        ("loraplex:target_tokens_total", {"outcome": "itl_missed"}, 21),
        ("loraplex:adapter_loads_total", {"cause": "request"}, 5),
        ("loraplex:adapter_load_seconds_total", None, 1.5),
        ("loraplex:adapter_load_failures_total", None, 7),
        ("loraplex:adapter_promotions_total", None, 9),
        ("loraplex:adapter_hits_total", None, 11),
        ("loraplex:adapter_misses_total", None, 12),
        ("loraplex:adapter_evictions_total", {"cause": "device:room"}, 13),
        ("loraplex:adapter_resident_bytes", {"tier": "device"}, 1024),
        ("loraplex:adapter_capacity_bytes", {"tier": "device"}, 4096),
        ("loraplex:adapter_pinned_bytes", None, 512),
        ("loraplex:steps_total", None, 100),
        ("loraplex:step_seconds_total", {"part": "forward"}, 2.5),
        ("loraplex:kernel_fallbacks_total", {"operator": "add_lora: no such dtype"}, 17),
        ("loraplex:graph_steps_total", {"kind": "lora"}, 15),
        ("loraplex:eager_steps_total", {"reason": "prefill"}, 16),
        ("loraplex:cpu_seconds_total", None, 17.5),
        ("loraplex:cpu_wait_seconds_total", None, 2.5),
        ("loraplex:cpu_left_out_seconds_total", None, 1.5),
        ("loraplex:cpu_preemptions_total", None, 18),
        ("loraplex:threads", None, 4),
        ("loraplex:active_threads", None, 3),
        ("loraplex:adapter_merges_total", None, 19),
        ("loraplex:merged_steps_total", None, 20),
    ],
)
def test_what_the_engine_counts(name: str, label: dict[str, str] | None, expected: float) -> None:
    stats = EngineStats(
        num_waiting=3,
        waiting_by_cause={"room": 2},
        num_prefix_queried_tokens=8,
        num_prefix_hit_tokens=6,
        num_preemptions=1,
        num_pauses=2,
        num_prompt_tokens=10,
        num_generated_tokens=20,
        num_drafts=22,
        num_draft_tokens=23,
        num_accepted_tokens=24,
        num_finished={"length": 4},
        num_admitted={"load": 14},
        target_outcomes={"itl_missed": 21},
        memory=MemoryReport(
            tiers=(TierReport("device", 1024, 4096, 2, 0.25),),
            pinned_bytes=512,
            num_kv_blocks=10,
            num_free_kv_blocks=5,
            counters={
                "loads_request": 5,
                "loads_from_disk": 4,
                "load_seconds": 1.5,
                "load_failures": 7,
                "promotions": 9,
                "hits": 11,
                "misses": 12,
                "evictions_device:room": 13,
                "merges": 19,
                "merged_steps": 20,
            },
        ),
        kernel_fallbacks={"add_lora: no such dtype": 17},
        step_times=StepTimes(100, {"schedule": 0.5, "forward": 2.5, "commit": 0.5}),
        graph_steps={"lora": 15},
        eager_steps={"prefill": 16},
        cpu=CpuUse(17.5, 2.5, 1.5, 18, 4, 3),
    )
    found = parse(MetricsPage("base").render(stats, {}).decode())[name]
    expected_labels = {"model_name": "base", "engine": "0", **(label or {})}
    assert (expected_labels, expected) in found
    if name == "loraplex:adapter_loads_total":
        assert len(found) == 1, "what was read is another counter"


def test_names_of_adapters_cannot_break_the_page() -> None:
    engine = FakeAsyncEngine({'we"ird\\na,me': "/x"})
    assert engine.registry is not None
    refs = engine.registry.refs()
    ids = tuple(ref.adapter_id for ref in refs.values())
    page = MetricsPage("base").render(EngineStats(running_adapter_ids=ids), refs).decode()
    assert parse(page)["vllm:lora_requests_info"][0][0]["running_lora_adapters"] == 'we"ird\\na,me'


@pytest.mark.parametrize(
    ("name", "label", "expected"),
    [
        ("loraplex:memory_pressure", {"tier": "host"}, 0.25),
        ("loraplex:memory_mode", {"mode": "low_memory"}, 1),
        ("loraplex:memory_mode", {"mode": "normal"}, 0),
        ("loraplex:memory_fragmentation", {}, 0.125),
        ("loraplex:memory_chunks", {"owner": "adapters"}, 3),
        ("loraplex:adapters_quarantined", {}, 2),
        ("loraplex:adapter_resident_bytes", {"tier": "host"}, 7),
        ("loraplex:adapter_resident_bytes", {"tier": "device"}, 5),
        ("loraplex:adapter_capacity_bytes", {"tier": "device"}, 10),
        ("loraplex:events_total", {"kind": "load"}, 2),
    ],
)
def test_what_the_memory_says(name: str, label: dict[str, str], expected: float) -> None:
    found = parse(MetricsPage("base").render(EngineStats(memory=REPORT), {}, {"load": 2}).decode())[name]
    assert ({"model_name": "base", "engine": "0", **label}, expected) in found
    assert len({str(labels) for labels, _ in found}) == len(found)


async def test_events_are_counted(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.record_event(EngineEvent(EventKind.FAULT, 1.0, "x"))
    samples = await scrape(client)
    assert ({"model_name": "base", "engine": "0", "kind": "fault"}, 1.0) in samples["loraplex:events_total"]


def test_a_label_has_a_hundred_names_at_most() -> None:
    engine = FakeAsyncEngine({f"a{index:03}": f"/a{index}" for index in range(130)})
    assert engine.registry is not None
    refs = engine.registry.refs()
    ids = tuple(ref.adapter_id for ref in refs.values())
    stats = EngineStats(running_adapter_ids=ids, waiting_adapter_ids=ids[:100])
    labels = parse(MetricsPage("base").render(stats, refs).decode())["vllm:lora_requests_info"][0][0]
    running = labels["running_lora_adapters"].split(",")
    assert (len(running), running[0], running[-1]) == (101, "a000", "...+30")
    assert len(labels["waiting_lora_adapters"].split(",")) == 100


def test_a_merged_adapter_has_all_its_names() -> None:
    engine = FakeAsyncEngine({f"a{index:03}": f"/a{index}" for index in range(130)})
    assert engine.registry is not None
    refs = engine.registry.refs()
    merged = tuple(refs[name].adapter_id for name in ("a007", "a003"))
    found = parse(MetricsPage("base").render(EngineStats(memory=MemoryReport(merged=merged)), refs).decode())
    labels = {"model_name": "base", "engine": "0"}
    samples = [({**labels, "adapter": "a003"}, 1.0), ({**labels, "adapter": "a007"}, 1.0)]
    assert found["loraplex:adapter_merged"] == samples
    every = MemoryReport(merged=tuple(ref.adapter_id for ref in refs.values()))
    found = parse(MetricsPage("base").render(EngineStats(memory=every), refs).decode())
    assert len(found["loraplex:adapter_merged"]) == 100
    assert "loraplex:adapter_merged" not in parse(MetricsPage("base").render(EngineStats(), refs).decode())
