"""Adapters by s3://, with the real s3fs against moto's server."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from loraplex import AsyncEngine, SamplingParams
from loraplex.adapters.registry import NameQuery, VersionRecord
from loraplex.adapters.remote import fetched, object_store
from loraplex.adapters.remote.object_store import ObjectAdapter
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.sources.named import NamedSource
from loraplex.demo.tasks import adapter_path
from loraplex.errors import (
    AdapterContentChangedError,
    AdapterFetchError,
    AdapterFetchTimeoutError,
    AdapterFileFormatError,
    AdapterLoadError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterTooLargeError,
    AdapterTruncatedError,
)
from tests.frontend.processes import demo_config

pytest.importorskip("s3fs", reason="s3fs is not installed (pip install loraplex[s3])")
moto_server = pytest.importorskip("moto.server", reason="moto's server is not installed (pip install loraplex[dev])")

ADAPTER = "s3://adapters/team/upper"
SECRET, TOKEN = "SECRET-key-of-the-store", "SECRET-session-token"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Store:
    """moto's server, and its contents."""

    def __init__(self, url: str) -> None:
        import boto3

        self.url = url
        self.client: Any = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
        self.client.create_bucket(Bucket="adapters")

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket="adapters", Key=key, Body=data)

    def upload(self, prefix: str, folder: Path) -> None:
        for file in folder.iterdir():
            self.put(f"{prefix}/{file.name}", file.read_bytes())


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    import httpx

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    httpx.post(f"{server}/moto-api/reset", trust_env=False).raise_for_status()
    object_store._store.cache_clear()
    yield Store(server)
    object_store._store.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> AdapterSource:
    return AdapterSource(allowed_roots=(), timeout_s=20.0, object_folder=tmp_path / "objects")


def record_of(path: str, lora_path: str) -> VersionRecord:
    return VersionRecord(1, 1, "0" * 64, path, lora_path, "", 1, 8, False, 1.0)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------------- what for


def test_the_files_of_an_adapter_and_no_others_come_once(
    store: Store, source: AdapterSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Path(adapter_path("upper"))
    store.upload("team/upper", given)
    store.put("team/upper/notes.txt", b"x" * 1000)
    store.put("team/upper/checkpoints/adapter_config.json", b"another one")
    store.put("team/upper2/adapter_config.json", b"a neighbour")
    downloads: list[str] = []
    download = object_store._download

    async def counting(adapter: ObjectAdapter, wanted: Any, file: Path) -> None:
        downloads.append(wanted.name)
        await download(adapter, wanted, file)

    monkeypatch.setattr(object_store, "_download", counting)
    found = source.fetch(ADAPTER)
    names = {CONFIG, WEIGHTS}
    assert names <= bytes_of(found).keys() <= names | {"tokenizer.json", "tokenizer_config.json"}
    assert all(data == (given / name).read_bytes() for name, data in bytes_of(found).items())
    assert source.fetch(f"{ADAPTER}/") == found
    assert sorted(downloads) == sorted(bytes_of(found)), "each once"
    assert source.roots_of(found) == (found,)
    assert oct(found.parent.parent.stat().st_mode & 0o777) == "0o700"
    assert [each.name for each in found.parent.iterdir()] == [found.name]


async def test_an_engine_serves_what_the_store_has(store: Store) -> None:
    """Files of a store are checked as those of a directory are."""
    store.upload("team/upper", Path(adapter_path("upper")))
    store.upload("team/torn", Path(adapter_path("upper")))
    store.put(f"team/torn/{WEIGHTS}", (Path(adapter_path("upper")) / WEIGHTS).read_bytes()[:-8])
    engine = await AsyncEngine.start(demo_config())
    try:
        assert (await engine.load_adapter("mine", ADAPTER)).ref.lora_path == ADAPTER
        with pytest.raises(AdapterTruncatedError):
            await engine.load_adapter("torn", "s3://adapters/team/torn")
        params = SamplingParams(temperature=0, max_tokens=12)
        outputs = [each async for each in engine.generate("banana bread=", params, "one", model="mine")]
        assert outputs[-1].outputs[0].text.startswith("BANANA BREAD")
    finally:
        await engine.shutdown()


def test_a_new_content_is_another_directory_and_the_old_one_stays(store: Store, source: AdapterSource) -> None:
    """A version that is registered reads on what it was loaded from."""
    store.upload("team/upper", Path(adapter_path("upper")))
    before = source.fetch(ADAPTER)
    old = bytes_of(before)
    store.upload("team/upper", Path(adapter_path("reverse")))
    after = source.fetch(ADAPTER)
    assert after != before
    assert bytes_of(before) == old
    assert bytes_of(after)[WEIGHTS] == (Path(adapter_path("reverse")) / WEIGHTS).read_bytes()


def test_shards_come_with_their_index_and_a_bin_file_only_alone(store: Store, source: AdapterSource) -> None:
    for name in (CONFIG, "adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"):
        store.put(f"sharded/{name}", b"{}")
    store.put("sharded/adapter_model.bin", b"pickle")
    assert bytes_of(source.fetch("s3://adapters/sharded")).keys() == {CONFIG, "adapter_model.bin"}
    store.put("sharded/adapter_model.safetensors.index.json", b"{}")
    found = bytes_of(source.fetch("s3://adapters/sharded")).keys()
    assert len(found) == 4
    assert "adapter_model.bin" not in found


def test_loads_of_one_prefix_fetch_it_once(
    store: Store, source: AdapterSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one removed what the load of the first was reading, and its bytes were counted twice."""
    store.upload("team/upper", Path(adapter_path("upper")))
    download, pool = object_store._download, ThreadPoolExecutor(1)
    downloads: list[str] = []
    second: list[Future[Path]] = []
    missing: list[int] = []
    counting = replace(source, make_room=lambda adapter, directory, nbytes: missing.append(nbytes))

    async def meanwhile(adapter: ObjectAdapter, wanted: Any, file: Path) -> None:
        downloads.append(wanted.name)
        if not second:
            second.append(pool.submit(counting.fetch, ADAPTER))
            end_s = time.monotonic() + 0.4
            while len(downloads) == 1 and time.monotonic() < end_s:  # until that one downloads, too, if it does
                await asyncio.sleep(0.01)
        await download(adapter, wanted, file)

    monkeypatch.setattr(object_store, "_download", meanwhile)
    with pool:
        found = counting.fetch(ADAPTER)
        assert second[0].result(60) == found
    assert sorted(downloads) == sorted(bytes_of(found)), "each once"
    assert missing == [sum(map(len, bytes_of(found).values())), 0]


def test_loads_that_wait_for_room_keep_no_other_fetch_waiting(store: Store, source: AdapterSource) -> None:
    """They took the few threads that the loop of all fetches has for its waits, and loads of verbs need one, too."""
    may_leave, num_waiting, num_blocked = threading.Event(), threading.Semaphore(0), (os.cpu_count() or 1) + 4

    def wait_for_room(*_: object) -> None:
        num_waiting.release()
        assert may_leave.wait(60), "others waited for it"

    blocked = replace(source, make_room=wait_for_room)
    store.upload("team/upper", Path(adapter_path("upper")))
    for number in range(num_blocked):
        store.put(f"many/{number}/{CONFIG}", b"{}")
    with ThreadPoolExecutor(num_blocked) as pool:
        waiting = [pool.submit(blocked.fetch, f"s3://adapters/many/{number}") for number in range(num_blocked)]
        try:
            for _ in waiting:
                assert num_waiting.acquire(timeout=15)
            assert (source.fetch(ADAPTER) / WEIGHTS).exists()
        finally:
            may_leave.set()
        assert all(each.result(30).is_dir() for each in waiting)


def test_what_another_process_was_quicker_to_fetch_stays(
    store: Store, source: AdapterSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be reading it."""
    store.upload("team/upper", Path(adapter_path("upper")))
    other = AdapterSource((), timeout_s=20.0, object_folder=source.object_folder)
    download, inodes = object_store._download, list[int]()

    async def slowly(adapter: ObjectAdapter, wanted: Any, file: Path) -> None:
        monkeypatch.setattr(object_store, "_download", download)
        if not inodes:
            inodes.append((await asyncio.to_thread(other.fetch, ADAPTER)).stat().st_ino)
        await download(adapter, wanted, file)

    monkeypatch.setattr(object_store, "_download", slowly)
    found = source.fetch(ADAPTER)
    assert [found.stat().st_ino] == inodes
    assert [each.name for each in found.parent.iterdir()] == [found.name]


def test_a_bucket_itself_may_be_an_adapter(store: Store, source: AdapterSource) -> None:
    store.put(CONFIG, b"{}")
    store.put(WEIGHTS, b"weights")
    assert bytes_of(source.fetch("s3://adapters")) == {CONFIG: b"{}", WEIGHTS: b"weights"}


def test_what_another_server_loaded_is_fetched_or_refused(store: Store, tmp_path: Path) -> None:
    store.upload("team/upper", Path(adapter_path("upper")))
    one = AdapterSource((), object_folder=tmp_path / "one" / "objects")
    other = AdapterSource((), object_folder=tmp_path / "other" / "objects")
    path = one.fetch(ADAPTER)
    there = record_of(str(path), ADAPTER)
    assert one.locate(there, False) == str(path)
    elsewhere = record_of(str(path).replace(str(tmp_path / "one"), "/not/here"), ADAPTER)
    assert other.locate(elsewhere, False) is None
    found = other.locate(elsewhere, True)
    assert found is not None
    assert bytes_of(Path(found)) == bytes_of(path)
    store.upload("team/upper", Path(adapter_path("reverse")))
    third = AdapterSource((), object_folder=tmp_path / "third" / "objects")
    with pytest.raises(AdapterContentChangedError, match="have changed since another server loaded it"):
        third.locate(elsewhere, True)
    assert third.locate(record_of("/gone", "/gone"), False) == "/gone", "its requests say that it is missing"


# --------------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    "given",
    [
        "s3://",
        "s3:///key",
        "s3://UPPER/key",
        "s3://a/key",
        "s3://bu..cket/key",
        "s3://bucket/../other",
        "s3://bucket/a/../b",
        "s3://bucket/./a",
        "s3://bucket//a",
        "s3://bucket/a//b",
        "s3://bucket/a*",
        "s3://bucket/a?versionId=1",
        "s3://bucket/a%2e%2e",
        "s3://bucket/a b",
        "s3://bucket/a\0",
        "s3://bucket/-a",
        "s3://key:secret@bucket/a",
        "s3://bucket:80/a",
        f"s3://bucket/{'a/' * 600}a",
        "s3://bucket/ä",
    ],
)
def test_a_place_that_cannot_be_is_refused_before_anything_is_asked(
    given: str, source: AdapterSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> None:
        raise AssertionError("the store was asked")

    monkeypatch.setattr(object_store, "_store", asked)
    with pytest.raises(AdapterPathNotFoundError, match="this is no place in an object store"):
        source.fetch(given)


@pytest.mark.parametrize(
    ("given", "root", "is_below"),
    [
        ("s3://bucket/a/b", "s3://bucket", True),
        ("s3://bucket/a/b", "s3://bucket/a", True),
        ("s3://bucket/a/b", "s3://bucket/a/b/", True),
        ("s3://bucket/a", "s3://bucket/a/b", False),
        ("s3://bucket/ab", "s3://bucket/a", False),
        ("s3://other/a", "s3://bucket/a", False),
        ("s3://bucket2/a", "s3://bucket", False),
    ],
)
def test_what_is_below_a_root(given: str, root: str, is_below: bool) -> None:
    adapter, allowed = ObjectAdapter.parse(given), ObjectAdapter.parse(root)
    assert adapter is not None
    assert allowed is not None
    assert adapter.is_below(allowed) == is_below


@pytest.mark.parametrize(
    ("name", "size", "error", "match"),
    [
        (CONFIG, 2**20 + 1, AdapterFileFormatError, "adapter_config.json has 1048577 bytes, at most 1048576 are read"),
        ("tokenizer.json", 2**26 + 1, AdapterFileFormatError, "tokenizer.json has 67108865 bytes, at most 67108864"),
        (WEIGHTS, 5_000_000, AdapterTooLargeError, "has 5000002 bytes, and at most 4000000 are fetched"),
    ],
)
def test_sizes_are_counted_before_a_byte_is_read(
    store: Store, tmp_path: Path, name: str, size: int, error: type[Exception], match: str
) -> None:
    store.put(f"big/{CONFIG}", b"{}")
    store.put(f"big/{name}", b"x" * size)
    source = AdapterSource((), object_folder=tmp_path / "objects", max_object_bytes=4_000_000)
    with pytest.raises(error, match=match):
        source.fetch("s3://adapters/big")
    assert not (tmp_path / "objects").exists()


def test_a_disk_without_room_is_said(store: Store, source: AdapterSource, monkeypatch: pytest.MonkeyPatch) -> None:
    store.upload("team/upper", Path(adapter_path("upper")))
    monkeypatch.setattr(fetched, "SPARE_DISK_BYTES", 2**60)
    with pytest.raises(AdapterFetchError, match="the disk of this server has"):
        source.fetch(ADAPTER)


def test_a_prefix_of_many_objects_is_refused(
    store: Store, source: AdapterSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "MAX_OBJECTS", 20)
    for number in range(21):
        store.put(f"many/{number}", b"")
    with pytest.raises(AdapterFileFormatError, match="has more than 20 objects beside it"):
        source.fetch("s3://adapters/many")


@pytest.mark.parametrize("more", [-1, 1], ids=["shorter", "longer"])
def test_an_object_that_is_not_as_long_as_was_said_leaves_nothing(
    store: Store, source: AdapterSource, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    store.upload("team/upper", Path(adapter_path("upper")))
    listed = object_store._listed

    async def lying(adapter: ObjectAdapter) -> dict[str, Any]:
        return {
            name: object_store._Object(name, each.size + more, each.etag)
            for name, each in (await listed(adapter)).items()
        }

    monkeypatch.setattr(object_store, "_listed", lying)
    with pytest.raises(AdapterTruncatedError, match=r"the store gave .* bytes of adapter_config.json, and said"):
        source.fetch(ADAPTER)
    assert [path for path in (source.object_folder or Path()).rglob("*") if path.is_file()] == []


def test_an_object_that_changes_while_it_is_read_is_not_mixed(
    store: Store, source: AdapterSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.upload("team/upper", Path(adapter_path("upper")))
    listed = object_store._listed

    async def and_change(adapter: ObjectAdapter) -> dict[str, Any]:
        found = await listed(adapter)
        store.put(f"team/upper/{WEIGHTS}", b"x" * found[WEIGHTS].size)
        return found

    monkeypatch.setattr(object_store, "_listed", and_change)
    with pytest.raises(AdapterFetchError, match="an object changed while it was being read; try again"):
        source.fetch(ADAPTER)
    assert [path for path in (source.object_folder or Path()).rglob("*") if path.is_file()] == []


def test_what_a_crash_left_is_fetched_again_and_removed(store: Store, source: AdapterSource) -> None:
    store.upload("team/upper", Path(adapter_path("upper")))
    found = source.fetch(ADAPTER)
    expected = bytes_of(found)
    (found / WEIGHTS).write_bytes(b"")
    parts = [found.parent.parent / prefix / ".part-x" for prefix in (found.parent.name, "other", "running")]
    for part in parts:
        part.mkdir(parents=True)
        os.utime(part, (time.time() - 7200,) * 2)
    parts[2].touch()
    assert source.fetch(ADAPTER) == found
    assert bytes_of(found) == expected
    assert [part.exists() for part in parts] == [False, False, True]


def test_a_folder_that_others_may_write_to_is_not_used(store: Store, tmp_path: Path) -> None:
    store.upload("team/upper", Path(adapter_path("upper")))
    source = AdapterSource((), object_folder=tmp_path / "objects")
    with suppress(AdapterLoadError):
        source.fetch(ADAPTER)
    (place,) = (tmp_path / "objects").iterdir()
    place.chmod(0o777)
    store.upload("team/upper", Path(adapter_path("reverse")))
    with pytest.raises(AdapterFetchError, match="has no folder for it"):
        source.fetch(ADAPTER)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_pages_of_a_store_have_every_name_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order is that of names with a slash behind; what can be no name is passed over, however much there is."""
    names = [*(f"sql-{number}" for number in range(7)), "sql", "a", "z"]
    for name in (*names, *(f".hidden-{number}" for number in range(5)), *(f"b{number}@x" for number in range(5))):
        store.put(f"pages/{name}/{CONFIG}", b"{}")
    monkeypatch.setattr(object_store, "MAX_OBJECTS", 3)
    source = NamedSource.parse("store=s3://adapters/pages")
    seen: list[str] = []
    while page := source.names(NameQuery(after=seen[-1] if seen else ""), 2):
        seen += page
        assert len(seen) <= len(names)
    assert sorted(seen) == sorted(names)
    assert source.names(NameQuery(prefix="sql"), 100) == [*(f"sql-{number}" for number in range(7)), "sql"]
    assert source.names(NameQuery(prefix="none"), 100) == []


def test_a_store_that_cannot_be_listed_is_named_as_its_source(store: Store) -> None:
    with pytest.raises(AdapterLoadError, match="adapter 'store/': the store has no such bucket") as caught:
        NamedSource.parse("store=s3://no-such-bucket/prefix").names(NameQuery(), 2)
    assert "no-such-bucket" not in caught.value.message


def test_what_the_store_does_not_have(store: Store, source: AdapterSource) -> None:
    with pytest.raises(AdapterPathNotFoundError, match="the store has nothing there"):
        source.fetch("s3://adapters/nothing")
    with pytest.raises(AdapterPathNotFoundError, match="has no such bucket or object"):
        source.fetch("s3://no-such-bucket/x")


def test_a_store_without_credentials_is_said(
    store: Store, source: AdapterSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AdapterPermissionError, match="this server has no credentials for the store"):
        source.fetch(ADAPTER)


def test_a_store_that_is_away_or_slow(
    store: Store, tmp_path: Path, source: AdapterSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        object_store._store.cache_clear()
        hasty = AdapterSource((), timeout_s=0.5, object_folder=tmp_path / "objects")
        with pytest.raises(AdapterFetchTimeoutError, match=r"did not deliver it within 0\.5 s"):
            hasty.fetch(ADAPTER)
    object_store._store.cache_clear()
    with pytest.raises((AdapterFetchError, AdapterFetchTimeoutError)):
        AdapterSource((), timeout_s=8.0, object_folder=tmp_path / "objects").fetch(ADAPTER)


class HostileStore(BaseHTTPRequestHandler):
    """What a list of a bucket, and an object of it, are is in the bucket's name."""

    protocol_version = "HTTP/1.0"
    asked: ClassVar[list[str]] = []
    sent_bytes: ClassVar[Counter[str]] = Counter()
    elsewhere: ClassVar[str] = ""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        bucket, _, key = self.path.lstrip("/").partition("?")[0].partition("/")
        self.asked.append(self.path)
        if bucket.startswith("redirected") and (key or "objects" not in bucket):
            self._answer(307, b"<Error><Code>TemporaryRedirect</Code></Error>", Location=f"{self.elsewhere}/evil")
        elif not key:
            self._list(bucket)
        elif bucket == "broken":
            self._answer(200, b"short", Content_Length="100", Hold="1")

    do_HEAD = do_GET

    def _list(self, bucket: str) -> None:
        tag = "x&#13;&#10;X-Other: 1" if bucket == "line-ends" else "&quot;x&quot;"
        names = (f"model-{number}" for number in range(1001)) if bucket == "crowded" else (CONFIG, WEIGHTS)
        entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10 if n else "x" * 99}">' for n in range(5))
        head = f"<!DOCTYPE x [{entities}]>" if bucket == "entities" else ""
        size = {"negative": "-1", "long-size": "9" * 4000}.get(bucket, "100")
        item = f"<Contents><Key>{{}}</Key><Size>{size}</Size><ETag>{{}}</ETag></Contents>"
        body = "".join(item.format(name, tag) for name in names)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{head}<ListBucketResult><IsTruncated>false</IsTruncated>{body}".encode())
        filler = {"endless": b" " * 2**16, "tags": b"<a/>" * 2**12, "attributes": b"a='' " * 2**12}.get(bucket)
        with suppress(OSError):
            while filler is not None and self.sent_bytes[bucket] < 2**28:
                self.wfile.write(filler)
                self.sent_bytes[bucket] += len(filler)
        with suppress(OSError):
            self.wfile.write(b"</ListBucketResult>")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        is_held = headers.pop("Hold", None)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        if is_held:
            time.sleep(2)


@pytest.fixture
def hostile(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[HostileStore]]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), HostileStore) for _ in range(2)]
    places = [f"http://127.0.0.1:{each.server_address[1]}" for each in servers]
    for each in servers:
        threading.Thread(target=each.serve_forever, daemon=True).start()
    monkeypatch.setattr(HostileStore, "asked", [])
    monkeypatch.setattr(HostileStore, "sent_bytes", Counter())
    monkeypatch.setattr(HostileStore, "elsewhere", places[1])
    monkeypatch.setenv("AWS_ENDPOINT_URL", places[0])
    object_store._store.cache_clear()
    yield HostileStore
    for each in servers:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize("bucket", ["redirected", "redirected-objects"])
def test_a_redirect_of_the_store_is_not_followed(
    hostile: type[HostileStore], source: AdapterSource, bucket: str
) -> None:
    with pytest.raises(AdapterFetchError, match="redirects elsewhere"):
        source.fetch(f"s3://{bucket}")
    assert hostile.asked, "the store was asked"
    assert not [path for path in hostile.asked if "evil" in path]
    assert len(hostile.asked) <= 6, "nor is its region asked for in turns with it"


@pytest.mark.parametrize("bucket", ["endless", "tags", "attributes", "entities"])
def test_a_list_without_an_end_is_not_read_on(hostile: type[HostileStore], source: AdapterSource, bucket: str) -> None:
    with pytest.raises(AdapterFileFormatError, match="the store's answer is no list of at most 1000 objects"):
        source.fetch(f"s3://{bucket}")
    assert hostile.sent_bytes[bucket] < 2**26, "what lies between the two sockets"


@pytest.mark.parametrize(
    ("bucket", "reason"),
    [
        ("crowded", "has more than 1000 objects"),
        ("line-ends", "lists an object with a tag that is none"),
        ("negative", "lists an object with a size that is none"),
        ("long-size", "lists an object with a size that is none"),
        ("broken", "the store"),
    ],
)
def test_a_store_that_answers_oddly(
    hostile: type[HostileStore], source: AdapterSource, bucket: str, reason: str
) -> None:
    with pytest.raises(AdapterLoadError, match=reason):
        source.fetch(f"s3://{bucket}")


def test_credentials_are_in_no_error_and_no_log_line(
    store: Store, source: AdapterSource, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    store.upload("team/upper", Path(adapter_path("upper")))
    caplog.clear()
    source.fetch(ADAPTER)
    for given in ("s3://adapters/nothing", "s3://no-such-bucket/x"):
        with pytest.raises(AdapterLoadError) as caught:
            source.fetch(given)
        assert "SECRET" not in f"{caught.value}{caught.value.__cause__}"
    assert "SECRET" not in caplog.text
    assert "SECRET" not in repr(source)


def test_without_s3fs(source: AdapterSource, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    object_store._store.cache_clear()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(AdapterFetchError, match=r"s3fs is not installed; install loraplex\[s3\]"):
        source.fetch(ADAPTER)
