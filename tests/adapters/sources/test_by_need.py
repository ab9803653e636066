"""Loads by need: what they fetch lies in a bounded folder, and messages name adapters as clients do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loraplex.adapters.registry import LoRARegistry
from loraplex.adapters.remote import hub
from loraplex.adapters.remote.fetched import FetchedFiles
from loraplex.adapters.remote.hub import HubAdapter
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.sources.by_need import LoadsByNeed, NeededAdapter
from loraplex.demo.tasks import adapter_path
from loraplex.errors import AdapterNoRoomError, LoraplexError, TenantLimitError
from tests.adapters.fake_store import FakeStore
from tests.security.demo_reader import demo_opener

COMMIT = "a" * 40


def files_of(adapter: HubAdapter) -> Path:
    return Path(adapter_path(adapter.folder or adapter.repo.partition("/")[2]))


@pytest.fixture(autouse=True)
def demo_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that has each demonstration adapter as org/NAME, and as a folder of any repository."""

    def download(adapter: HubAdapter, root: Path, commit: str, names: list[str], timeout_s: float) -> None:
        directory = root / f"models--{adapter.repo.replace('/', '--')}" / "snapshots" / commit / adapter.folder
        if not directory.exists():
            shutil.copytree(files_of(adapter), directory)

    def listed(adapter: HubAdapter) -> tuple[str, dict[str, int]]:
        return COMMIT, {file.name: file.stat().st_size for file in files_of(adapter).iterdir()}

    monkeypatch.setattr(hub, "_listed", listed)
    monkeypatch.setattr(hub, "_download", download)


class Loads:
    def __init__(self, folder: Path, max_bytes: int) -> None:
        opener = demo_opener(AdapterSource(()))
        self.registry = LoRARegistry(FakeStore(), opener.open, run_later=lambda job: job())
        self.by_need = LoadsByNeed(FetchedFiles(folder, max_bytes), opener)

    def load(self, name: str, path: str, *leaving: str) -> None:
        names = list(leaving)

        def evict(*_: object) -> bool:
            return bool(names) and self.registry.unload(names.pop()).is_drained

        self.by_need.load(self.registry, NeededAdapter(name, path, f"hub/{name}", "hub"), evict)


@pytest.fixture
def loads(tmp_path: Path) -> Loads:
    names = "upper", "reverse", "rot13"
    sizes = [sum(file.stat().st_size for file in Path(adapter_path(name)).iterdir()) for name in names]
    return Loads(tmp_path / "fetched", sum(sorted(sizes)[1:]) + sizes[0] // 4)


def test_what_is_fetched_makes_room_for_what_is_needed(loads: Loads, tmp_path: Path) -> None:
    """First files that no name has; then names leave."""
    loads.load("upper", "hf://org/upper")
    spec = loads.registry.spec_of(loads.registry.resolve("upper"))
    assert spec.path == str(tmp_path / f"fetched/models--org--upper/snapshots/{COMMIT}")
    assert loads.registry.loaded_from("source:hub")[0].path == spec.path
    loads.load("reverse", "hf://org/reverse")
    with pytest.raises(AdapterNoRoomError, match="adapter 'hub/rot13' is not fetched"):
        loads.load("rot13", "hf://org/rot13")
    assert Path(spec.path).exists()
    loads.registry.unload("upper")
    assert Path(spec.path).exists()
    loads.load("rot13", "hf://org/rot13")
    assert not Path(spec.path).exists()
    loads.load("upper", "hf://org/upper", "reverse")
    assert sorted(loads.registry.names()) == ["rot13", "upper"]


def test_folders_of_a_repository_make_room_for_each_other(loads: Loads) -> None:
    """They were one place, which a load of any of them kept: once it was full, none of them was fetched any more."""
    for name in ("upper", "reverse"):
        loads.load(name, f"hf://org/all/{name}")
    (upper,) = (each.path for each in loads.registry.loaded_from("source:hub") if each.name == "upper")
    loads.load("rot13", "hf://org/all/rot13", "upper")
    assert (sorted(loads.registry.names()), Path(upper).exists()) == (["reverse", "rot13"], False)
    again = FetchedFiles(loads.by_need.files.folder)
    assert again.folder.exists()
    assert again.num_bytes == loads.by_need.files.num_bytes


def test_a_name_that_is_loaded_keeps_its_files_though_another_load_of_them_fails(loads: Loads) -> None:
    loads.load("upper", "hf://org/upper")

    def refuse(nbytes: int) -> None:
        raise LoraplexError("too many bytes")

    needed = NeededAdapter("twin", "hf://org/upper", "twin", "hub")
    with pytest.raises(LoraplexError, match="too many bytes"):
        loads.by_need.load(loads.registry, needed, lambda *_: False, refuse)
    assert Path(loads.registry.spec_of(loads.registry.resolve("upper")).path).exists()
    assert loads.registry.names() == ("upper",)


def test_what_is_larger_than_its_tenant_may_have_takes_nothing_away(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others' names left for it, and it was downloaded, before its size was looked at."""
    monkeypatch.setattr("loraplex.adapters.sources.by_need.MAX_NOT_WEIGHTS_BYTES", 100)
    seen: list[int] = []

    def refuse(nbytes: int) -> None:
        seen.append(nbytes)
        raise TenantLimitError("too many bytes", 60.0, "adapter_bytes")

    def evict(*_: object) -> bool:
        raise AssertionError("something is to leave")

    for name in ("upper", "reverse"):
        loads.load(name, f"hf://org/{name}")
    needed = NeededAdapter("rot13", "hf://org/rot13", "rot13", "hub")
    with pytest.raises(TenantLimitError):
        loads.by_need.load(loads.registry, needed, evict, None, refuse)
    assert seen == [sum(file.stat().st_size for file in Path(adapter_path("rot13")).iterdir()) - 100]
    assert not (tmp_path / "fetched/models--org--rot13").exists()
    assert sorted(loads.registry.names()) == ["reverse", "upper"]


@pytest.mark.parametrize("place", ["hf://org/upper", "dir"])
def test_what_is_wrong_with_an_adapter_is_said_of_its_name(loads: Loads, tmp_path: Path, place: str) -> None:
    directory = tmp_path / "the-operators-own" / "upper"
    path = str(directory) if place == "dir" else place
    shutil.copytree(adapter_path("upper"), directory)
    loads.by_need._opener = demo_opener(AdapterSource((tmp_path,)))
    (directory / "adapter_config.json").write_text("{")
    if place != "dir":
        loads.load("other", path)
        for config in tmp_path.glob("fetched/*/snapshots/*/adapter_config.json"):
            config.write_text("{")
    with pytest.raises(LoraplexError) as caught:
        loads.load("upper", path)
    assert "'hub/upper'" in caught.value.message
    assert "org" not in caught.value.message
    assert "operators" not in caught.value.message
