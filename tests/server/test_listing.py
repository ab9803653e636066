"""Lists of models and adapters: pages and filters, a long list holds up neither the event loop nor the engine."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from loraplex.adapters.registry import NameQuery, views
from loraplex.core import AdapterResidency
from loraplex.server import ServerConfig, create_app
from loraplex.server.adapter_schemas import AdapterCard
from loraplex.server.api_error import ApiError
from loraplex.server.listing import AdapterQuery
from loraplex.server.responses import ModelCard
from loraplex.testing import FakeAsyncEngine
from loraplex.testing.fake_adapter_store import FakeAdapterStore
from tests.server.conftest import client_of

NAMES = ("mid", "zeta", "alpha", "sql-2", "sql-1")
"""In the order of their loads."""


@pytest.fixture
def engine() -> FakeAsyncEngine:
    return FakeAsyncEngine({name: f"/adapters/{name}" for name in NAMES})


@pytest.fixture
async def client(engine: FakeAsyncEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(engine, ServerConfig())) as client:
        yield client


async def pages(client: httpx.AsyncClient, path: str, key: str, limit: int) -> list[list[str]]:
    found, after, has_more = [], "", True
    while has_more:
        page = (await client.get(path, params={"limit": limit, "after": after})).json()
        found.append([card[key] for card in page["data"]])
        assert (page["first_id"], page["last_id"]) == (found[-1][0], found[-1][-1])
        after, has_more = page["last_id"], page["has_more"]
    return found


async def test_pages_are_in_the_order_of_names_the_base_first(client: httpx.AsyncClient) -> None:
    assert await pages(client, "/v1/adapters", "name", 2) == [["alpha", "mid"], ["sql-1", "sql-2"], ["zeta"]]
    assert await pages(client, "/v1/models", "id", 2) == [["base", "alpha"], ["mid", "sql-1"], ["sql-2", "zeta"]]
    assert await pages(client, "/v1/models", "id", 1) == [["base"], *([name] for name in sorted(NAMES))]


@pytest.mark.parametrize(("path", "key", "first"), [("/v1/adapters", "name", ()), ("/v1/models", "id", ("base",))])
async def test_without_parameters_the_list_is_whole_and_in_the_order_of_loads(
    client: httpx.AsyncClient, path: str, key: str, first: tuple[str, ...]
) -> None:
    answer = (await client.get(path)).json()
    assert set(answer) == {"object", "data"}
    assert tuple(card[key] for card in answer["data"]) == (*first, *NAMES)


async def test_a_page_after_a_name_that_is_gone_goes_on_behind_it(client: httpx.AsyncClient) -> None:
    await client.delete("/v1/adapters/mid")
    for path, key in (("/v1/adapters", "name"), ("/v1/models", "id")):
        page = (await client.get(f"{path}?after=mid&limit=1")).json()
        assert ([card[key] for card in page["data"]], page["has_more"]) == (["sql-1"], True)
        end = (await client.get(f"{path}?after=zeta")).json()
        assert end == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("prefix=sql", ["sql-1", "sql-2"]),
        ("contains=l", ["alpha", "sql-1", "sql-2"]),
        ("contains=-2&prefix=s", ["sql-2"]),
        ("prefix=nope", []),
        ("pinned=true", ["zeta"]),
        ("pinned=false&limit=2", ["alpha", "mid"]),
        ("state=host", ["mid"]),
        ("state=device&prefix=s&limit=1", ["sql-1"]),
        ("state=loading", []),
        ("state=failed", []),
    ],
)
async def test_filters(client: httpx.AsyncClient, query: str, expected: list[str]) -> None:
    await client.post("/v1/adapters/zeta/pin")
    await client.post("/v1/adapters/mid/evict")
    assert [card["name"] for card in (await client.get(f"/v1/adapters?{query}")).json()["data"]] == expected


async def test_filters_of_models(client: httpx.AsyncClient) -> None:
    assert [card["id"] for card in (await client.get("/v1/models?contains=a")).json()["data"]] == [
        "base",
        "alpha",
        "zeta",
    ]


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("/v1/models?limit=0", "limit"),
        ("/v1/models?limit=1001", "limit"),
        ("/v1/adapters?limit=x", "limit"),
        ("/v1/adapters?state=gone", "state"),
        ("/v1/models?state=device", "state"),
        ("/v1/adapters?order=size", "order"),
        ("/v1/models?order=name", "order"),
    ],
)
async def test_what_a_list_does_not_take_is_400(client: httpx.AsyncClient, url: str, field: str) -> None:
    response = await client.get(url)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("field", ["state=device", "pinned=true", "order=bytes"])
async def test_what_is_the_operators_is_not_found_out_by_a_filter(engine: FakeAsyncEngine, field: str) -> None:
    user, admin = "u" * 32, "a" * 32
    config = ServerConfig(api_keys=(user,), admin_api_keys=(admin,))
    async with client_of(create_app(engine, config)) as client:

        async def ask(query: str, key: str) -> httpx.Response:
            return await client.get(f"/v1/adapters?{query}", headers={"Authorization": f"Bearer {key}"})

        refused = await ask(field, user)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, field.partition("=")[0])
        assert [(await ask(field, admin)).status_code, (await ask("limit=1", user)).status_code] == [200, 200]


@pytest.fixture
def threads_of_cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Which threads made cards."""
    threads: set[int] = set()
    of_adapter = AdapterCard.of

    def noted(*values: Any) -> AdapterCard:
        threads.add(threading.get_ident())
        return of_adapter(*values)

    monkeypatch.setattr(AdapterCard, "of", noted)
    model = ModelCard

    def noted_model(*values: Any) -> ModelCard:
        threads.add(threading.get_ident())
        return model(*values)

    monkeypatch.setattr("loraplex.server.model_names.ModelCard", noted_model)
    return threads


@pytest.mark.parametrize("path", ["/v1/adapters", "/v1/models", "/v1/adapters/mid"])
async def test_no_list_is_made_on_the_event_loop(
    client: httpx.AsyncClient, threads_of_cards: set[int], path: str
) -> None:
    """13,000 cards took 100 ms, in which no request was answered."""
    assert (await client.get(path)).status_code == 200
    assert threads_of_cards
    assert threading.get_ident() not in threads_of_cards


async def test_the_engine_is_asked_for_a_part_at_a_time_and_for_no_more_than_is_shown(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers between two steps: all of 13,000 adapters took 20 ms, and so did one of them."""
    asked: list[int] = []
    list_adapters = FakeAdapterStore.list_adapters

    def counted(store: FakeAdapterStore, adapter_ids: Sequence[int]) -> Sequence[AdapterResidency]:
        asked.append(len(adapter_ids))
        return list_adapters(store, adapter_ids)

    monkeypatch.setattr(FakeAdapterStore, "list_adapters", counted)
    monkeypatch.setattr(views, "NAMES_AT_ONCE", 2)
    assert len((await client.get("/v1/adapters")).json()["data"]) == len(NAMES)
    assert asked == [2, 2, 1]
    asked.clear()
    await client.get("/v1/adapters/mid")
    await client.get("/v1/adapters?limit=1")
    await client.get("/v1/adapters?prefix=sql-2")
    assert asked == [1, 2, 1]


def test_many_names_are_sorted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for 200,000 names kept the interpreter's lock for 0.2 s, and the event loop waited."""
    pieces: list[int] = []

    def counted(names: list[str]) -> list[str]:
        pieces.append(len(names))
        return sorted(names)

    monkeypatch.setattr(views, "sorted", counted, raising=False)
    names = [f"a{number * 7919 % 10_000:04}" for number in range(10_000)]
    assert list(NameQuery(after="a0099", is_sorted=True).of(names)) == sorted(names)[100:]
    assert sum(pieces) == 9_900
    assert max(pieces) <= views.SORTED_AT_ONCE < 9_900
    assert list(NameQuery(prefix="b", is_sorted=True).of(names)) == []


async def test_the_engine_is_asked_for_few_more_than_a_short_page_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of one adapter made it look at 2,048 names between two steps."""
    asked: list[int] = []
    list_adapters = FakeAdapterStore.list_adapters

    def counted(store: FakeAdapterStore, adapter_ids: Sequence[int]) -> Sequence[AdapterResidency]:
        asked.append(len(adapter_ids))
        return list_adapters(store, adapter_ids)

    monkeypatch.setattr(FakeAdapterStore, "list_adapters", counted)
    engine = FakeAsyncEngine({f"a{number:03d}": f"/adapters/{number}" for number in range(200)})
    async with client_of(create_app(engine, ServerConfig())) as client:
        assert len((await client.get("/v1/adapters?limit=1")).json()["data"]) == 1
        assert asked == [64]
        assert len((await client.get("/v1/adapters")).json()["data"]) == 200
        assert asked == [64, 64, 128, 8]


@pytest.mark.parametrize("order", ["bytes", "last_used", "requests"])
async def test_an_order_of_values_has_the_most_first_and_pages(engine: FakeAsyncEngine, order: str) -> None:
    assert engine.registry is not None
    infos = [
        replace(info, nbytes=num % 3, last_used_time=num % 3, num_requests=num % 3)
        for num, info in enumerate(engine.registry.infos(NameQuery(is_sorted=True)))
    ]
    expected = ["sql-1", "mid", "zeta", "alpha", "sql-2"]

    def listed(**query: Any) -> list[str]:
        return [info.ref.adapter_name for info in AdapterQuery(order=order, **query).ordered(infos)]

    assert listed() == expected
    for place, name in enumerate(expected, 1):
        assert listed(after=name) == expected[place:]
    with pytest.raises(ApiError, match="'gone' is not in this list"):
        listed(after="gone")
    assert AdapterQuery(order=order, after="zeta", prefix="s").names == NameQuery("s", is_sorted=True)


async def test_a_page_of_an_order_begins_behind_the_last_one(client: httpx.AsyncClient) -> None:
    for name in ("zeta", "mid", "zeta"):
        await client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1})

    async def page(**query: Any) -> tuple[list[str], bool]:
        answer = (await client.get("/v1/adapters", params={"order": "requests", "limit": 2, **query})).json()
        return [card["name"] for card in answer["data"]], answer["has_more"]

    assert await page() == (["zeta", "mid"], True)
    assert await page(after="mid") == (["alpha", "sql-1"], True)
    assert await page(after="sql-1") == (["sql-2"], False)
    assert await page(contains="t") == (["zeta"], False)
    gone = await client.get("/v1/adapters?order=bytes&after=nope")
    assert (gone.status_code, gone.json()["error"]["param"]) == (400, "after")
