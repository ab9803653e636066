"""Counts by adapter and tenant: they only grow, nothing is lost, and few are shown by name."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core import CompletionOutput, RequestOutput
from loraplex.server import ServerConfig, create_app
from loraplex.server.metrics_page import COUNTED
from loraplex.server.telemetry import series
from loraplex.server.telemetry.series import (
    BASE,
    ELECTION_S,
    HALF_LIFE_S,
    LOOK_S,
    NO_TENANT,
    REST,
    BusiestSeries,
    RequestSeries,
)
from loraplex.tenants.usage import Counts, Tab
from loraplex.testing import FakeAsyncEngine
from tests.security.tenancy import Tenancy
from tests.server.asgi_call import AsgiCall
from tests.server.conftest import client_of
from tests.server.test_metrics import Samples, scrape


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tokens(count: int) -> Counts:
    return Counts(requests=1, prompt_tokens=count)


STEPS = st.lists(
    st.tuples(st.sampled_from("abcdefg"), st.integers(0, 1000), st.sampled_from([0.0, 1.0, ELECTION_S, HALF_LIFE_S])),
    max_size=60,
)


@given(STEPS, st.integers(0, 4))
def test_sums_grow_and_their_growth_is_all_that_was_counted(steps: list[tuple[str, int, float]], most: int) -> None:
    clock = Clock()
    busiest = BusiestSeries(most, clock)
    before: dict[str, int] = {}
    rest = 0
    for name, count, pause_s in steps:
        shown = busiest.shown()
        busiest.add(name, tokens(count))
        grown = busiest.rest.prompt_tokens - rest
        rest = busiest.rest.prompt_tokens
        if name in shown:
            assert grown == 0, "a name that is shown is no part of the rest"
        else:
            assert grown in (0, count)
        clock.now_s += pause_s
        after = {each: counts.prompt_tokens for each, counts in busiest.shown().items()}
        assert len(after) <= most
        assert all(after[each] >= before.get(each, 0) for each in after)
        before |= after
    for name in "abcdefg":
        of_name = sum(count for each, count, _ in steps if each == name)
        found = busiest.of(name)
        assert (found.prompt_tokens if found else 0) == of_name
    if most == 0:
        assert rest == sum(count for _, count, _ in steps)


def test_the_busiest_are_shown_and_what_was_busy_once_makes_room() -> None:
    clock = Clock()
    busiest = BusiestSeries(2, clock)
    for name, count in (("a", 10), ("b", 20), ("c", 1000)):
        busiest.add(name, tokens(count))
    assert list(busiest.shown()) == ["a", "b"], "no election yet"
    assert busiest.rest == tokens(1000)
    clock.now_s = ELECTION_S
    assert list(busiest.shown()) == ["b", "c"]
    assert busiest.shown()["c"] == tokens(1000)
    clock.now_s += 10 * HALF_LIFE_S
    busiest.add("a", tokens(30))
    assert list(busiest.shown()) == ["a", "c"], "30 tokens now are more than 20 ten half-lives ago"


def test_a_name_stays_until_another_has_clearly_more() -> None:
    clock = Clock()
    busiest = BusiestSeries(1, clock)
    busiest.add("a", tokens(100))
    busiest.add("b", tokens(110))
    clock.now_s = ELECTION_S
    assert list(busiest.shown()) == ["a"]


def test_weights_stay_numbers_however_long_it_runs() -> None:
    clock = Clock()
    busiest = BusiestSeries(1, clock)
    for _ in range(20):
        busiest.add("old", tokens(100))
        clock.now_s += 200 * HALF_LIFE_S
    busiest.add("new", tokens(1))
    assert list(busiest.shown()) == ["new"]


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MAX_KNOWN", 64)
    busiest = BusiestSeries(2)
    for index in range(1000):
        busiest.add(f"a{index}", tokens(index))
        assert len(busiest._known) <= 64
    assert busiest.of("a999") is not None
    assert busiest.of("a5") is None
    assert busiest.of("a0") is not None, "what is shown is kept"


# ------------------------------------------------------------------------------------------------------------ the page


def of_adapter(samples: Samples, name: str, label: str = "adapter") -> dict[str, float]:
    return {labels[label]: value for labels, value in samples.get(name, [])}


async def complete(client: httpx.AsyncClient, model: str, **fields: object) -> None:
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, **fields}
    assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_requests_are_counted_by_adapter(client: httpx.AsyncClient) -> None:
    for model in ("sql", "sql", "chat", "base"):
        await complete(client, model)
    samples = await scrape(client)
    expected = {"sql": 2.0, "chat": 1.0, BASE: 1.0}
    assert of_adapter(samples, "loraplex:adapter_requests_total") == expected
    drawn = {name: 5 * count for name, count in expected.items()}
    assert of_adapter(samples, "loraplex:adapter_generation_tokens_total") == drawn
    asked = {name: 3 * count for name, count in expected.items()}
    assert of_adapter(samples, "loraplex:adapter_prompt_tokens_total") == asked
    assert set(of_adapter(samples, "loraplex:adapter_request_errors_total").values()) == {0.0}
    assert of_adapter(samples, "loraplex:tenant_requests_total", "tenant") == {}, "there are no tenants"


async def test_running_requests_count_before_they_end(app: FastAPI, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=2)
    call = AsgiCall(app, "/v1/completions", {"model": "sql", "prompt": [1, 2], "max_tokens": 5, "stream": True})
    await call.start()
    async with client_of(app) as client:
        samples = await scrape(client)
        assert of_adapter(samples, "loraplex:adapter_generation_tokens_total") == {"sql": 2.0}
        assert of_adapter(samples, "loraplex:adapter_requests_open") == {"sql": 1.0}
    engine.resume()
    await call.rest()
    async with client_of(app) as client:
        page = (await client.get("/metrics?adapter=sql")).text
    assert 'loraplex:adapter_generation_tokens_total{adapter="sql",engine="0",model_name="base"} 5.0' in page
    assert 'loraplex:adapter_requests_open{adapter="sql",engine="0",model_name="base"} 0.0' in page


@pytest.mark.parametrize("most", [0, 1])
async def test_what_is_not_shown_is_one_sum_and_there_on_request(engine: FakeAsyncEngine, most: int) -> None:
    app = create_app(engine, ServerConfig(metrics_top_adapters=most))
    async with client_of(app) as client:
        for model in ("sql", "chat", "base"):
            await complete(client, model)
        found = of_adapter(await scrape(client), "loraplex:adapter_requests_total")
        assert found == ({"sql": 1.0, REST: 2.0} if most else {REST: 3.0})
        page = (await client.get("/metrics", params={"adapter": ["chat", "nothing"]})).text
        assert 'loraplex:adapter_requests_total{adapter="chat",engine="0",model_name="base"} 1.0' in page
        assert "nothing" not in page
        assert "vllm:" not in page


async def test_names_of_a_query_are_bounded(client: httpx.AsyncClient) -> None:
    for params in ({"adapter": ["a"] * 21}, {"adapter": "a" * 513}):
        assert (await client.get("/metrics", params=params)).status_code == 400
    assert (await client.get("/metrics", params={"adapter": 'x"} 1\nforged 1'})).text.count("forged") == 0


async def test_names_of_adapters_and_tenants_cannot_break_the_page() -> None:
    hostile = 'we"ird\\na,me'
    engine = FakeAsyncEngine({hostile: "/x"})
    async with client_of(create_app(engine, ServerConfig())) as client:
        await complete(client, hostile)
        assert of_adapter(await scrape(client), "loraplex:adapter_requests_total") == {hostile: 1.0}


async def test_a_request_that_fails_is_an_error(app: FastAPI, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    call = AsgiCall(app, "/v1/completions", {"model": "sql", "prompt": "hi", "max_tokens": 5, "stream": True})
    await call.start()
    await app.state.context.in_flight.abort_all()
    await call.rest()
    app.state.context.in_flight.is_closing = False
    async with client_of(app) as client:
        samples = await scrape(client)
    assert of_adapter(samples, "loraplex:adapter_request_errors_total") == {"sql": 1.0}


async def test_tenants_are_counted_for_those_that_see_all(server: Tenancy) -> None:
    async with client_of(server.app) as client:
        for key, model in (("acme", "sql"), ("acme", "both"), ("beta", "secret"), ("inference", "public")):
            body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body, headers=server.headers(key))
            assert answer.status_code == 200, answer.text
        client.headers.update(server.headers("read-only"))
        samples = await scrape(client)
        by_tenant = of_adapter(samples, "loraplex:tenant_requests_total", "tenant")
        assert by_tenant == {"acme": 2.0, "beta": 1.0, NO_TENANT: 1.0}
        by_adapter = of_adapter(samples, "loraplex:adapter_requests_total")
        assert by_adapter == {"acme/sql": 1.0, "acme/both": 1.0, "beta/secret": 1.0, "public": 1.0}
        for key, status in (("acme", 403), ("acme read-only", 403), ("inference", 403), ("operator", 200)):
            for path in ("/metrics", "/metrics?adapter=beta/secret"):
                answer = await client.get(path, headers=server.headers(key))
                assert answer.status_code == status, (key, path)
                assert "secret" not in answer.text or status == 200


def test_many_pages_look_at_running_requests_once() -> None:
    clock = Clock()
    counted = RequestSeries(1, 1, clock)
    tab = Tab("", "", "sql", 3, 0.0)
    counted.open(tab)
    assert counted.adapters.shown() == {"sql": Counts(requests=1)}
    tab.output = RequestOutput("r", None, (1,), (CompletionOutput(0, "", (1, 2)),), False)
    assert counted.adapters.shown()["sql"].generated_tokens == 0
    clock.now_s = LOOK_S
    assert counted.adapters.shown()["sql"].generated_tokens == 2
    counted.end(tab)
    counted.end(tab)
    assert counted.adapters.shown() == {"sql": Counts(1, 0, 3, 0, 2, 0.0)}
    assert counted.num_open() == {}


def test_every_count_of_usage_is_a_series() -> None:
    assert COUNTED.keys() == set(Counts.__dataclass_fields__)
