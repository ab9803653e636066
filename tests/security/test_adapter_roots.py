"""Attempts to leave what the server may load: by hub ids, links and the hub's cache, or to learn where things lie."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from loraplex.adapters.remote import hub as remote_hub
from loraplex.adapters.remote.hub import HubAdapter
from loraplex.adapters.source import AdapterSource
from loraplex.demo.tasks import TASKS, adapter_path
from loraplex.errors import (
    AdapterFetchError,
    AdapterFileFormatError,
    AdapterLoadError,
    AdapterPathForbiddenError,
    AdapterPathNotFoundError,
)
from loraplex.server import ServerConfig, create_app
from loraplex.server.adapter_roots import AdapterRoots
from loraplex.testing import FakeAsyncEngine
from tests.security.demo_reader import demo_opener
from tests.server.conftest import client_of

ADAPTER = adapter_path(TASKS[0].name)

BAD_REVISIONS = [
    "",
    "/../../x",
    "../../../outside",
    "main/../../../../outside",
    "..",
    ".",
    "a..b",
    "./main",
    "a/./b",
    "a/.hidden",
    "/etc",
    "a//b",
    "main/",
    "main.",
    "main.lock",
    "a.lock/b",
    "..\\..\\outside",
    "a\\b",
    "C:x",
    "main\n",
    "main\0",
    "ma in",
    "m\u200bain",
    "m\u0430in",
    "~x",
    "%2e%2e",
    "a@b",
    "a?b",
    "a:b",
    "-x",
    "refs",
    "refs/heads/main",
    "refs/pr/x",
    "refs/pr/1/../..",
    "refs/../x",
    "x" * 129,
]
GOOD_REVISIONS = ["main", "v1.0", "feature/x_1", "a" * 40, "a1b2c3d", "refs/pr/12", "2024-01-01", "x" * 128]


class Hub:
    """In the place of what asks the hub for a list: remembers what it was asked for. `snapshot` has all of it."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot = snapshot
        self.asked: list[tuple[str, str | None]] = []

    def __call__(self, adapter: HubAdapter) -> tuple[str, dict[str, int]]:
        self.asked.append((adapter.repo, adapter.revision))
        return self.snapshot.name, {"adapter_config.json": 1, "adapter_model.safetensors": 1}

    def lead_to(self, target: Path) -> None:
        shutil.rmtree(self.snapshot)
        self.snapshot.symlink_to(target)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The hub's cache with one snapshot as the library makes it: links to blobs."""
    cache = tmp_path / "operators-cache"
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in ADAPTER.iterdir():
        shutil.copy(file, repository / "blobs" / f"blob-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    return cache


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(cache / "models--org--name" / "snapshots" / ("a" * 40))
    monkeypatch.setattr(remote_hub, "_listed", hub)
    monkeypatch.setattr(remote_hub, "_download", lambda *asked: None)
    return hub


# ----------------------------------------------------------------------------------------------------- names, revisions


@pytest.mark.parametrize("revision", BAD_REVISIONS)
@pytest.mark.parametrize("prefix", ["hf://", ""])
def test_a_revision_that_is_none_is_refused_before_the_hub_or_the_disk(
    hub: Hub, cache: Path, prefix: str, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: pytest.fail("the disk was asked"))
    with pytest.raises(
        AdapterPathNotFoundError, match="is no revision; give a branch, a tag, a commit hash or refs/pr/N"
    ):
        AdapterSource(hub_cache=cache).fetch(f"{prefix}org/name@{revision}")
    with pytest.raises(AdapterPathNotFoundError, match="is no revision"):
        AdapterRoots.of(ServerConfig(adapter_roots=("hf://",))).check(f"{prefix}org/name@{revision}")
    assert hub.asked == []


@pytest.mark.parametrize("revision", BAD_REVISIONS)
def test_a_revision_given_apart_is_checked_too(hub: Hub, cache: Path, revision: str) -> None:
    with pytest.raises(AdapterPathNotFoundError, match="is no revision"):
        AdapterSource(hub_cache=cache).fetch("hf://org/name", revision)
    assert hub.asked == []


@pytest.mark.parametrize("revision", GOOD_REVISIONS)
def test_branches_tags_hashes_and_pull_requests_are_asked_for_as_they_are(hub: Hub, cache: Path, revision: str) -> None:
    AdapterRoots.of(ServerConfig(adapter_roots=("hf://org",))).check(f"hf://org/name@{revision}")
    source = AdapterSource(allowed_roots=(), hub_cache=cache)
    assert source.fetch(f"hf://org/name@{revision}") == hub.snapshot.resolve()
    assert source.fetch("org/name", revision) == hub.snapshot.resolve()
    assert hub.asked == [("org/name", revision)] * 2


@pytest.mark.parametrize(
    "repo",
    [
        "..",
        "../..",
        "a/..",
        "../b",
        "a",
        "/b",
        "a/",
        "-a/b",
        "a/.b",
        "a..b/c",
        "a--b/c",
        "a/b.git",
        "a/b\n",
        "a\\b/c",
        "a b/c",
        "\u0430/b",
        "a/b\x00",
        "models--org--name",
        "x" * 90 + "/yyyyyyy",
        "",
    ],
)
def test_a_repository_that_is_none_is_refused(hub: Hub, cache: Path, repo: str) -> None:
    with pytest.raises(AdapterPathNotFoundError, match="is no hub repository"):
        AdapterSource(hub_cache=cache).fetch(f"hf://{repo}")
    with pytest.raises(AdapterPathNotFoundError, match="is no hub repository"):
        AdapterRoots.of(ServerConfig(adapter_roots=("hf://",))).check(f"hf://{repo}@main")
    assert hub.asked == []


@pytest.mark.parametrize(
    "folder", ["..", "../c", "c/../d", ".c", "c/", "c//d", "\u0430", "c\0", "c\\d", "x" * 257, "-c"]
)
def test_a_folder_that_leads_elsewhere_is_refused(hub: Hub, cache: Path, folder: str) -> None:
    with pytest.raises(AdapterPathNotFoundError, match="is no folder of a repository"):
        AdapterSource(hub_cache=cache).fetch(f"hf://a/b/{folder}")
    assert hub.asked == []


@pytest.mark.parametrize("path", ["/srv/a@b", "./org/name@v1", "org", "a/b/c@v1", "~/a/b", "../org/name", "C:\\x\\y"])
def test_what_can_only_be_a_path_is_no_hub_id(path: str) -> None:
    assert HubAdapter.parse(path) is None


# ------------------------------------------------------------------------------------------------------------ the cache


@pytest.mark.parametrize("target", ["outside", "operators-cache", "operators-cache/../outside"])
def test_what_the_hub_returns_outside_its_cache_is_not_read(hub: Hub, cache: Path, target: str) -> None:
    shutil.copytree(ADAPTER, cache.parent / "outside")
    hub.lead_to(cache.parent / target)
    with pytest.raises(AdapterPathForbiddenError, match="do not all lie in the hub's cache"):
        AdapterSource(hub_cache=cache).fetch("hf://org/name")


def test_another_repository_in_the_cache_is_not_read(hub: Hub, cache: Path) -> None:
    """A root of `hf://org` is of that organisation: a reference or link in its part of the cache leads to no other."""
    other = cache / "models--other--secret" / "snapshots" / ("b" * 40)
    shutil.copytree(hub.snapshot, other, symlinks=False)
    hub.lead_to(other)
    with pytest.raises(AdapterPathForbiddenError, match="do not all lie in the hub's cache"):
        AdapterSource(hub_cache=cache).fetch("hf://org/name")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model-1.safetensors"])
def test_a_file_of_a_snapshot_that_leaves_the_cache_is_not_read(hub: Hub, cache: Path, name: str) -> None:
    (cache.parent / "secret").write_text('{"token": "hunter2"}')
    (hub.snapshot / name).unlink(missing_ok=True)
    (hub.snapshot / name).symlink_to(cache.parent / "secret")
    with pytest.raises(AdapterPathForbiddenError) as caught:
        AdapterSource(hub_cache=cache).fetch("hf://org/name")
    assert "hunter2" not in caught.value.message
    assert str(cache.parent) not in caught.value.message


def test_the_library_itself_offline_with_a_ref_that_leads_outside(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It joins the content of a file, which the revision names, to the folder of snapshots."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    shutil.copytree(ADAPTER, cache.parent / "outside")
    refs = cache / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("../../../outside")
    (cache.parent / "climb").write_text("../../../outside")
    for revision, error in (("main", AdapterLoadError), ("../../../climb", AdapterPathNotFoundError)):
        with pytest.raises(error) as caught:
            AdapterSource(hub_cache=cache).fetch(f"hf://org/name@{revision}")
        assert str(cache.parent) not in caught.value.message
    (refs / "main").write_text("a" * 40)
    found = AdapterSource(hub_cache=cache).fetch("hf://org/name@main")
    assert found == (cache / "models--org--name" / "snapshots" / ("a" * 40)).resolve()


@pytest.mark.parametrize("revision", [None, "feature/x"])
@pytest.mark.parametrize(
    "put",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(__file__),
        lambda path: (path.touch(), os.truncate(path, 2**40)),
    ],
    ids=["FIFO", "directory", "device", "link", "huge"],
)
def test_a_reference_that_is_no_small_file_is_not_given_to_the_library(
    hub: Hub, cache: Path, put: Callable[[Path], Any], revision: str | None
) -> None:
    """It would wait for the other end of a FIFO, and hold the load until its timeout."""
    reference = cache / "models--org--name" / "refs" / (revision or "main")
    reference.parent.mkdir(parents=True)
    put(reference)
    with pytest.raises(AdapterFetchError, match="its reference in the hub's cache is no small file") as caught:
        AdapterSource(hub_cache=cache).fetch("hf://org/name", revision)
    assert str(cache.parent) not in caught.value.message
    assert hub.asked == []
    reference.rmdir() if reference.is_dir() else reference.unlink()
    reference.write_text("a" * 40)
    AdapterSource(hub_cache=cache).fetch("hf://org/name", revision)
    assert hub.asked == [("org/name", revision)]


# ----------------------------------------------------------------------------------------------------------- the routes

ROUTES: dict[str, Callable[[str], tuple[str, str, dict[str, Any]]]] = {
    "vllm": lambda path: ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path}),
    "load": lambda path: ("POST", "/v1/adapters", {"name": "x", "path": path}),
    "put": lambda path: ("PUT", "/v1/adapters/x", {"path": path}),
    "put known": lambda path: ("PUT", "/v1/adapters/old", {"path": path}),
    "switch": lambda path: ("POST", "/v1/adapters/switch", {"old": "old", "new": "x", "new_path": path}),
}


@pytest.mark.parametrize("route", ROUTES)
async def test_no_route_lets_a_hub_id_or_a_path_escape(tmp_path: Path, route: str, hub: Hub) -> None:
    root, other_root = tmp_path / "root", tmp_path / "never-sent"
    root.mkdir()
    shutil.copytree(ADAPTER, tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    engine = FakeAsyncEngine({"old": "/old"})
    app = create_app(engine, ServerConfig(adapter_roots=(str(root), str(other_root), "hf://org")))
    async with client_of(app) as client:
        for path in (
            "hf://org/name@../../../outside",
            "org/name@/../../x",
            "hf://other/name",
            "other/name",
            f"{root}/../outside",
            f"{root}/link",
            "/etc",
            "~root",
            "hf://../..",
            "x" * 4000,
        ):
            method, url, body = ROUTES[route](path)
            response = await client.request(method, url, json=body)
            assert response.status_code in (400, 404), path
            error = response.json()["error"]
            assert error["param"] in ("path", "lora_path", "new_path")
            assert "never-sent" not in error["message"]
            assert len(error["message"]) < 600
            assert not engine.has_adapter("x")
    assert hub.asked == []


# ----------------------------------------------------------------------------------------------- what messages disclose

BROKEN: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: [file.unlink() for file in path.iterdir()],
    "no weights": lambda path: (path / "adapter_model.safetensors").unlink(),
    "no config": lambda path: (path / "adapter_config.json").unlink(),
    "config is a directory": lambda path: (
        (path / "adapter_config.json").unlink(),
        (path / "adapter_config.json").mkdir(),
    ),
    "config of no JSON": lambda path: (path / "adapter_config.json").write_text("{"),
    "config of a list": lambda path: (path / "adapter_config.json").write_text(
        '["hunter2-hunter2-hunter2-hunter2-hunter2"]'
    ),
    "a FIFO": lambda path: (
        (path / "adapter_model.safetensors").unlink(),
        os.mkfifo(path / "adapter_model.safetensors"),
    ),
    "a dangling link": lambda path: (
        (path / "adapter_model.safetensors").unlink(),
        (path / "adapter_model.safetensors").symlink_to(path / "gone"),
    ),
    "a loop": lambda path: (
        (path / "adapter_config.json").unlink(),
        (path / "adapter_config.json").symlink_to(path / "adapter_config.json"),
    ),
    "truncated": lambda path: os.truncate(path / "adapter_model.safetensors", 100),
    "a file": lambda path: (shutil.rmtree(path), path.write_text("x")),
    "missing": shutil.rmtree,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_messages_have_no_path_but_the_one_that_was_sent(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~/a` is sent; where home is, and where its link leads, is not told."""
    home, store = tmp_path / "home-of-the-operator", tmp_path / "store-of-the-operator"
    home.mkdir()
    shutil.copytree(ADAPTER, store / "a")
    (home / "a").symlink_to(store / "a")
    BROKEN[fault](store / "a")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    opener = demo_opener(AdapterSource(allowed_roots=(store,)))
    for given in ("~/a", "a", "./a"):
        with pytest.raises(AdapterLoadError) as caught:
            opener.open(given)
        message = caught.value.message
        assert "of-the-operator" not in message
        assert str(tmp_path) not in message
        assert repr(given) in message
        assert "hunter2-hunter2-hunter2-hunter2-hunter2" not in message


def test_the_log_says_where_the_roots_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(AdapterPathForbiddenError) as caught:
        AdapterRoots.of(ServerConfig(adapter_roots=(str(tmp_path),))).check("/etc")
    assert str(tmp_path) not in caught.value.message
    assert str(tmp_path) in caplog.text


# ----------------------------------------------------------------------------------------------------------- what held


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model-7.safetensors"])
@pytest.mark.parametrize("how", ["absolute", "relative", "chain"])
def test_files_that_link_out_of_a_root_are_refused_everywhere(tmp_path: Path, name: str, how: str) -> None:
    root = tmp_path / "root"
    path = Path(shutil.copytree(ADAPTER, root / "a"))
    shutil.copytree(ADAPTER, tmp_path / "outside")
    (tmp_path / "outside" / "adapter_model-7.safetensors").write_bytes(b"x")
    target = tmp_path / "outside" / name if how == "absolute" else Path("../../outside") / name
    if how == "chain":
        (path / "step").symlink_to(target)
        target = Path("step")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(target)
    with pytest.raises(AdapterPathForbiddenError):
        AdapterRoots.of(ServerConfig(adapter_roots=(str(root),))).check(str(path))
    with pytest.raises(AdapterPathForbiddenError):
        AdapterSource(allowed_roots=(root,)).fetch(str(path))


def test_a_directory_of_very_many_files_is_not_walked(tmp_path: Path) -> None:
    path = Path(shutil.copytree(ADAPTER, tmp_path / "a"))
    for index in range(1100):
        (path / f"s{index}.safetensors").touch()
    with pytest.raises(AdapterFileFormatError, match=r"more than 1024 \.safetensors files"):
        AdapterSource(allowed_roots=(tmp_path,)).fetch(str(path))
