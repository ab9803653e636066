"""Adapters that clients send as a form: what is kept, what is refused before it costs anything, whose they are."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.sources.uploads import UploadLimits, UploadStore
from loraplex.errors import AdapterNoRoomError
from loraplex.server import ServerConfig, create_app
from loraplex.server.api_error import ApiError
from loraplex.server.sources.form import UploadForm
from loraplex.tenants.limits import Limits
from loraplex.testing import FakeAsyncEngine
from tests.security.tenancy import tenancy
from tests.server.conftest import client_of

HEADERS = {"X-Requested-With": "test"}
CONFIG, WEIGHTS = ("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"weights")
Files = list[tuple[str, tuple[str, bytes]]]
FILES: Files = [("file", CONFIG), ("file", WEIGHTS)]


@asynccontextmanager
async def serving(folder: Path, limits: UploadLimits | None = None, **settings: Any) -> AsyncIterator[Any]:
    engine = FakeAsyncEngine({"old": "/old"}, uploads=UploadStore(folder / "uploads", limits or UploadLimits()))
    async with client_of(create_app(engine, ServerConfig(**settings))) as client:
        client.headers.update(HEADERS)
        yield client
    assert engine.registry is not None
    engine.registry.check_integrity()


async def send(client: httpx.AsyncClient, files: Files = FILES, **fields: str) -> httpx.Response:
    return await client.post("/v1/adapters", data={"name": "new", **fields}, files=files)


def kept(folder: Path) -> list[list[str]]:
    return [_files_of(each) for each in (folder / "uploads").glob("*")]


def _files_of(folder: Path) -> list[str]:
    """A folder may be removed meanwhile: then it has none."""
    try:
        return sorted(each.name for each in folder.iterdir())
    except FileNotFoundError:
        return []


async def until_empty(folder: Path) -> None:
    """What was given up is removed in a thread, where it may still be written."""
    while any((folder / "uploads").glob("*")):
        await asyncio.sleep(0.005)


async def test_an_upload_is_an_adapter_until_it_is_unloaded(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        sha256 = hashlib.sha256(b"weights").hexdigest()
        files: Files = [*FILES, ("file", ("tokenizer.json", b"{}"))]
        answer = await send(client, files, sha256=sha256.upper(), is_pinned="true")
        assert (answer.status_code, answer.json()["status"]) == (200, "loaded"), answer.text
        assert answer.headers["etag"] == f'"{answer.json()["digest"]}"'
        assert kept(tmp_path) == [["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]]
        card = (await client.get("/v1/adapters/new")).json()
        assert (card["path"], card["is_pinned"]) == (f"upload://{sha256}", True)
        body = {"model": "new", "prompt": "x", "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.delete("/v1/adapters/new", params={"deadline_s": 5})).status_code == 200
        await until_empty(tmp_path)


async def test_a_name_that_is_loaded_needs_load_inplace(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        refused = await send(client, name="old")
        assert (refused.status_code, "load_inplace=true" in refused.text) == (400, True)
        await until_empty(tmp_path)
        replaced = await send(client, name="old", load_inplace="true")
        assert (replaced.status_code, replaced.json()["version"]) == (200, 2)


@pytest.mark.parametrize(
    ("files", "fields", "text"),
    [
        ([("f", CONFIG)], {}, "no file adapter_model.safetensors"),
        ([("f", WEIGHTS)], {}, "no file adapter_config.json"),
        ([("f", CONFIG), ("f", ("adapter_model.bin", b"x"))], {}, "adapter_model.bin' is pickle"),
        ([("f", CONFIG), ("f", ("../x", b"x"))], {}, "'../x' is not taken"),
        ([("f", CONFIG), ("f", CONFIG)], {}, "is there twice"),
        ([("f", CONFIG), ("f", ("adapter_model.safetensors", b""))], {}, "is empty"),
        ([("f", ("adapter_config.json", b"x" * (2**20 + 1)))], {}, "longer than 1048576"),
        (FILES, {"name": ""}, "name"),
        (FILES, {"name": "a/b"}, "slash"),
        (FILES, {"name": "base"}, "base model"),
        (FILES, {"path": "/etc"}, "path"),
        (FILES, {"sha256": "0" * 64}, "was expected"),
        (FILES, {"sha256": "x"}, "sha256"),
        (FILES, {"is_pinned": "perhaps"}, "is_pinned"),
        (FILES, {"more": "x" * 5000}, "longer than 4096"),
        (FILES, {f"f{index}": "x" for index in range(30)}, "more than 24 parts"),
    ],
)
async def test_what_is_refused_leaves_nothing(tmp_path: Path, files: Files, fields: dict[str, str], text: str) -> None:
    async with serving(tmp_path) as client:
        answer = await send(client, files, **fields)
        assert answer.status_code == 400, answer.text
        assert text in answer.text
        await until_empty(tmp_path)
        names = [each["name"] for each in (await client.get("/v1/adapters")).json()["data"]]
        assert names == ["old"]


async def test_bytes_are_bounded(tmp_path: Path) -> None:
    big: Files = [("file", CONFIG), ("file", ("adapter_model.safetensors", b"w" * 4096))]
    async with serving(tmp_path, UploadLimits(2048, 8192)) as client:
        answer = await send(client, big)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
        huge = await client.post(
            "/v1/adapters", content=b"", headers={"content-type": "multipart/form-data; boundary=xxxxxxxxxxxxxxxx"}
        )
        assert huge.status_code == 400
        await until_empty(tmp_path)
    async with serving(tmp_path, UploadLimits(4500, 6000)) as client:
        assert (await send(client, big)).status_code == 200
        full = await send(client, big, name="second")
        assert "max-stored-upload-bytes" in full.text
        while len(kept(tmp_path)) > 1:
            await asyncio.sleep(0.005)


async def test_a_slash_behind_the_path_is_no_other_route(tmp_path: Path) -> None:
    """What browsers may send is judged by the route that is asked for."""
    async with serving(tmp_path) as client:
        assert (await client.post("/v1/adapters/", data={"name": "new"}, files=FILES)).status_code == 200
        del client.headers["X-Requested-With"]
        assert (await client.post("/v1/adapters/", data={"name": "other"}, files=FILES)).status_code == 415


@pytest.mark.parametrize("is_form", [False, True])
async def test_an_upload_that_comes_too_slowly_loses_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_form: bool
) -> None:
    """At the least rate of bodies a gigabyte takes three days, and some clients' trickles had all places."""
    monkeypatch.setattr("loraplex.server.sources.receiver.MAX_UPLOAD_S", 0.05)
    ended = asyncio.Event()

    async def trickle() -> AsyncIterator[bytes]:
        yield f"--{BOUNDARY}\r\n".encode() if is_form else b"{"
        await ended.wait()

    async with serving(tmp_path) as client:
        if is_form:
            headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
            answer = await client.post("/v1/adapters", content=trickle(), headers=headers)
        else:
            answer = await client.put("/v1/adapters/new/tensors", content=trickle())
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "upload_timeout")
        await until_empty(tmp_path)


async def test_a_form_of_a_page_is_none(tmp_path: Path) -> None:
    """A page can send a form to this machine, but not with this header."""
    async with serving(tmp_path) as client:
        del client.headers["x-requested-with"]
        refused = await send(client)
        assert (refused.status_code, "X-Requested-With" in refused.text) == (415, True)
        page = await client.post(
            "/v1/adapters", data={"name": "x"}, files=FILES, headers={**HEADERS, "origin": "https://evil.example"}
        )
        assert page.status_code == 403
        assert (await client.post("/v1/completions", files=FILES, headers=HEADERS)).status_code == 415


@pytest.mark.parametrize("settings", [{"disable_dynamic_loading": True}, {"host": "0.0.0.0"}])
async def test_where_uploads_are_off(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with serving(tmp_path, **settings) as client:
        assert (await send(client)).status_code == 403
        assert not (tmp_path / "uploads").exists()


async def test_a_tenants_uploads_are_its_own_and_count(tmp_path: Path) -> None:
    with tenancy(tmp_path, {}, Limits(adapters=1)) as made:
        async with client_of(made.app) as client:

            async def upload(role: str, name: str) -> int:
                answer = await client.post("/v1/adapters", data={"name": name}, files=FILES, headers=made.headers(role))
                return answer.status_code

            assert await upload("acme", "mine") == 200
            assert await upload("acme", "more") == 429
            assert await upload("beta", "mine") == 200
            assert [await upload(role, "x") for role in ("acme read-only", "inference")] == [403, 403]
            listed = (await client.get("/v1/adapters", headers=made.headers("admin"))).json()["data"]
            assert [each["name"] for each in listed] == ["acme/mine", "beta/mine"]


async def test_all_files_of_an_upload_count_for_its_tenant(tmp_path: Path) -> None:
    """Beside an adapter of some bytes there may be 64 MiB of each text."""
    with tenancy(tmp_path, {}, Limits(adapter_bytes=2000)) as made:
        async with client_of(made.app) as client:

            async def upload(name: str, num_spaces: int) -> int:
                files: Files = [*FILES, ("file", ("tokenizer.json", b"{}" + b" " * num_spaces))]
                headers = made.headers("acme")
                return (
                    await client.post("/v1/adapters", data={"name": name}, files=files, headers=headers)
                ).status_code

            assert await upload("large", 2000) == 429
            assert await upload("one", 900) == 200
            assert await upload("two", 1200) == 429
            assert await upload("two", 900) == 200
            assert made.engine.uploads.num_bytes == 2 * (900 + 2 + 2 + 7)


async def test_an_upload_that_cannot_be_pinned_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was loaded all the same, and a second try was refused for that."""
    engine = FakeAsyncEngine(uploads=UploadStore(tmp_path / "uploads"))

    def refuse(adapter_id: int) -> bool:
        raise AdapterNoRoomError("there is no room for a pin")

    async with client_of(create_app(engine, ServerConfig())) as client:
        client.headers.update(HEADERS)
        with monkeypatch.context() as without_room:
            without_room.setattr(engine.store, "pin_adapter", refuse)
            assert (await send(client, is_pinned="true")).status_code == 503
            assert (await client.get("/v1/adapters/new")).status_code == 404
            await until_empty(tmp_path)
        assert (await send(client)).status_code == 200
        again = await send(client, is_pinned="true", load_inplace="true")
        assert (again.status_code, again.json()["status"]) == (200, "already_loaded")
        assert (await client.get("/v1/adapters/new")).json()["is_pinned"]


async def test_the_same_content_again_mends_an_adapter_whose_files_are_lost(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        assert (await send(client)).status_code == 200
        (folder,) = (tmp_path / "uploads").iterdir()
        shutil.rmtree(folder)
        again = await send(client, load_inplace="true")
        assert (again.json()["status"], again.json()["version"]) == ("reloaded", 2)
        assert kept(tmp_path) == [["adapter_config.json", "adapter_model.safetensors"]]
        assert (await send(client, load_inplace="true")).json()["status"] == "already_loaded"


# ------------------------------------------------------------------------------------------------------------- parser

BOUNDARY = "-" * 16


def body_of(parts: list[tuple[str, str | None, bytes]]) -> bytes:
    pieces = []
    for name, filename, data in parts:
        of_file = "" if filename is None else f'; filename="{filename}"'
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{of_file}\r\n\r\n'
        pieces.append(head.encode() + data + b"\r\n")
    return b"".join(pieces) + f"--{BOUNDARY}--\r\n".encode()


def parser(write: Callable[[str, bytes], None] = lambda name, data: None) -> UploadForm:
    return UploadForm(f"multipart/form-data; boundary={BOUNDARY}", write)


@given(weights=st.binary(min_size=1, max_size=300), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_pieces_make_no_difference(weights: bytes, sizes: list[int]) -> None:
    if f"--{BOUNDARY}".encode() in weights:
        return
    found: dict[str, bytes] = {}
    form = parser(lambda name, data: found.__setitem__(name, found.get(name, b"") + data))
    body, at = body_of([("name", None, b"x"), ("f", CONFIG[0], b"{}"), ("f", WEIGHTS[0], weights)]), 0
    for size in sizes * (len(body) // sum(sizes) + 1):
        form.feed(body[at : at + size])
        at += size
    form.check_whole()
    assert (form.fields, found) == ({"name": "x"}, {CONFIG[0]: b"{}", WEIGHTS[0]: weights})


@given(body=st.binary(max_size=400))
def test_no_body_is_an_error_of_another_kind(body: bytes) -> None:
    for data in (body, f"--{BOUNDARY}\r\n".encode() + body):
        form = parser()
        with suppress(ApiError):
            form.feed(data)
            form.check_whole()


HEAD = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="name"\r\n\r\nx\r\n'.encode()
FILE = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="f"; filename="{WEIGHTS[0]}"\r\n\r\n'.encode()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (f"--{BOUNDARY}\r\n".encode() + b"A: b\r\n" * 20, "header"),
        (f"--{BOUNDARY}\r\nA: ".encode() + b"b" * 5000, "header"),
        (f"--{BOUNDARY}\r\nA: b\r\na: c\r\n\r\n".encode(), "header twice"),
        (f"--{BOUNDARY}\r\nA: b\r\n\r\n".encode(), "no Content-Disposition"),
        (HEAD + HEAD, "twice"),
        (FILE + b"x", "before the files"),
        (HEAD + FILE + b"x\r\n" + HEAD, "fields come first"),
        (HEAD + FILE + f"\r\n--{BOUNDARY}x".encode() * 5000, "its boundary is in the files"),
        (HEAD.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n"), "is encoded"),
        (HEAD.replace(b'"name"', b'"\xff"'), "not UTF-8"),
        (HEAD.replace(b'name="name"', b'name*0="a"; name*="b"'), "no Content-Disposition"),
        (HEAD, "before its last boundary"),
        (b"", "before its last boundary"),
    ],
)
def test_hostile_forms(body: bytes, text: str) -> None:
    def read() -> None:
        form = parser()
        form.feed(body)
        form.check_whole()

    with pytest.raises(ApiError, match=text):
        read()


def test_a_long_content_type_is_not_parsed() -> None:
    """31 KB of semicolons held the event loop for 40 ms."""
    with pytest.raises(ApiError, match="more than 256 characters"):
        UploadForm(f"multipart/form-data; {';' * 31_000} boundary={BOUNDARY}", lambda name, data: None)


@pytest.mark.parametrize("boundary", ["", "x" * 15, "x" * 71, "a b c d e f g h", '"' * 10, "; a*0=b; a*=c"])
def test_boundaries(boundary: str) -> None:
    with pytest.raises(ApiError, match="no boundary"):
        UploadForm(f"multipart/form-data; boundary={boundary}", lambda name, data: None)
