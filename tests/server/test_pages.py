"""`/` and `/docs`: what they show, that they load nothing from elsewhere, and that they work on a server with keys."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser

import httpx
import pytest

from loraplex import __version__
from loraplex.server import ServerConfig, create_app
from loraplex.server.pages import ASSETS, LINKS, STATIC
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYS = ServerConfig(api_keys=("secret",), served_model_names=("hidden-base",))


class Links(HTMLParser):
    """The attributes of a page that make a browser load something, and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.followed: list[str] = []
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert not name.startswith("on"), "a script in an attribute"
            if name in ("src", "href"):
                (self.followed if tag == "a" else self.loaded).append(value or "")
        if tag == "script" and "src" not in dict(attrs):
            self.inline.append(tag)


async def test_a_program_gets_links(client: httpx.AsyncClient) -> None:
    reply = (await client.get("/")).json()
    assert (reply["name"], reply["version"], reply["models"]) == ("loraplex", __version__, ["base"])
    for path in reply["links"].values():
        assert (await client.get(path)).status_code == 200, path


async def test_a_browser_gets_a_page(client: httpx.AsyncClient) -> None:
    response = await client.get("/", headers=HTML)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "base" in response.text
    links = Links(response.text)
    assert links.followed == list(LINKS.values())
    assert links.loaded == ["data:,"]


async def test_names_in_the_page_are_escaped() -> None:
    config = ServerConfig(served_model_names=("<script>alert(1)</script>",))
    async with client_of(create_app(FakeAsyncEngine(), config)) as client:
        page = (await client.get("/", headers=HTML)).text
    assert Links(page).inline == []
    assert "&lt;script&gt;" in page


async def test_head(client: httpx.AsyncClient) -> None:
    for path in ("/", "/docs", *ASSETS):
        response = await client.head(path)
        assert (response.status_code, response.content) == (200, b"")


async def test_nothing_is_loaded_from_elsewhere(client: httpx.AsyncClient) -> None:
    for path in ("/", "/docs"):
        response = await client.get(path, headers=HTML)
        links = Links(response.text)
        assert links.inline == []
        for url in links.loaded:
            assert url == "data:," or (await client.get(url)).status_code == 200, url
        policy = response.headers["content-security-policy"]
        sources = re.findall(r"(?<=[\w-] )[^;]+", policy)
        assert not re.search(r"https?:|\*|unsafe-eval", policy)
        assert all(source.startswith(("'", "data:")) for part in sources for source in part.split())
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    script = (STATIC / "docs.js").read_text()
    assert "http" not in script
    assert "validatorUrl: null" in script


@pytest.mark.parametrize("encoding", ["gzip, deflate, br", "identity"])
async def test_assets_come_packed_to_those_that_can_unpack(client: httpx.AsyncClient, encoding: str) -> None:
    for path, asset in ASSETS.items():
        response = await client.get(path, headers={"Accept-Encoding": encoding})
        assert response.status_code == 200
        assert response.headers.get("content-encoding") == (None if encoding == "identity" else "gzip")
        assert response.headers["content-type"] == f"{asset.media_type}; charset=utf-8"
        assert response.headers["cache-control"] == "public, max-age=3600"
        assert len(response.content) > 200


async def test_vendored_files_are_what_their_page_says(client: httpx.AsyncClient) -> None:
    page = (STATIC / "swagger-ui" / "README.md").read_text()
    digests = dict(re.findall(r"^\| `([\w.-]+)\.gz` \| `(\w{64})` \|$", page, re.MULTILINE))
    assert len(digests) == 2
    for name, digest in digests.items():
        content = (await client.get(f"/docs/{name}")).content
        assert hashlib.sha256(content).hexdigest() == digest
    for name in ("LICENSE", "LICENSE.bundled", "NOTICE"):
        assert (STATIC / "swagger-ui" / name).stat().st_size > 40


async def test_pages_of_a_server_with_keys() -> None:
    """They are the same for all; what is this server's own needs the key, and Swagger UI knows how to ask for it."""
    async with client_of(create_app(FakeAsyncEngine({"sql": "/sql"}), KEYS)) as client:
        assert (await client.get("/")).json()["models"] is None
        for path in ("/", "/docs", "/openapi.json", *ASSETS):
            response = await client.get(path, headers=HTML)
            assert response.status_code == 200, path
            assert path == "/docs/swagger-ui.js" or not re.search(r"\b(hidden-base|/sql)\b", response.text)
        for path in ("/v1/models", "/v1/adapters", "/docs/nothing", "/redoc"):
            assert (await client.get(path)).status_code == 401
        schema = (await client.get("/openapi.json")).json()
    assert schema["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    for path in ("/v1/completions", "/generate", "/"):
        assert {"key": []} in schema["paths"][path]["post"]["security"]
    assert "security" not in schema["paths"]["/health"]["get"]


async def test_a_server_without_keys_asks_for_none(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    assert "securitySchemes" not in schema.get("components", {})
    assert set(schema["paths"]["/"]) == {"post"}, "LoRAX's route; the page is none for programs"


async def test_the_schema_says_that_an_answer_may_not_come_in_time(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    for method, path in (
        ("post", "/v1/completions"),
        ("post", "/v1/chat/completions"),
        ("get", "/v1/memory"),
        ("post", "/v1/profile/stop"),
    ):
        assert "504" in paths[path][method]["responses"], path
