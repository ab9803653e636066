"""GET /v1/models and /v1/adapters through the router: what bad replicas, and clients that ask for many, cannot do."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections import Counter
from typing import Any

import httpx
import pytest

from loraplex.router import keys, lists
from loraplex.router.lists import _Page, _Query, _union_of
from loraplex.server.urls import source_of
from tests.router.parts import RawReplica, replicas, router


def page(*names: str, **fields: Any) -> bytes:
    return json.dumps({"object": "list", "data": [{"name": name, **fields} for name in names]}).encode()


class Listing:
    """Answers with a list when `release` is set, and counts the lists that wait."""

    def __init__(self, body: bytes = b'{"data":[]}') -> None:
        self.body = body
        self.release = asyncio.Event()
        self.num_waiting = 0

    async def __call__(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        self.num_waiting += 1
        try:
            waits = [asyncio.ensure_future(self.release.wait()), asyncio.ensure_future(writer.wait_closed())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
        finally:
            self.num_waiting -= 1
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(self.body)
        writer.write(head + self.body)


async def test_lists_of_clients_without_a_key_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 connections from 100 addresses had all places, and lists of clients with a key waited."""
    monkeypatch.setattr(lists, "_ask", lambda *values: pytest.fail("a replica was asked for a list"))
    async with replicas(1, api_keys=("k" * 32,)) as (a,), router([a.name]) as front:
        for path in ("/v1/models", "/v1/adapters"):
            answer = await front.client.get(path)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


async def test_few_lists_are_made_at_a_time_and_those_of_clients_that_have_gone_end() -> None:
    """600 of them took every descriptor, and went on when their clients had gone."""
    listing = Listing()
    async with RawReplica(listing).running() as raw, router([raw.name]) as front:
        gone = [asyncio.ensure_future(front.client.get("/v1/adapters")) for _ in range(20)]
        await front.until(lambda: listing.num_waiting == lists.MAX_LISTS_OF_A_CLIENT)
        await asyncio.sleep(0.1)
        assert len(raw.requests) == lists.MAX_LISTS_OF_A_CLIENT
        for call in gone:
            call.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        stays = asyncio.ensure_future(front.client.get("/v1/models"))
        await front.until(lambda: raw.requests[-1].startswith(b"GET /v1/models"))
        listing.release.set()
        assert (await stays).status_code == 200
        assert len(raw.requests) < 20, "those that had not begun never do"


async def test_lists_of_a_tenants_keys_have_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten keys of one tenant had all places, and another tenant's list waited for seconds."""
    monkeypatch.setattr(keys, "PATH", b"/v1/adapters?limit=1")
    asked: Counter[bytes] = Counter()
    release = asyncio.Event()

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        key = request.partition(b"Bearer ")[2].partition(b"\r")[0]
        if b"limit=1" not in request.partition(b"\r")[0]:
            asked[key[:1]] += 1
            await release.wait()
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\nx-loraplex-tenant: " + key[:1]
        writer.write(head + b'\r\ncontent-length: 11\r\n\r\n{"data":[]}')

    async with RawReplica(answer).running() as raw, router([raw.name]) as front:
        calls = [
            asyncio.ensure_future(front.client.get("/v1/adapters", headers={"Authorization": f"Bearer {key}"}))
            for key in [f"a-{number}" for number in range(3 * lists.MAX_LISTS)]
        ]
        await front.until(lambda: asked[b"a"] == lists.MAX_LISTS_OF_A_CLIENT)
        other = asyncio.ensure_future(front.client.get("/v1/adapters", headers={"Authorization": "Bearer b-1"}))
        await front.until(lambda: asked[b"b"] == 1)
        assert asked[b"a"] == lists.MAX_LISTS_OF_A_CLIENT
        release.set()
        assert {answer.status_code for answer in await asyncio.gather(*calls, other)} == {200}


async def test_lists_of_one_address_with_invented_keys_are_one_clients() -> None:
    """At replicas without keys two of them had all places, and lists of other addresses waited."""
    listing = Listing()
    async with RawReplica(listing).running() as raw, router([raw.name]) as front:
        calls = [
            asyncio.ensure_future(front.client.get("/v1/adapters", headers={"Authorization": f"Bearer {index}"}))
            for index in range(2 * lists.MAX_LISTS)
        ]
        await front.until(lambda: listing.num_waiting >= lists.MAX_LISTS_OF_A_CLIENT)
        await asyncio.sleep(0.1)
        assert len(raw.requests) == lists.MAX_LISTS_OF_A_CLIENT
        listing.release.set()
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}


async def test_a_refusal_does_not_wait_for_a_replica_that_hangs() -> None:
    async def silent(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with (
        replicas(1, api_keys=("k" * 32,)) as (a,),
        RawReplica(silent).running() as hung,
        router([hung.name, a.name]) as front,
    ):
        async with asyncio.timeout(lists.LIST_TIMEOUT_S / 2):
            assert (await front.client.get("/v1/adapters")).status_code == 401


async def test_an_order_of_values_is_a_replicas_own() -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        refused = await front.client.get("/v1/adapters?order=bytes")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "order")
        assert (await front.client.get("/v1/adapters?order=name")).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"data":' + b"[" * 100_000, b'{"data":[3]}', b'{"data":[{"name":3}]}', b"{}", b"", b"\xff"],
)
async def test_a_replica_that_answers_with_no_list_is_left_out(body: bytes) -> None:
    listing = Listing(body)
    listing.release.set()
    async with (
        replicas(1) as (a,),
        RawReplica(listing).running() as bad,
        router([bad.name, a.name]) as front,
    ):
        answer = await front.client.get("/v1/adapters")
        assert (answer.status_code, answer.headers["x-loraplex-replicas"]) == (200, a.name)
        assert sorted(card["name"] for card in answer.json()["data"]) == ["chat", "sql"]


def test_cards_go_through_as_they_came_and_none_is_made() -> None:
    """Of 10,000 adapters each all values were made, in the event loop: 0.5 s for one request."""
    card: dict[str, Any] = {"tags": {str(index): [index] * 10 for index in range(10)}}
    pages = [_Page(name, page(*(f"{name}{index}" for index in range(500)), **card)) for name in ("b", "a")]
    num_bytes = sum(len(each.body) for each in pages)
    tracemalloc.start()
    try:
        asked, body = _union_of(pages, _Query("name", is_page=True, limit="600"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * num_bytes, "of values more than five times as much"
    reply = json.loads(body)
    assert asked == ["b", "a"]
    assert [each["name"] for each in reply["data"]] == sorted(f"{n}{i}" for n in "ab" for i in range(500))[:600]
    assert reply["data"][0] == {"name": "a0", **card}
    assert (reply["first_id"], reply["has_more"]) == ("a0", True)


async def test_a_long_list_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[bool, int]] = []
    real, address = lists.OffLoop.run, source_of("127.0.0.1")

    async def run(self: Any, client: str, work: Any, num_bytes: int, **named: Any) -> Any:
        ran.append((client == address, num_bytes))
        return await real(self, client, work, num_bytes, **named)

    monkeypatch.setattr(lists.OffLoop, "run", run)
    listing = Listing(page(*(f"a{index}" for index in range(2000))))
    listing.release.set()
    async with RawReplica(listing).running() as raw, router([raw.name]) as front:
        for headers in ({}, {"Authorization": "Bearer one"}):
            answer: httpx.Response = await front.client.get("/v1/adapters", headers=headers)
            assert len(answer.json()["data"]) == 2000
        assert ran == [(True, len(listing.body))] * 2, "in the turn of its address: no replica has taken the key"
