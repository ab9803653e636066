"""The dashboard in Chromium, over an engine without weights: hostile names, thousands of adapters, keys, verbs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from loraplex.adapters.journal.tables import JournalTables
from loraplex.events import EngineEvent, EventKind
from loraplex.metrics import ChunkRun, MemoryReport, TierReport
from loraplex.server import ServerConfig
from loraplex.tenants.records import Role
from loraplex.tenants.store import TenantStore
from loraplex.testing import FakeAsyncEngine
from tests.server.live_server import LiveServer

pytestmark = pytest.mark.browser

HOSTILE = ("<img src=x onerror='window.hacked=1'>", '"><script>window.hacked=1<', "{{7*7}}${7*7}&lt;b&gt;")
EVENT = "<script>window.hacked=1</script> left the device"
EXPECTED = re.compile("^Failed to load resource|requires 'TrustedHTML' assignment")
"""Answers that are errors, which the browser writes down, and what a test tries."""

USER, ADMIN = "u" * 32, "a" * 32
REPORT = MemoryReport(
    tiers=(TierReport("device", 5, 10, 2, 0.5), TierReport("host", 7, 20, 3, 0.25)),
    chunk_bytes=1024,
    chunks=(ChunkRun("kv", 3), ChunkRun("adapters", 2), ChunkRun("free", 4)),
    found={"device": 9, "disk": 1},
)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("LORAPLEX_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the dashboard of a server with a key. At the end nothing was asked of another site, and no script failed or
    did what the policy forbids, but for EXPECTED."""
    contexts: list[Any] = []
    complaints: list[str] = []
    asked: set[str] = set()
    servers: set[str] = set()

    def open_one(server: LiveServer, key: str | None = None, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        servers.add(server.url)
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        page.on("request", lambda request: asked.add("/".join(request.url.split("/")[:3])))
        if key is not None:
            page.add_init_script(f"if (!sessionStorage.length) sessionStorage.setItem('loraplex-key', '{key}')")
        page.goto(f"{server.url}/dashboard")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert asked == servers
    assert [each for each in complaints if not EXPECTED.search(each)] == []


def config(**settings: Any) -> ServerConfig:
    return ServerConfig(port=0, access_log=False, log_level="warning", shutdown_grace_s=0.0, **settings)


def test_names_and_texts_of_others_stay_text(open_page: Open) -> None:
    engine = FakeAsyncEngine({name: f"/adapters/{index}" for index, name in enumerate(HOSTILE)})
    engine.memory = REPORT
    engine.record_event(EngineEvent(EventKind.EVICT, 1.0, EVENT, 1, HOSTILE[0]))
    with LiveServer(engine) as server:
        page = open_page(server)
        page.wait_for_selector("#event-list li")
        page.wait_for_selector("#adapter-rows tr")
        assert set(page.locator("#adapter-rows th").all_inner_texts()) == set(HOSTILE)
        assert EVENT in page.locator("#event-list").inner_text()
        page.get_by_role("button", name=HOSTILE[0], exact=True).click()
        page.wait_for_selector("#adapter-verbs button")
        assert page.locator("#adapter-title").inner_text() == HOSTILE[0]
        assert page.locator("main img, main script, main b, dialog img").count() == 0
        assert page.evaluate("window.hacked") is None
        blocked = "() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } }"
        assert page.evaluate(blocked) == "TypeError", "the policy lets no text become markup"


def test_thousands_of_adapters_are_pages_of_the_server(open_page: Open) -> None:
    with LiveServer(FakeAsyncEngine({f"name-{index:04d}": "/adapters/x" for index in range(5000)})) as server:
        page = open_page(server)
        rows = page.locator("#adapter-rows th")
        page.select_option("#order-filter", "name")
        page.get_by_text("1 to 25 of more").wait_for()
        page.get_by_role("button", name="name-0000", exact=True).wait_for()
        assert rows.count() == 25
        page.click("#next")
        page.get_by_text("26 to 50 of more").wait_for()
        assert rows.first.inner_text() == "name-0025"
        page.fill("#name-filter", "499")
        page.get_by_text("1 to 15 of 15").wait_for()
        assert rows.first.inner_text() == "name-0499"
        page.fill("#name-filter", "")
        page.get_by_text("1 to 25 of more").wait_for()
        page.select_option("#order-filter", "bytes")
        page.click("#next")
        page.get_by_text("26 to 50 of more").wait_for()
        page.click("#previous")
        page.get_by_text("1 to 25 of more").wait_for()


def test_a_verb_is_confirmed_before_it_is_sent(open_page: Open) -> None:
    engine = FakeAsyncEngine({"sql": "/adapters/sql"})
    engine.memory = REPORT
    registry = engine.registry
    assert registry is not None
    with LiveServer(engine) as server:
        page = open_page(server)
        page.get_by_role("button", name="sql", exact=True).click()
        page.get_by_role("button", name="Pin", exact=True).click()
        page.wait_for_selector("#confirm-text")
        page.click("#confirm-no")
        assert not registry.describe("sql").is_pinned
        page.get_by_role("button", name="Pin", exact=True).click()
        page.keyboard.press("Enter")  # the confirming button has the focus
        page.get_by_text("Pin: done").wait_for()
        assert registry.describe("sql").is_pinned
        page.get_by_text("pinned").first.wait_for()
        page.locator("#event-list .event-audit").first.wait_for(state="attached")
        page.get_by_role("button", name="Unload", exact=True).click()
        page.click("#confirm-yes")
        page.get_by_text("Unload: done").wait_for()
        assert not registry.names()
        page.click("#adapter-close")
        page.get_by_text("No adapter is like that.").wait_for()


def test_a_key_stays_in_its_tab_and_shows_what_it_may_see(open_page: Open) -> None:
    engine = FakeAsyncEngine({"sql": "/adapters/sql"})
    with LiveServer(engine, config(api_keys=(USER,), admin_api_keys=(ADMIN,))) as server:
        page = open_page(server)
        page.fill("#key", "wrong-key")
        page.keyboard.press("Enter")
        page.get_by_text("The server does not take this key.").wait_for()
        page.fill("#key", USER)
        page.keyboard.press("Enter")
        page.wait_for_selector("#adapter-rows tr")
        assert [page.is_visible(f"#{each}") for each in ("memory", "events", "tenants", "state-filter")] == [False] * 4
        page.get_by_role("button", name="sql", exact=True).click()
        page.wait_for_selector("#adapter-facts dd")
        assert page.locator("#adapter-verbs button").count() == 0
        page.click("#adapter-close")
        assert page.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
        assert USER not in page.content()
        page.click("#forget")
        page.wait_for_selector("#key")
        assert page.evaluate("sessionStorage.length") == 0
        page.fill("#key", ADMIN)
        page.keyboard.press("Enter")
        page.wait_for_selector("#memory")


def test_a_tenant_sees_its_own(open_page: Open, tmp_path: Path) -> None:
    url = sa.URL.create("sqlite", database=str(tmp_path / "journal.sqlite"))
    JournalTables(tmp_path / "journal.sqlite", "base").close()
    engine = FakeAsyncEngine({"acme/sql": "/srv/acme/sql", "beta/secret": "/srv/beta/secret", "plain": "/srv/plain"})
    engine.memory = REPORT
    engine.state = sa.create_engine(url)
    with closing(TenantStore(sa.create_engine(url))) as store:
        for tenant in ("acme", "beta"):
            store.create_tenant(tenant)
        _, secret = store.create_key(Role.TENANT, "acme")
        _, admin = store.create_key(Role.ADMIN)
    with LiveServer(engine, config()) as server:
        page = open_page(server, secret)
        page.wait_for_selector("#tenants")
        assert page.locator("#adapter-rows th").all_inner_texts() == ["sql"]
        assert [page.is_visible(f"#{each}") for each in ("traffic", "memory", "events")] == [False] * 3
        assert page.locator("#tenants-title").inner_text() == "Tenant acme"
        assert not {"secret", "beta", "plain"} & set(page.locator("body").inner_text().split())
        page.get_by_role("button", name="sql", exact=True).click()
        page.wait_for_selector("#adapter-verbs button")
        assert page.locator("#adapter-verbs button").all_inner_texts() == ["Pin", "Unpin", "Preload", "Evict", "Unload"]
        every = open_page(server, admin)
        every.get_by_text("acme", exact=True).wait_for()
        assert {"acme", "beta"} <= set(every.locator("#tenant-rows tr td:first-child").all_inner_texts())


def test_an_engine_that_ends_is_said_and_the_page_goes_on(open_page: Open) -> None:
    engine = FakeAsyncEngine({"sql": "/adapters/sql"})
    with LiveServer(engine) as server:
        page = open_page(server)
        page.wait_for_selector("#status.ok")
        server.call(engine.die)
        page.wait_for_selector("#status.bad")
        assert "the engine cannot serve" in page.locator("#status").inner_text()
        page.context.set_offline(True)
        page.get_by_text("The server does not answer.").wait_for()
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_400_pixels(open_page: Open, scheme: str) -> None:
    engine = FakeAsyncEngine({"n" * 256: "/adapters/sql"})
    engine.memory = REPORT
    with LiveServer(engine) as server:
        page = open_page(server, viewport={"width": 400, "height": 800}, color_scheme=scheme)
        page.wait_for_selector("#adapter-rows tr")
        assert page.evaluate("document.documentElement.scrollWidth") == 400
