"""Names that look like another, lead elsewhere in a URL or a folder, or cannot be shown."""

from __future__ import annotations

import unicodedata
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.registry.adapter_name import MAX_NAME_LEN, check_adapter_name
from loraplex.errors import AdapterConflictError, InvalidRequestError
from loraplex.lora_modules import parse_lora_modules
from loraplex.server import ServerConfig, create_app
from loraplex.tenants.records import new_secret
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

LOOK_ALIKES = {
    "ligature": "\ufb01lter",
    "full width": "\uff53\uff51\uff4c",
    "full-width digit": "sql@\uff11",
    "circled": "\u24e2ql",
    "superscript": "sql\u00b2",
    "decomposed": "cafe\u0301",
    "kelvin": "\u212aql",
    "no-break space": "my\u00a0sql",
    "ideographic space": "my\u3000sql",
    "zero-width space": "s\u200bql",
    "zero-width joiner": "s\u200dql",
    "soft hyphen": "s\u00adql",
    "byte order mark": "\ufeffsql",
    "right to left": "\u202elqs",
    "isolate": "\u2066sql\u2069",
    "variation selector": "sql\ufe0f",
    "grapheme joiner": "s\u034fql",
    "Hangul filler": "sql\u115f",
    "compatibility filler": "sql\u3164",
    "Braille blank": "sql\u2800",
    "tag": "sql\U000e0041",
    "private use": "sql\ue000",
    "unassigned": "sql\U000e0fff",
    "surrogate": "sql\ud800",
    "filler of a script": "sql\U00016fe4",
    "a mark alone": "\u0301",
    "a mark first": "\u0301sql",
    "a mark behind a slash": "org/\u0301sql",
    "a version of many digits": "sql@" + "1" * 30,
    "Arabic digits": "sql@\u0661",
    "digits of two scripts": "sql@1\u0967",
    "NUL": "sql\0",
    "newline": "sql\n",
    "escape": "sql\x1b[2J",
    "tab": "s\tql",
    "delete": "sql\x7f",
    "leading space": " sql",
    "trailing space": "sql ",
}
PATHS = ["..", ".", "../sql", "a/../b", "a/..", "./sql", "a/./b", "a//b", "a/", "/", "//a", "/a/../b"]
KEYS = ["lp-" + "Ab_9-" * 8 + "xyz", "sql.lp-" + "A" * 43, "lp-" + "-" * 43]
GOOD = [
    "help-desk-summaries-of-german-tickets-llama-3_1-8b-v2",
    "lp-" + "a" * 44,
    "sql",
    "Sql-2_v1.0",
    "caf\u00e9",
    "\u0441\u043a\u043b",
    "\u6570\u636e\u5e93",
    "a b",
    "a:b",
    "x@y",
    "x@1y",
    "x@",
    "\u0928\u093f",
    "x" * MAX_NAME_LEN,
    "..a",
    "a..b",
    "\U0001f600",
]


@pytest.mark.parametrize("name", [*LOOK_ALIKES.values(), *PATHS, *KEYS, "", "x" * (MAX_NAME_LEN + 1)], ids=ascii)
def test_what_cannot_be_a_name(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_adapter_name(name, ())
    assert caught.value.param == "name"
    assert len(caught.value.message) < 300
    assert caught.value.message.isprintable()


def test_a_tenants_key_is_no_name_and_in_no_message() -> None:
    key = new_secret()
    for name in (key, f"of-{key}", f"x{key}", f"{key}-", f"_{key}z"):
        with pytest.raises(InvalidRequestError, match="the form of a key") as caught:
            check_adapter_name(name, ())
        assert not any(key[start : start + 6] in caught.value.message for start in range(3, 40))


def test_a_long_name_that_begins_as_a_key_does_is_one() -> None:
    check_adapter_name("help-desk-summaries-of-customers-in-germany-2026-11-28", ())


@pytest.mark.parametrize("name", [*GOOD, "/srv/adapters/sql", "org/name"])
def test_what_the_operator_may_call_an_adapter(name: str) -> None:
    check_adapter_name(name, ())


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=20))
def test_a_name_is_as_it_is_shown(name: str) -> None:
    """Whatever is accepted is its own normal form, printable, and one name per segment."""
    try:
        check_adapter_name(name, ("base",))
    except (InvalidRequestError, AdapterConflictError):
        return
    assert unicodedata.normalize("NFKC", name) == name == name.strip()
    assert name.isprintable()
    assert not {".", ".."} & set(name.split("/"))


@pytest.mark.parametrize("name", ["base", "base:x"])
def test_names_that_would_select_the_base_model(name: str) -> None:
    with pytest.raises(AdapterConflictError):
        check_adapter_name(name, ("base",))


@pytest.fixture(scope="module")
def engine() -> FakeAsyncEngine:
    return FakeAsyncEngine({"old": "/old"})


@pytest.fixture(scope="module")
def app(engine: FakeAsyncEngine) -> FastAPI:
    return create_app(engine, ServerConfig())


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.mark.parametrize("name", [*LOOK_ALIKES, "a/b", "/srv/x", "a/../b", "x/pin", "../old"])
async def test_no_route_registers_such_a_name(name: str, engine: FakeAsyncEngine, client: httpx.AsyncClient) -> None:
    name = LOOK_ALIKES.get(name, name)
    if "\ud800" in name:
        pytest.skip("no client can send it: the body is refused")
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/x"}),
        ("/v1/adapters", {"name": name, "path": "/x"}),
        ("/v1/adapters/switch", {"old": "old", "new": name, "new_path": "/x"}),
    ]
    for url, body in bodies:
        response = await client.post(url, json=body)
        assert response.status_code == 400, (url, response.text)
        assert response.json()["error"]["param"] in ("name", "lora_name", "new")
    if not name.endswith("\n"):  # the route's expression ends before it: /v1/adapters/sql%0A is /v1/adapters/sql
        response = await client.put(f"/v1/adapters/{quote(name, safe='')}", json={"path": "/x"})
        assert response.status_code in (400, 404), response.text
    assert engine.registry is not None
    assert engine.registry.names() == ("old",)


@pytest.mark.parametrize("name", [each for each in GOOD if each != "x@y"])
async def test_names_in_other_scripts_are_fine(name: str, client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/adapters", json={"name": name, "path": "/x"})).status_code == 200
    assert (await client.get("/v1/models")).json()["data"][-1]["id"] == name
    assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200


def test_a_path_that_is_its_own_name_has_no_slash_at_its_end() -> None:
    assert parse_lora_modules(["/srv/sql/"], is_name_optional=True) == (("/srv/sql", "/srv/sql/"),)
