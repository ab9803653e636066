"""Where the load routes may read: directories, symbolic links, hub ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.errors import AdapterPathForbiddenError, AdapterPathNotFoundError, ConfigError
from loraplex.server import ServerConfig, create_app
from loraplex.server.adapter_roots import AdapterRoots
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one adapter, one that is a link to the outside, one with a file that is, and something outside."""
    for name in ("root/good", "root/mixed", "outside", "root/org/name"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    (tmp_path / "root/inner").symlink_to(tmp_path / "root/good")
    (tmp_path / "root/mixed/adapter_model.safetensors").symlink_to(tmp_path / "outside/adapter_config.json")
    (tmp_path / "root/loop").symlink_to(tmp_path / "root/loop")
    (tmp_path / "rootless").mkdir()
    return tmp_path / "root"


def roots(*allowed: object, host: str = "0.0.0.0") -> AdapterRoots:
    return AdapterRoots.of(ServerConfig(host=host, adapter_roots=tuple(map(str, allowed)) or None))


@pytest.mark.parametrize("name", ["good", "inner", "good/", "./good/../good", "missing"])
def test_inside(root: Path, name: str) -> None:
    """A missing directory inside is the loader's to report."""
    roots(root).check(f"{root}/{name}")


def test_the_root_itself(root: Path) -> None:
    """What else lies in it does not matter, links to the outside included; its own files do."""
    roots(root).check(str(root))
    (root / "adapter_model-2.safetensors").symlink_to(root.parent / "outside")
    with pytest.raises(AdapterPathForbiddenError, match=r"its adapter_model-2.safetensors leads outside what .* only "):
        roots(root).check(str(root))


@pytest.mark.parametrize(
    "name", ["link", "mixed", "..", "../outside", "../rootless", "good/../../outside", "loop", "a\0b"]
)
def test_outside(root: Path, name: str) -> None:
    with pytest.raises(AdapterPathForbiddenError):
        roots(root).check(f"{root}/{name}")


@pytest.mark.parametrize("path", ["/etc", "~", "org/name", "hf://org/name", ""])
def test_nothing_may_be_read_beyond_loopback_without_a_root(path: str) -> None:
    with pytest.raises(AdapterPathForbiddenError, match="--adapter-root"):
        roots().check(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_anything_may_be_read_on_loopback(host: str) -> None:
    for path in ("/etc", "org/name", "hf://org/name"):
        roots(host=host).check(path)


def test_a_root_binds_loopback_too(root: Path) -> None:
    with pytest.raises(AdapterPathForbiddenError):
        roots(root, host="127.0.0.1").check("/etc")


def test_hub_ids(root: Path) -> None:
    anything, one = roots(root, "hf://"), roots(root, "hf://org")
    for path in ("hf://org/name", "hf://org/name@main", "org/name", "org/name@v1"):
        anything.check(path)
        one.check(path)
        with pytest.raises(AdapterPathForbiddenError):
            roots(root).check(path)
    anything.check("hf://other/name")
    for path in ("hf://other/name", "other/name", "hf://organ/name", "/etc"):
        with pytest.raises(AdapterPathForbiddenError):
            one.check(path)


def test_an_id_that_is_a_directory_inside_is_that_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    roots(root).check("org/name")


@pytest.mark.parametrize("url", ["/v1/load_lora_adapter", "/v1/adapters", "/v1/adapters/switch"])
async def test_every_route_that_takes_a_path_checks_it(root: Path, url: str) -> None:
    engine = FakeAsyncEngine({"old": "/old"})
    app = create_app(engine, ServerConfig(adapter_roots=(str(root),)))
    bodies = {
        "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/etc"},
        "/v1/adapters": {"name": "x", "path": "/etc"},
        "/v1/adapters/switch": {"old": "old", "new": "x", "new_path": "/etc"},
    }
    async with client_of(app) as client:
        response = await client.post(url, json=bodies[url])
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "adapter_path_forbidden"
        assert not engine.has_adapter("x")
        good = {key: f"{root}/good" if value == "/etc" else value for key, value in bodies[url].items()}
        assert (await client.post(url, json=good)).status_code == 200


def test_object_stores(root: Path) -> None:
    one, anything = roots(root, "s3://bucket/team"), roots(host="127.0.0.1")
    for path in ("s3://bucket/team", "s3://bucket/team/a", "s3://bucket/team/a/"):
        one.check(path)
        anything.check(path)
        for other in (roots(), roots(root), roots(root, "hf://")):
            with pytest.raises(AdapterPathForbiddenError, match="outside what this server may load"):
                other.check(path)
    for path in ("s3://bucket/team2/a", "s3://bucket", "s3://other/team/a"):
        with pytest.raises(AdapterPathForbiddenError, match="only what its operator chose"):
            one.check(path)
    for path in ("s3://bucket/team/../other", "s3://bucket/team//a", "s3://bucket/team/%2e%2e"):
        with pytest.raises(AdapterPathNotFoundError, match="no place in an object store") as caught:
            one.check(path, "new_path")
        assert caught.value.param == "new_path"
    one.check(str(root / "good"))


@pytest.mark.parametrize("bad", ["s3://", "s3://Bucket", "s3://bucket/../x"])
def test_a_root_that_is_no_place_in_an_object_store_is_refused_at_the_start(bad: str) -> None:
    with pytest.raises(ConfigError, match="which is no place in an object store"):
        ServerConfig(adapter_roots=(bad,))
