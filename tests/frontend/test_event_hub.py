"""The row of events: numbers, what is kept, followers at their own pace, threads."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from loraplex.events import EngineEvent, EventKind
from loraplex.frontend.event_hub import EventHub


def event(text: str, kind: EventKind = EventKind.LOAD) -> EngineEvent:
    return EngineEvent(kind, 1.0, text)


def texts(hub: EventHub, last_id: int) -> list[str]:
    return [numbered.event.text for numbered in hub.after(last_id).events]


def test_ids_grow_and_the_oldest_are_lost() -> None:
    hub = EventHub(max_kept=3)
    hub.extend(event(str(number)) for number in range(1, 6))
    assert hub.last_id == 5
    assert texts(hub, 0) == ["3", "4", "5"]
    assert hub.after(0).num_lost == 2
    assert (texts(hub, 4), hub.after(4).num_lost) == (["5"], 0)
    assert hub.after(5).events == ()
    assert hub.counts == {"load": 5}


def verb(text: str, tenant: str = "") -> EngineEvent:
    """On an adapter of acme, whoever calls it."""
    details = {"tenant": tenant} if tenant else {}
    return EngineEvent(EventKind.AUDIT, 1.0, text, adapter_name="acme/sql", details=details)


def test_a_tenant_with_many_events_loses_its_own() -> None:
    """A few thousand unpins of a tenant, which changed nothing, were all that was kept."""
    hub = EventHub(max_kept=6)
    hub.extend([verb("operator"), EngineEvent(EventKind.LOAD, 1.0, "beta", adapter_name="beta/sql"), event("base")])
    hub.extend(verb(str(number), "acme") for number in range(100))
    hub.add(EngineEvent(EventKind.LOAD, 1.0, "acme", adapter_name="acme/sql"))
    assert texts(hub, 0) == ["operator", "beta", "base", "98", "99", "acme"]
    assert [numbered.event_id for numbered in hub.after(0).events] == [1, 2, 3, 102, 103, 104]
    assert (hub.after(0).num_lost, hub.after(2).num_lost, hub.after(101).num_lost) == (98, 98, 0)


def test_the_newest_event_is_kept_of_any_number_of_tenants() -> None:
    hub = EventHub(max_kept=3)
    for number in range(10):
        hub.add(verb(str(number), f"tenant {number}"))
        assert texts(hub, number) == [str(number)]
    assert texts(hub, 0) == ["7", "8", "9"]


def test_an_id_of_another_server_gets_everything() -> None:
    hub = EventHub()
    hub.add(event("a"))
    assert texts(hub, 99) == ["a"]
    assert hub.after(99).num_lost == 0


def test_faults_are_warnings_and_loads_are_for_who_looks_closely(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "loraplex.events"):
        EventHub().extend([event("a"), event("s", EventKind.SWITCH), event("b", EventKind.FAULT)])
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "load: a"),
        ("INFO", "switch: s"),
        ("WARNING", "fault: b"),
    ]


async def test_a_follower_that_sleeps_finds_what_is_kept() -> None:
    hub = EventHub(max_kept=2)
    batches = hub.subscribe(0)
    hub.add(event("1"))
    assert [numbered.event_id for numbered in (await anext(batches)).events] == [1]
    hub.extend([event("2"), event("3"), event("4")])
    batch = await anext(batches)
    assert (batch.num_lost, [numbered.event_id for numbered in batch.events]) == (1, [3, 4])
    await batches.aclose()


async def test_events_of_another_thread_wake_every_follower() -> None:
    hub = EventHub()
    followers = [asyncio.ensure_future(anext(hub.subscribe(0))) for _ in range(3)]
    await asyncio.sleep(0)
    thread = threading.Thread(target=hub.add, args=(event("a"),))
    thread.start()
    for batch in await asyncio.gather(*followers):
        assert [numbered.event.text for numbered in batch.events] == ["a"]
    thread.join()


async def test_close_ends_followers_after_what_is_there() -> None:
    hub = EventHub()
    batches = hub.subscribe(7)  # of another server
    waiting = asyncio.ensure_future(anext(batches, None))
    await asyncio.sleep(0)
    hub.close()
    assert await waiting is None
    hub.add(event("a"))
    assert [batch.events[0].event.text async for batch in hub.subscribe(0)] == ["a"]


def test_a_follower_whose_loop_has_ended_holds_up_nobody() -> None:
    hub = EventHub()

    async def leave() -> None:
        task = asyncio.ensure_future(anext(hub.subscribe(0)))
        await asyncio.sleep(0)
        left.append(task)

    left: list[asyncio.Task[object]] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    left[0].cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()
    hub.add(event("a"))
    assert hub.last_id == 1
