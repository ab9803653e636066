"""The dashboard's files: complete, from this server alone, and without a way for text to become markup."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.server.pages import DASHBOARD_ASSETS, STATIC
from loraplex.tenants.limits import Limits
from loraplex.testing import FakeAsyncEngine
from tests.security.tenancy import tenancy
from tests.server.conftest import client_of
from tests.server.test_pages import HTML, KEYS, Links

FOLDER = STATIC / "dashboard"
SCRIPTS = sorted(FOLDER.glob("*.js"))
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|srcdoc")
CODE = re.compile(r"\beval\b|\bFunction\(|setTimeout\([\"'`]|\bimport\(|localStorage|document\.cookie")


async def test_the_page_loads_its_own_files_under_a_strict_policy(client: httpx.AsyncClient) -> None:
    response = await client.get("/dashboard", headers=HTML)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert (policy["frame-ancestors"], policy["base-uri"], policy["form-action"]) == ("'none'", "'none'", "'none'")
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "'none'")
    links = Links(response.text)
    assert links.inline == []
    assert "style=" not in response.text
    loaded = set(links.loaded) - {"data:,"}
    assert loaded <= set(DASHBOARD_ASSETS)
    assert all(each.startswith("#") for each in links.followed)


async def test_every_file_is_served_and_every_module_is_imported(client: httpx.AsyncClient) -> None:
    assert {path.name for path in FOLDER.iterdir()} - {"dashboard.html"} == {
        path.rpartition("/")[2] for path in DASHBOARD_ASSETS if "uplot" not in path
    }
    wanted, seen = {"app.js"}, set[str]()
    while wanted - seen:
        name = min(wanted - seen)
        response = await client.get(f"/dashboard/{name}")
        assert response.status_code == 200, name
        assert response.headers["content-type"] == "text/javascript; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache", "modules of two versions would run together"
        seen.add(name)
        wanted |= set(re.findall(r'from "\./([\w-]+\.js)"', response.text))
    assert seen == {path.name for path in SCRIPTS}


@pytest.mark.parametrize("path", [*SCRIPTS, FOLDER / "dashboard.css", FOLDER / "dashboard.html"], ids=lambda p: p.name)
def test_no_file_has_another_site_or_makes_markup_or_code_of_text(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"https?:|//[a-z0-9-]+\.|@import|url\(", text)
    assert not MARKUP.search(text)
    assert not CODE.search(text), "a key is in sessionStorage alone"


def test_every_id_that_a_script_asks_for_is_in_the_page() -> None:
    ids = re.findall(r'\bid="([\w-]+)"', (FOLDER / "dashboard.html").read_text())
    assert len(ids) == len(set(ids))
    asked = {name for path in SCRIPTS for name in re.findall(r'byId\("([\w-]+)"\)', path.read_text())}
    assert asked <= set(ids)
    labels = re.findall(r'(?:for|aria-labelledby|href)="#?([\w-]+)"', (FOLDER / "dashboard.html").read_text())
    assert {each for each in labels if not each.startswith("/")} <= set(ids)


async def test_it_needs_no_key_and_says_nothing_of_its_server() -> None:
    async with client_of(create_app(FakeAsyncEngine({"sql": "/sql"}), KEYS)) as client:
        for path in ("/dashboard", *DASHBOARD_ASSETS):
            response = await client.get(path)
            assert response.status_code == 200, path
            assert "hidden-base" not in response.text
            assert (await client.head(path)).content == b""
        assert (await client.get("/dashboard/nothing.js")).status_code == 401
        assert (await client.get("/v1/key")).status_code == 401


async def test_vendored_files_are_what_their_page_says(client: httpx.AsyncClient) -> None:
    page = (STATIC / "uplot" / "README.md").read_text()
    digests = dict(re.findall(r"^\| `([\w.-]+)\.gz` \| `(\w{64})` \|$", page, re.MULTILINE))
    assert set(digests) == {"uplot.js", "uplot.css"}
    for name, digest in digests.items():
        content = (await client.get(f"/dashboard/{name}")).content
        assert hashlib.sha256(content).hexdigest() == digest
        assert not MARKUP.search(content.decode())
    assert "MIT" in (STATIC / "uplot" / "LICENSE").read_text()


def test_the_license_of_what_is_vendored_is_named_in_the_wheel() -> None:
    project = (STATIC.parents[2] / "pyproject.toml").read_text()
    assert "loraplex/server/static/uplot/LICENSE" in project
    assert 'wheel.packages = ["loraplex"]' in project


async def test_a_key_learns_what_it_may_do(tmp_path: Path) -> None:
    with tenancy(tmp_path, limits=Limits(pins=3, requests_per_s=2.5)) as made:
        async with client_of(made.app) as client:
            found = {}
            for role in made.keys:
                answer = await client.get("/v1/key", headers=made.headers(role))
                found[role] = answer.json()
    rights = {
        role: [name for name in ("sees_inside", "may_change", "may_load", "may_manage") if card[name]]
        for role, card in found.items()
    }
    every, of_tenants = ["sees_inside", "may_change", "may_load", "may_manage"], ["may_change", "may_load"]
    assert rights == {
        "inference": [],
        "flag admin": every,
        "admin": every,
        "operator": every[:-1],
        "read-only": ["sees_inside"],
        "acme": of_tenants,
        "beta": of_tenants,
        "acme read-only": [],
    }
    acme = found["acme"]
    assert (acme["id"], acme["tenant"], acme["role"]) == (made.key_ids["acme"], "acme", "tenant")
    assert acme["quota"] == {"pins": 3, "requests_per_s": 2.5}
    assert (found["beta"]["quota"], found["inference"]["tenant"], found["admin"]["tenant"]) == ({}, None, None)


async def test_without_keys_everything_may_be_done_but_what_no_key_may() -> None:
    for is_disabled in (False, True):
        config = ServerConfig(disable_dynamic_loading=is_disabled)
        async with client_of(create_app(FakeAsyncEngine(), config)) as client:
            card = (await client.get("/v1/key")).json()
        assert (card["id"], card["may_change"], card["may_load"]) == (None, True, not is_disabled)
