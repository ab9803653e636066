"""AdapterSource: directories inside the allowed roots, and the real huggingface_hub against a hub on loopback."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.registry import VersionRecord
from loraplex.adapters.remote import fetches as remote_fetches
from loraplex.adapters.remote.fetches import Fetches
from loraplex.adapters.remote.hub import hub_folder_of, hub_snapshot_of
from loraplex.adapters.remote.hub_client import MAX_REQUESTS
from loraplex.adapters.source import AdapterSource
from loraplex.errors import (
    AdapterFetchError,
    AdapterFetchTimeoutError,
    AdapterPathForbiddenError,
    AdapterPathNotFoundError,
    error_from_payload,
)
from tests.adapters.hub_server import Files, Hub, sha_of

CONFIG = b'{"r": 8}'
FIRST = {
    "adapter_config.json": CONFIG,
    "adapter_model.safetensors": b"one",
    "README.md": b"hello",
    "adapter_model.bin": b"big",
}
SECOND = {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"two"}
ONLY_BIN = {"adapter_config.json": CONFIG, "adapter_model.bin": b"pickle", "optimizer.pt": b"x" * 1000}
SHARDED = {
    "adapter_config.json": CONFIG,
    "adapter_model.safetensors.index.json": b"{}",
    "adapter_model-00001-of-00002.safetensors": b"1",
    "adapter_model-00002-of-00002.safetensors": b"2",
    "model.safetensors": b"the whole model",
}
REPOS: dict[str, dict[str, Files]] = {
    "org/sql": {"main": FIRST, "v2": SECOND},
    "org/bin": {"main": ONLY_BIN},
    "org/sharded": {"main": SHARDED},
}
REPOS["org/many"] = {
    "main": {
        f"all/{name}/{file}": data for name, files in (("sql", FIRST), ("two", SECOND)) for file, data in files.items()
    }
}
REPOS["org/crowd"] = {
    "main": {f"beside/{file}": b"" for file in (*FIRST, *map(str, range(1000)))}
    | {f"alone/{file}": data for file, data in FIRST.items()}
}
REPOS["org/model"] = {"main": {"config.json": b"{}", "model.safetensors": b"x"}}


# ---------------------------------------------------------------------------------------------------------- directories


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for where in ("root/sql", "elsewhere/sql"):
        directory = tmp_path / where
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_bytes(CONFIG)
        (directory / "adapter_model.safetensors").write_bytes(b"x")
    return tmp_path / "root"


def test_a_directory_is_returned_resolved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (root / "sql").resolve()
    source = AdapterSource()
    assert source.fetch(str(root / "sql")) == expected
    assert source.fetch(str(root / "x" / ".." / "sql")) == expected
    monkeypatch.chdir(root)
    assert source.fetch("sql") == source.fetch("./sql") == expected
    monkeypatch.setenv("HOME", str(root))
    assert source.fetch("~/sql") == expected
    (root / "link").symlink_to(root / "sql")
    assert source.fetch(str(root / "link")) == expected


def test_a_local_directory_comes_before_the_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    assert AdapterSource().fetch("root/sql") == (root / "sql").resolve()


@pytest.mark.parametrize(
    "path", ["nowhere", "/no/such/dir", "./org/name", "a/b/c", "", "a\0b", "~no-user-of-this-name/x"]
)
def test_no_such_directory(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if path == "":
        (tmp_path / "adapter_config.json").write_bytes(CONFIG)
    with pytest.raises(AdapterPathNotFoundError):
        AdapterSource().fetch(path)


def test_a_file_is_no_directory(root: Path) -> None:
    with pytest.raises(AdapterPathNotFoundError, match="not a directory"):
        AdapterSource().fetch(str(root / "sql" / "adapter_config.json"))


def test_only_allowed_roots_are_read(root: Path) -> None:
    source = AdapterSource(allowed_roots=(root,))
    outside = root.parent / "elsewhere" / "sql"
    assert source.fetch(str(root / "sql")) == (root / "sql").resolve()
    assert AdapterSource(allowed_roots=(root, outside)).fetch(str(outside)) == outside.resolve()
    (root / "link").symlink_to(outside)
    for path in (
        outside,
        root / ".." / "elsewhere" / "sql",
        root / "link",
        Path("/etc"),
        Path("/no/such/dir"),
        root.parent,
    ):
        with pytest.raises(AdapterPathForbiddenError, match="--adapter-root"):
            source.fetch(str(path))
    with pytest.raises(AdapterPathForbiddenError, match="none is allowed"):
        AdapterSource(allowed_roots=()).fetch(str(root / "sql"))


def test_a_root_with_a_common_prefix_is_another_directory(root: Path) -> None:
    twin = root.with_name("root-of-others")
    (twin / "sql").mkdir(parents=True)
    with pytest.raises(AdapterPathForbiddenError):
        AdapterSource(allowed_roots=(root,)).fetch(str(twin / "sql"))


def test_files_must_stay_where_they_were_allowed(root: Path, tmp_path: Path) -> None:
    """In the roots; of what is in none of them now, in its directory, or in its part of the hub's cache."""
    source, snapshot = AdapterSource(allowed_roots=(root,)), tmp_path / "models--org--sql" / "snapshots" / "abc"
    assert source.roots_of(root) == source.roots_of(root / "sql") == (root,)
    assert source.roots_of(tmp_path / "elsewhere" / "sql") == (tmp_path / "elsewhere" / "sql",)
    assert source.roots_of(snapshot) == (tmp_path / "models--org--sql",)
    assert source.roots_of(tmp_path / "snapshots" / "abc") == (tmp_path / "snapshots" / "abc",)
    assert AdapterSource().roots_of(snapshot) is None


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model-00001-of-00001.safetensors"]
)
def test_files_that_link_out_of_the_roots_are_refused(root: Path, name: str) -> None:
    secret = root.parent / "secret"
    secret.write_bytes(b"secret")
    (root / "sql" / name).unlink(missing_ok=True)
    (root / "sql" / name).symlink_to(secret)
    with pytest.raises(AdapterPathForbiddenError):
        AdapterSource(allowed_roots=(root,)).fetch(str(root / "sql"))
    AdapterSource().fetch(str(root / "sql"))


def test_a_loop_of_links_is_not_found(root: Path) -> None:
    (root / "a").symlink_to(root / "b")
    (root / "b").symlink_to(root / "a")
    with pytest.raises(AdapterPathNotFoundError):
        AdapterSource().fetch(str(root / "a"))


def test_a_link_to_a_name_that_is_not_utf_8_is_not_found(root: Path) -> None:
    """Such a path cannot be sent to the engine, and an encoder's message would tell a part of it."""
    odd = root.parent / os.fsdecode(b"odd-\xff")
    shutil.copytree(root / "sql", odd)
    (root / "odd").symlink_to(odd)
    with pytest.raises(AdapterPathNotFoundError, match="no such directory"):
        AdapterSource(allowed_roots=(root, odd)).fetch(str(root / "odd"))


def test_what_the_roots_hide_is_not_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With roots, a path outside gives one answer whether it exists or not."""
    source = AdapterSource(allowed_roots=(root,))
    answers = set()
    for path in ("/etc", "/no/such/dir"):
        with pytest.raises(AdapterPathForbiddenError) as caught:
            source.fetch(path)
        answers.add(caught.value.message.replace(path, "PATH"))
    assert len(answers) == 1


# ------------------------------------------------------------------------------------------------------------------ hub

CHILD = """
import json, sys
from pathlib import Path
from loraplex.adapters.source import AdapterSource
from loraplex.errors import LoraplexError

answers = []
for job in json.load(sys.stdin):
    roots = None if job["roots"] is None else tuple(map(Path, job["roots"]))
    source = AdapterSource(roots, Path(job["cache"]), job["timeout_s"], max_object_bytes=1000)
    try:
        path = source.fetch(job["id"], job["revision"], job["called"])
        answers.append({"path": str(path), "files": {file.name: file.read_text() for file in path.iterdir()}})
    except LoraplexError as error:
        answers.append(error.to_payload())
json.dump(answers, sys.stdout)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(REPOS) as hub:
        yield hub


class Client:
    """Runs fetches in a child, because huggingface_hub reads its environment when it is imported."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def fetch(
        self,
        hub: Hub,
        *ids: str,
        timeout_s: float = 60.0,
        roots: list[str] | None = None,
        revision: str | None = None,
        called: str = "",
        **env: str,
    ) -> Any:
        jobs = [
            {"id": i, "revision": revision, "cache": str(self.cache), "timeout_s": timeout_s, "roots": roots}
            | {"called": called}
            for i in ids
        ]
        variables = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **env,
        }
        child = subprocess.run(
            [sys.executable, "-c", CHILD],
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **variables, "HF_HOME": str(self.cache)},
            cwd=self.cache.parent,
        )
        assert child.returncode == 0, child.stderr
        self.stderr = child.stderr
        return json.loads(child.stdout)


@pytest.fixture
def client(tmp_path: Path) -> Client:
    (tmp_path / "cache").mkdir()
    return Client(tmp_path / "cache")


def test_the_hub_gives_adapter_files_only(hub: Hub, client: Client) -> None:
    sql, again, v2, bin_only, sharded = client.fetch(
        hub, "org/sql", "hf://org/sql", "hf://org/sql@v2", "org/bin", "org/sharded"
    )
    assert sql["files"] == {"adapter_config.json": '{"r": 8}', "adapter_model.safetensors": "one"}
    assert sql["path"] == again["path"]
    assert Path(sql["path"]).name == sha_of(FIRST), "a directory named by commit: what it holds never changes"
    assert v2["files"]["adapter_model.safetensors"] == "two"
    assert bin_only["files"] == {"adapter_config.json": '{"r": 8}', "adapter_model.bin": "pickle"}
    assert set(sharded["files"]) == set(SHARDED) - {"model.safetensors"}
    assert not any("README" in request or "optimizer" in request for request in hub.requests)
    assert client.stderr == "", "no progress bars in a server's log"


def test_a_folder_of_a_repository(hub: Hub, client: Client) -> None:
    """Its files alone are fetched, and belong to the repository's part of the cache."""
    sql, two, missing = client.fetch(
        hub, "hf://org/many/all/sql", "hf://org/many/all/two@main", "hf://org/many/all/three", roots=[]
    )
    assert sql["files"] == {"adapter_config.json": '{"r": 8}', "adapter_model.safetensors": "one"}
    assert two["files"]["adapter_model.safetensors"] == "two"
    assert (missing["error"], "no adapter_config.json" in missing["message"]) == ("AdapterPathNotFoundError", True)
    assert not any("README" in request for request in hub.requests)
    snapshot = hub_snapshot_of(Path(sql["path"]))
    assert snapshot is not None
    assert (snapshot.name, snapshot / "all/sql") == (sha_of(REPOS["org/many"]["main"]), Path(sql["path"]))
    folder = hub_folder_of(Path(sql["path"]))
    assert folder is not None
    assert folder.name == "models--org--many"
    record = VersionRecord(1, 1, "", "/other" + sql["path"], "hf://org/many/all/sql", "", 1, 8, False, 0.0)
    assert AdapterSource().locate(record, may_fetch=False) is None


def test_what_the_hub_lists_is_counted_before_a_byte_is_read(hub: Hub, client: Client) -> None:
    """Of the adapter's folder alone: a repository may have a million files elsewhere."""
    hub.sizes = {"adapter_model.safetensors": 1000, "adapter_config.json": 2**20 + 1, "adapter_model.bin": 10**9}
    too_long, too_many = client.fetch(hub, "hf://org/sql", "hf://org/crowd/beside")
    assert too_long["error"] == "AdapterFileFormatError"
    assert "adapter_config.json has 1048577 bytes" in too_long["message"]
    assert too_many["error"] == "AdapterFileFormatError"
    assert "more than 1000 files and folders beside it" in too_many["message"]
    hub.sizes = {"adapter_model.safetensors": 993}
    (too_large,) = client.fetch(hub, "hf://org/sql")
    assert too_large["error"] == "AdapterTooLargeError"
    assert "has 1001 bytes, and at most 1000 are fetched" in too_large["message"]
    assert not [request for request in hub.requests if "/resolve/" in request]
    hub.sizes = {}
    (fetched,) = client.fetch(hub, "hf://org/crowd/alone")
    assert fetched["files"]["adapter_model.safetensors"] == "one"


def test_a_client_is_not_told_where_an_adapter_is_fetched_from(hub: Hub, client: Client) -> None:
    """It has named an adapter of a source, and neither repository nor revision."""
    answers = client.fetch(hub, "hf://org/nothing", "hf://org/sql@v9", "hf://org/model", called="hub/sql")
    hub.status = 500
    answers += client.fetch(hub, "hf://org/sql", "s3://bucket.of.org/sql", called="hub/sql", AWS_ENDPOINT_URL=hub.url)
    hub.status, hub.delay_s = None, 5.0
    answers += client.fetch(hub, "hf://org/sql", called="hub/sql", timeout_s=0.3)
    assert all("adapter 'hub/sql'" in answer["message"] for answer in answers), answers
    assert not any("org" in answer["message"].replace("'hub/sql'", "") for answer in answers), answers


def test_a_revision_argument_and_roots(hub: Hub, client: Client) -> None:
    (answer,) = client.fetch(hub, "org/sql", revision="v2", roots=[str(client.cache.parent / "adapters")])
    assert answer["files"]["adapter_model.safetensors"] == "two"


def test_what_the_hub_does_not_have(hub: Hub, client: Client) -> None:
    answers = client.fetch(
        hub, "org/nothing", "hf://org/sql@v9", "hf://no-slash", "hf://../../etc/passwd", "hf://a/b/../c"
    )
    assert {answer["error"] for answer in answers} == {"AdapterPathNotFoundError"}
    assert "'org/nothing'" in answers[0]["message"]
    assert "revision" in answers[1]["message"]
    assert all("no hub repository" in answer["message"] for answer in answers[2:4])
    assert "no folder of a repository" in answers[4]["message"]
    assert isinstance(error_from_payload(answers[0]), AdapterPathNotFoundError)


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (401, "GatedRepo", "AdapterPermissionError"),
        (403, "", "AdapterPermissionError"),
        (401, "RepoNotFound", "AdapterPathNotFoundError"),
        (500, "", "AdapterFetchError"),
        (404, "", "AdapterFetchError"),
    ],
)
def test_each_failure_of_the_hub_is_told_apart(hub: Hub, client: Client, status: int, code: str, error: str) -> None:
    hub.status, hub.error_code = status, code
    (answer,) = client.fetch(hub, "org/sql")
    assert answer["error"] == error, answer["message"]
    assert "'org/sql'" in answer["message"]


def test_a_repository_that_is_no_adapter(hub: Hub, client: Client) -> None:
    (answer,) = client.fetch(hub, "org/model")
    assert answer["error"] == "AdapterConfigMissingError"
    assert "no adapter_config.json" in answer["message"]


def test_what_a_hub_calls_a_file_is_no_path(hub: Hub, client: Client, tmp_path: Path) -> None:
    """The library keeps a file under the ETag that the hub says."""
    hub.etag = f'"{"../" * 20}{str(tmp_path / "escaped").lstrip("/")}"'
    (answer,) = client.fetch(hub, "org/sql")
    assert answer["error"] == "AdapterFetchError"
    assert "HubAnswerError" in answer["message"]
    assert not (tmp_path / "escaped").exists()


def test_what_a_hub_says_of_an_adapter_is_bounded(hub: Hub, client: Client) -> None:
    """Bytes as they come, none that are to be decompressed, and pages of a list."""
    hub.list_body = b" " * (40 << 20)
    (too_long,) = client.fetch(hub, "org/sql")
    hub.list_body, hub.list_headers = gzip.compress(bytes(1 << 20)), {"Content-Encoding": "gzip"}
    (compressed,) = client.fetch(hub, "org/sql")
    hub.list_body, hub.list_headers = b"[]", {"Link": f'<{hub.url}/api/models/org/sql/tree/main>; rel="next"'}
    (endless,) = client.fetch(hub, "org/sql")
    hub.list_body, hub.list_headers = b"[" + b"1," * (1 << 18) + b"1]", {}
    (many_values,) = client.fetch(hub, "org/sql")
    hub.list_body = b"[" + b"1e5," * 2000 + b"1]"
    (slow_numbers,) = client.fetch(hub, "org/sql")
    hub.list_body = b"[" * 100_000
    (deep,) = client.fetch(hub, "org/sql")
    assert deep["error"] == "AdapterFetchError"
    for answer in (too_long, compressed, endless, many_values, slow_numbers):
        assert answer["error"] == "AdapterFetchError"
        assert "HubAnswerError" in answer["message"]
    assert len(hub.requests) < 4 * MAX_REQUESTS


def test_what_a_hub_redirects_to_is_bounded(hub: Hub, client: Client) -> None:
    """A list that came from a path without `/api/` was read whole: 3.8 GB of memory for 1.2 GB sent."""
    with Hub(REPOS) as other:
        other.file_body = b" " * (40 << 20)
        hub.list_redirect = f"{other.url}/org/sql/resolve/main/adapter_config.json"
        (answer,) = client.fetch(hub, "org/sql")
    assert "HubAnswerError" in answer["message"]


@pytest.mark.parametrize("status", [200, 500])
def test_a_file_has_the_bytes_that_the_hub_listed(hub: Hub, client: Client, tmp_path: Path, status: int) -> None:
    """And an error none of a file's: it was read whole, for its message."""
    hub.file_status, hub.file_body = status, b" " * (40 << 20)
    (answer,) = client.fetch(hub, "org/sql")
    assert answer["error"] == "AdapterFetchError"
    assert "HubAnswerError" in answer["message"]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 1 << 20


def test_xet_is_not_asked(hub: Hub, client: Client) -> None:
    """Its client is none of Python's: it sent the token to any host that an answer named, and no bound held there."""
    with Hub(REPOS) as other:
        refresh = f"{other.url.replace('127.0.0.1', 'localhost')}/refresh"
        hub.file_headers = {"X-Xet-Hash": "d" * 64, "X-Xet-Refresh-Route": refresh}
        (answer,) = client.fetch(hub, "org/sql", HF_TOKEN="hf_secret", HF_HUB_DISABLE_XET="0")
        assert "error" not in answer
        assert other.requests == []


@pytest.mark.parametrize(
    "headers", [{"Retry-After": "86400"}, {"Retry-After": "+9999999999"}, {"RateLimit": '"api";r=0;t=86400'}]
)
def test_a_hub_that_asks_for_a_long_pause_is_not_waited_for(hub: Hub, client: Client, headers: dict[str, str]) -> None:
    """The library slept for a day, and the fetch kept its place among those that run."""
    hub.status, hub.headers = 429, headers
    (answer,) = client.fetch(hub, "org/sql", timeout_s=20.0)
    assert answer["error"] == "AdapterFetchError"
    assert "HubAnswerError" in answer["message"]
    assert len(hub.requests) == 1


def run_child(hub: Hub, cache: Path, code: str) -> None:
    """In a process of its own, as `Client` does."""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert done.returncode == 0, done.stderr


def test_a_fetch_ends_with_its_deadline(hub: Hub, tmp_path: Path) -> None:
    """The library asks for a list without any timeout: a hub that does not answer kept the place for ever."""
    hub.list_delay_s = 30.0
    code = (
        "import os, sys, threading, time; from pathlib import Path\n"
        "from loraplex.adapters.source import AdapterSource\n"
        "from loraplex.errors import AdapterFetchTimeoutError\n"
        "try: AdapterSource(None, Path(os.environ['HF_HOME']), 1.5).fetch('hf://org/sql')\n"
        "except AdapterFetchTimeoutError: pass\n"
        "else: sys.exit('it was fetched')\n"
        "end = time.monotonic() + 15\n"
        "while any(each.name.startswith('fetch') for each in threading.enumerate()):\n"
        "    assert time.monotonic() < end, 'it goes on'\n"
        "    time.sleep(0.05)\n"
    )
    run_child(hub, tmp_path, code)


def test_a_fetch_that_meets_a_dead_address_ends_no_other_one(hub: Hub, tmp_path: Path) -> None:
    """The library closes the client of all then, in the middle of what others read."""
    code = (
        "import os; from loraplex.adapters.remote.hub_client import guard_client\n"
        "from huggingface_hub.utils import close_session, get_session\n"
        "guard_client()\n"
        "client, url = get_session(), os.environ['HF_ENDPOINT'] + '/org/sql/resolve/main/README.md'\n"
        "with client.stream('GET', url) as answer:\n"
        "    close_session()\n"
        "    assert answer.read() == b'hello'\n"
        "assert client.get(url).content == b'hello'\n"
        "assert get_session() is not client\n"
    )
    run_child(hub, tmp_path, code)


def test_a_token_goes_to_no_other_host(hub: Hub, client: Client) -> None:
    with Hub(REPOS) as other:
        elsewhere = other.url.replace("127.0.0.1", "localhost")
        hub.list_body, hub.list_headers = b"[]", {"Link": f'<{elsewhere}/api/models/org/sql/tree/main>; rel="next"'}
        client.fetch(hub, "org/sql", HF_TOKEN="hf_secret")
        assert "Bearer hf_secret" in hub.tokens
        assert other.tokens[:1] == [None]


def test_a_token_goes_to_no_other_port(hub: Hub, client: Client) -> None:
    with Hub(REPOS) as other:
        hub.list_body, hub.list_headers = b"[]", {"Link": f'<{other.url}/api/models/org/sql/tree/main>; rel="next"'}
        client.fetch(hub, "org/sql", HF_TOKEN="hf_secret")
        assert other.tokens[:1] == [None]


def test_without_huggingface_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(AdapterFetchError, match="huggingface_hub is not installed"):
        AdapterSource().fetch("hf://org/sql")
    with pytest.raises(AdapterPathNotFoundError, match="no such directory"):
        AdapterSource().fetch("org/sql")


def test_a_slow_hub_times_out(hub: Hub, client: Client) -> None:
    hub.delay_s = 5.0
    (answer,) = client.fetch(hub, "org/sql", timeout_s=0.3)
    assert answer["error"] == "AdapterFetchTimeoutError"
    assert "no such directory here, and the hub did not deliver it within 0.3 s" in answer["message"]


def test_offline_serves_the_cache_and_says_what_is_missing(hub: Hub, client: Client) -> None:
    (online,) = client.fetch(hub, "org/sql")
    cached, explicit, missing = client.fetch(hub, "org/sql", "hf://org/bin", "org/bin", HF_HUB_OFFLINE="1")
    assert cached == online
    assert explicit["error"] == "AdapterFetchError"
    assert missing["error"] == "AdapterPathNotFoundError"
    assert all("HF_HUB_OFFLINE" in answer["message"] for answer in (explicit, missing))


def test_an_unreachable_hub(hub: Hub, client: Client) -> None:
    """`org/name` may have been meant as a directory."""
    answers = client.fetch(hub, "org/sql", "hf://org/sql", HF_ENDPOINT="http://127.0.0.1:9")
    assert {answer["error"] for answer in answers} == {"AdapterFetchError"}
    assert all("the hub cannot be reached" in answer["message"] for answer in answers)
    assert ["no such directory here" in answer["message"] for answer in answers] == [True, False]


def test_local_paths_import_no_hub(root: Path) -> None:
    code = f"import sys; from loraplex.adapters.source import AdapterSource as S; S().fetch({str(root / 'sql')!r}); "
    code += "sys.exit(any(name.startswith(('huggingface_hub', 'torch')) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_errors_of_fetching_are_load_errors() -> None:
    assert AdapterFetchError.http_status == 502
    assert AdapterFetchTimeoutError.http_status == 504


@pytest.mark.parametrize("given", ["gs://bucket/adapter", "http://example.org/adapter", "file:///adapter"])
def test_sources_of_other_kinds_are_refused_as_such(given: str) -> None:
    with pytest.raises(AdapterPathNotFoundError, match="this kind of source is not supported"):
        AdapterSource().fetch(given)


def test_a_repository_is_fetched_once_at_a_time(tmp_path: Path) -> None:
    """Those that wait for it leave no thread behind, and one that was given up counts until it has ended."""
    fetches, go_on, running = Fetches(), threading.Event(), list[str]()

    def work() -> Path:
        running.append("fetch")
        assert go_on.wait(30)
        return tmp_path

    for _ in range(3):
        with pytest.raises(TimeoutError):
            fetches.run(tmp_path / "a", work, 0.05)
    assert running == ["fetch"]
    with pytest.raises(KeyError):
        fetches.run(tmp_path / "b", lambda: Path({}["other repositories wait for none"]), 30.0)
    go_on.set()
    assert fetches.run(tmp_path / "a", work, 30.0) == tmp_path
    assert running == ["fetch"] * 2


def test_fetches_at_a_time_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_fetches, "MAX_FETCHES", 2)
    fetches, go_on = Fetches(), threading.Event()

    def hang() -> Path:
        go_on.wait(30)
        return tmp_path

    for name in "ab":
        with pytest.raises(TimeoutError):
            fetches.run(tmp_path / name, hang, 0.05)
    started: list[str] = []
    with pytest.raises(TimeoutError):
        fetches.run(tmp_path / "c", lambda: tmp_path / str(started.append("c")), 0.05)
    assert started == []
    go_on.set()
    assert fetches.run(tmp_path / "c", lambda: tmp_path, 30.0) == tmp_path
