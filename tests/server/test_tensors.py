"""`PUT /v1/adapters/{name}/tensors` over an engine without weights."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from numpy import float32, full
from safetensors.numpy import save

from loraplex.adapters.registry import OpenedAdapter
from loraplex.adapters.sources import uploads
from loraplex.adapters.sources.uploads import UploadLimits, UploadStore
from loraplex.core import AdapterSpec
from loraplex.errors import AdapterValidationError, AdapterWeightsMissingError
from loraplex.frontend.adapter_updates import AdapterUpdates
from loraplex.server import ServerConfig, create_app
from loraplex.server.sources.receiver import MAX_UPLOADS_OF_A_CLIENT
from loraplex.testing import FakeAsyncEngine
from loraplex.testing.fake_engine import FakeReceivedOpener
from tests.server.conftest import client_of
from tests.server.live_server import LiveServer

SQL = "/v1/adapters/sql/tensors"


def tensors(value: float = 1.0, config: dict[str, Any] | None = None, size: int = 4) -> bytes:
    metadata = None if config is None else {"adapter_config": json.dumps(config)}
    return save({"lora_A": full(size, value, float32)}, metadata)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "uploads"


@pytest.fixture
def engine(folder: Path) -> Iterator[FakeAsyncEngine]:
    engine = FakeAsyncEngine({"sql": "/adapters/sql"}, uploads=UploadStore(folder, UploadLimits(2**21, 2**22)))
    yield engine
    assert engine.registry is not None
    engine.registry.check_integrity()
    used = {Path(spec.path) for spec in engine.registry.specs()}
    deadline_s = time.monotonic() + 10
    while (found := set(folder.iterdir()) if folder.exists() else set()) - used and time.monotonic() < deadline_s:
        time.sleep(0.01)  # a thread that is yet to remove what a client gave up
    assert found <= used
    assert engine.uploads.num_bytes == sum(each.stat().st_size for path in found for each in path.iterdir())


@pytest.fixture
async def client(engine: FakeAsyncEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(engine, ServerConfig())) as client:
        yield client


def code_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def test_a_body_is_a_new_version(client: httpx.AsyncClient, engine: FakeAsyncEngine, folder: Path) -> None:
    answer = await client.put(SQL, content=tensors(), headers={"content-type": "application/octet-stream"})
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    assert (reply["status"], reply["version"], reply["previous_version"]) == ("reloaded", 2, 1)
    assert answer.headers["etag"] == f'"{reply["digest"]}"'
    assert engine.registry is not None
    info = engine.registry.describe("sql")
    assert info.ref.lora_path == f"upload://{hashlib.sha256(tensors()).hexdigest()}"
    (kept,) = folder.iterdir()
    assert {each.name: each.read_bytes() for each in kept.iterdir()} == {
        "adapter_model.safetensors": tensors(),
        "adapter_config.json": b"{}",  # of the version before
    }


async def test_old_files_go_with_the_last_request(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, folder: Path
) -> None:
    assert engine.registry is not None
    for value in (1, 2):
        await client.put(SQL, content=tensors(value))
    ref = engine.registry.acquire("sql")
    for value in (3, 4, 5):
        await client.put(SQL, content=tensors(value))
    assert ref.adapter_version == 3
    assert engine.registry.resolve("sql").adapter_version == 6
    paths = {spec.adapter_version: Path(spec.path) for spec in engine.registry.specs()}
    assert sorted(paths) == [3, 5, 6]
    assert set(folder.iterdir()) == set(paths.values())
    engine.registry.release(ref)
    while paths[3].exists():
        await asyncio.sleep(0.01)
    assert set(folder.iterdir()) == {paths[5], paths[6]}
    await client.delete("/v1/adapters/sql")
    while list(folder.iterdir()):
        await asyncio.sleep(0.01)


async def test_equal_tensors_are_no_new_version(client: httpx.AsyncClient, folder: Path) -> None:
    for status, version in (("reloaded", 2), ("already_loaded", 2)):
        answer = await client.put(SQL, content=tensors())
        assert (answer.status_code, answer.json()["status"], answer.json()["version"]) == (200, status, version)
    assert len(list(folder.iterdir())) == 1


async def test_a_rollback_goes_back_to_what_was_sent(client: httpx.AsyncClient) -> None:
    digests = [(await client.put(SQL, content=tensors(value))).json()["digest"] for value in (1, 2)]
    answer = await client.post("/v1/adapters/sql/rollback")
    assert (answer.json()["status"], answer.json()["digest"]) == ("moved", digests[0])


async def test_a_new_name_needs_a_configuration(client: httpx.AsyncClient, folder: Path) -> None:
    url = "/v1/adapters/policy/tensors"
    assert code_of(await client.put(url, content=tensors())) == (404, "adapter_not_found", None)
    config = {"peft_type": "LORA", "r": 1}
    answer = await client.put(url, content=tensors(config=config))
    assert (answer.status_code, answer.json()["status"]) == (201, "loaded")
    (kept,) = folder.iterdir()
    assert json.loads((kept / "adapter_config.json").read_text()) == config


async def test_metadata_that_are_no_text_are_refused(client: httpx.AsyncClient) -> None:
    header = json.dumps({"__metadata__": {"adapter_config": {"r": 1}}}).encode()
    body = len(header).to_bytes(8, "little") + header
    assert code_of(await client.put(SQL, content=body)) == (400, "adapter_file_format", None)


@pytest.mark.parametrize("body", [b"", b"{}", b"version https://git-lfs", b"\xff" * 64, tensors()[:12]])
async def test_what_is_no_safetensors_file_changes_nothing(
    client: httpx.AsyncClient, body: bytes, folder: Path
) -> None:
    answer = await client.put(SQL, content=body)
    assert answer.status_code == 400, answer.text
    assert (await client.get("/v1/adapters/sql")).json()["version"] == 1
    assert not list(folder.iterdir())


async def test_what_validation_refuses_changes_nothing(folder: Path, engine: FakeAsyncEngine) -> None:
    class Refusing(FakeReceivedOpener):
        def open_received(self, directory: str, adapter_name: str, loaded: Any) -> OpenedAdapter:
            raise AdapterValidationError.from_reasons(adapter_name, ["lora_A has NaN"])

    engine._updates = AdapterUpdates(engine.uploads, Refusing())
    async with client_of(create_app(engine, ServerConfig())) as client:
        assert code_of(await client.put(SQL, content=tensors())) == (400, "adapter_validation", None)
        assert (await client.get("/v1/adapters/sql")).json()["version"] == 1
    assert not list(folder.iterdir())


async def test_the_configuration_before_may_be_gone(folder: Path, engine: FakeAsyncEngine) -> None:
    class Gone(FakeReceivedOpener):
        def config_of(self, spec: AdapterSpec) -> bytes:
            raise AdapterWeightsMissingError("adapter_config.json is missing")

    engine._updates = AdapterUpdates(engine.uploads, Gone())
    async with client_of(create_app(engine, ServerConfig())) as client:
        assert code_of(await client.put(SQL, content=tensors())) == (400, "adapter_config_missing", None)
        assert (await client.put(SQL, content=tensors(config={}))).status_code == 200


# ----------------------------------------------------------------------------------------------------- what is expected

SHA256 = hashlib.sha256(tensors())
CONTENT_DIGEST = f"sha-256=:{base64.b64encode(SHA256.digest()).decode()}:"


@pytest.mark.parametrize(
    ("sha256", "content_digest"),
    [
        (SHA256.hexdigest(), None),
        (SHA256.hexdigest().upper(), None),
        (None, CONTENT_DIGEST),
        (SHA256.hexdigest(), CONTENT_DIGEST),
    ],
)
async def test_a_sha256_is_checked(client: httpx.AsyncClient, sha256: str | None, content_digest: str | None) -> None:
    params = {} if sha256 is None else {"sha256": sha256}
    headers = {} if content_digest is None else {"content-digest": content_digest}
    refused = await client.put(SQL, content=tensors(2.0), params=params, headers=headers)
    assert code_of(refused) == (400, None, "sha256")
    assert (await client.get("/v1/adapters/sql")).json()["version"] == 1
    answer = await client.put(SQL, content=tensors(), params=params, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("params", "headers", "param"),
    [
        ({"sha256": "abc"}, {}, "sha256"),
        ({"sha256": "0" * 64}, {"content-digest": CONTENT_DIGEST}, "sha256"),
        ({}, {"content-digest": "md5=:abc:"}, "Content-Digest"),
        ({}, {"content-digest": f"sha-256=:{'=' * 44}:"}, "Content-Digest"),
        ({"expected_version": "-1"}, {}, "expected_version"),
        ({"expected_versions": "1"}, {}, "expected_versions"),
    ],
)
async def test_what_cannot_be_checked_is_refused(
    client: httpx.AsyncClient, params: dict[str, str], headers: dict[str, str], param: str
) -> None:
    answer = await client.put(SQL, content=tensors(), params=params, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_version_is_replaced_only_if_it_is_expected(client: httpx.AsyncClient) -> None:
    async def put(value: float, expected_version: int, url: str = SQL) -> httpx.Response:
        body = tensors(value, config={})
        return await client.put(url, content=body, params={"expected_version": expected_version})

    assert (await put(1, 1)).status_code == 200
    assert code_of(await put(2, 1)) == (409, "version_conflict", "expected_version")
    assert code_of(await put(2, 0)) == (409, "version_conflict", "expected_version")
    assert (await put(2, 2)).status_code == 200
    assert code_of(await put(1, 1, "/v1/adapters/new/tensors")) == (409, "version_conflict", "expected_version")
    assert (await put(1, 0, "/v1/adapters/new/tensors")).status_code == 201


async def test_entity_tags(client: httpx.AsyncClient) -> None:
    async def put(value: float, url: str = SQL, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): tag for name, tag in headers.items()}
        return await client.put(url, content=tensors(value, config={}), headers=names)

    tag = (await put(1)).headers["etag"]
    assert code_of(await put(2, if_match='"0123"')) == (412, "precondition_failed", "If-Match")
    assert code_of(await put(2, if_match=f"W/{tag}")) == (412, "precondition_failed", "If-Match")
    assert (await put(2, if_match=f'"0123", {tag}')).status_code == 200
    assert code_of(await put(3, if_match=tag)) == (412, "precondition_failed", "If-Match")
    assert (await put(3, if_match="*")).status_code == 200
    assert code_of(await put(4, if_none_match="*")) == (412, "precondition_failed", "If-None-Match")
    new = "/v1/adapters/new/tensors"
    assert code_of(await put(4, new, if_match="*")) == (412, "precondition_failed", "If-Match")
    assert (await put(4, new, if_none_match="*")).status_code == 201


async def test_of_many_that_expect_one_version_one_wins(client: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(
        *(client.put(SQL, content=tensors(value), params={"expected_version": 1}) for value in range(4))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]


async def test_updates_of_a_name_are_ordered(client: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(client.put(SQL, content=tensors(value)) for value in range(4)))
    versions = [answer.json()["version"] for answer in answers]
    assert sorted(versions) == [2, 3, 4, 5]
    last = answers[versions.index(5)].json()["digest"]
    assert (await client.get("/v1/adapters/sql")).json()["digest"] == last


# ------------------------------------------------------------------------------------------------------------- refusals


async def test_a_body_is_bounded(engine: FakeAsyncEngine, client: httpx.AsyncClient, folder: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield bytes(2**19)

    for content in (bytes(2**21 + 1), pieces()):
        assert code_of(await client.put(SQL, content=content)) == (413, "body_too_long", None)
    assert (await client.put(SQL, content=tensors(size=2**18))).status_code == 200  # longer than other bodies may be


async def test_all_uploads_are_bounded(client: httpx.AsyncClient) -> None:
    for value in (1, 2, 3):
        answer = await client.put(SQL, content=tensors(value, size=2**18 + 2**17))
        assert answer.status_code == 200 or code_of(answer) == (507, "adapter_disk_full", None)
    assert answer.status_code == 507


@pytest.mark.parametrize("headers", [{"content-type": "text/plain"}, {"content-encoding": "gzip"}])
async def test_other_media_types_are_refused(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert code_of(await client.put(SQL, content=tensors(), headers=headers)) == (415, "unsupported_media_type", None)


async def test_json_is_for_an_adapter_of_that_name(client: httpx.AsyncClient) -> None:
    answer = await client.put("/v1/adapters/acme/tensors", json={"path": "/adapters/x"})
    assert answer.status_code == 400
    assert "'acme/tensors'" in answer.text


@pytest.mark.parametrize("name", ["sql@1", "base", "a/b"])
async def test_names_that_no_adapter_may_have(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.put(f"/v1/adapters/{name}/tensors", content=tensors(config={}))
    assert answer.status_code == 400, answer.text


async def test_without_lora_it_is_refused() -> None:
    async with client_of(create_app(FakeAsyncEngine(enable_lora=False), ServerConfig())) as client:
        assert code_of(await client.put(SQL, content=tensors())) == (400, "lora_disabled", None)


async def test_dynamic_loading_may_be_off(engine: FakeAsyncEngine) -> None:
    async with client_of(create_app(engine, ServerConfig(disable_dynamic_loading=True))) as client:
        assert code_of(await client.put(SQL, content=tensors())) == (403, "dynamic_loading_disabled", None)


# ---------------------------------------------------------------------------------------------------------- connections


@pytest.fixture
def live(engine: FakeAsyncEngine) -> Iterator[LiveServer]:
    with LiveServer(engine) as server:
        yield server


def begin(live: LiveServer, length: int, sent: bytes) -> socket.socket:
    sock = socket.create_connection(live.address)
    sock.sendall(f"PUT {SQL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode() + sent)
    return sock


def wait_until(condition: Any) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_client_that_goes_away_leaves_nothing(live: LiveServer, engine: FakeAsyncEngine, folder: Path) -> None:
    with begin(live, 2**20, bytes(2**19)):
        wait_until(lambda: folder.exists() and list(folder.iterdir()))
    wait_until(lambda: not list(folder.iterdir()))
    assert engine.registry is not None
    assert engine.registry.resolve("sql").adapter_version == 1


def test_what_is_on_the_disk_does_not_count_as_bodies(folder: Path) -> None:
    engine = FakeAsyncEngine({"sql": "/adapters/sql"}, uploads=UploadStore(folder))
    config = ServerConfig(
        port=0, access_log=False, log_level="warning", max_body_bytes=2**21, max_inflight_body_bytes=2**22
    )
    with LiveServer(engine, config) as live:
        body = tensors(size=2**22)
        answer = httpx.put(live.url + SQL, content=body, timeout=60)
        assert (answer.status_code, answer.json()["status"]) == (200, "reloaded"), answer.text
        assert engine.registry is not None
        engine.registry.unload("sql")
    wait_until(lambda: not list(folder.iterdir()))


def test_a_client_has_so_many_uploads(live: LiveServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.verb_turns.PATIENCE_S", 0.05)
    socks = [begin(live, 2**20, b"x") for _ in range(MAX_UPLOADS_OF_A_CLIENT)]
    wait_until(lambda: folder.exists() and len(list(folder.iterdir())) == MAX_UPLOADS_OF_A_CLIENT)
    assert code_of(httpx.put(live.url + SQL, content=tensors())) == (429, "too_many_verbs", None)
    for sock in socks:
        sock.close()
    wait_until(lambda: not list(folder.iterdir()))
    assert httpx.put(live.url + SQL, content=tensors()).status_code == 200


def test_a_disk_that_hangs_stalls_no_other_request(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, is_writing = threading.Event(), threading.Event()
    write = uploads.Upload.write

    def hang(*arguments: Any) -> None:
        is_writing.set()
        assert may_go_on.wait(30)
        write(*arguments)

    monkeypatch.setattr(uploads.Upload, "write", hang)
    answers: list[httpx.Response] = []
    putting = threading.Thread(target=lambda: answers.append(httpx.put(live.url + SQL, content=tensors(), timeout=60)))
    putting.start()
    assert is_writing.wait(30)
    assert httpx.get(f"{live.url}/health", timeout=10).status_code == 200
    may_go_on.set()
    putting.join()
    assert answers[0].status_code == 200


# --------------------------------------------------------------------------------------------------------------- Python


async def test_bytes_from_python(engine: FakeAsyncEngine, folder: Path) -> None:
    result = await engine.update_adapter_tensors("sql", tensors(), expected_version=1)
    assert (result.status, result.ref.adapter_version) == ("reloaded", 2)
