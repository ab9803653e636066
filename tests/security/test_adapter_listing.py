"""An adapter's directory that cannot be listed, or that is not what was listed when it is opened: refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.remote import hub
from loraplex.adapters.source import AdapterSource
from loraplex.demo.tasks import TASKS, adapter_path
from loraplex.errors import AdapterLoadError, AdapterPermissionError, AdapterWeightsMissingError, shortened
from loraplex.server import ServerConfig
from loraplex.server.adapter_roots import AdapterRoots
from tests.security.demo_reader import demo_opener, demo_reader

ADAPTER = adapter_path(TASKS[0].name)
WEIGHTS, INDEX, SHARD = "adapter_model.safetensors", "adapter_model.safetensors.index.json", "a.safetensors"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """root/a: an index that names one shard."""
    path = Path(shutil.copytree(ADAPTER, tmp_path / "root" / "a"))
    (path / WEIGHTS).rename(path / SHARD)
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(path / SHARD), SHARD)}))
    return path


class Listings:
    """In the place of `os.scandir`: a number of it fails, or leaves out a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault: Callable[[Path, int], Exception | str | None] = lambda path, number: None
        self.count = 0
        self._scandir = os.scandir
        monkeypatch.setattr(os, "scandir", self)

    def __call__(self, path: Any = ".") -> Any:
        self.count += 1
        fault = self.fault(Path(path), self.count)
        if isinstance(fault, PermissionError):
            raise fault
        return _Listing(self._scandir(path), fault)


class _Listing:
    def __init__(self, entries: Any, fault: Exception | str | None) -> None:
        self._entries, self._fault = entries, fault

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *arguments: Any) -> None:
        self._entries.close()

    def close(self) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        yield from (entry for entry in self._entries if entry.name != self._fault)
        if isinstance(self._fault, Exception):
            raise self._fault


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> Listings:
    return Listings(monkeypatch)


def unlistable(path: Path, number: int) -> PermissionError | None:
    """Root may list everything; other users do not list a directory of mode 711 of root's."""
    is_readable = stat.S_IMODE(os.stat(path).st_mode) & 0o444
    return None if is_readable else PermissionError(errno.EACCES, "Permission denied", str(path))


def broken(path: Path, number: int) -> OSError:
    return OSError(errno.EIO, "Input/output error", str(path))


@pytest.mark.parametrize(("fault", "kind"), [(unlistable, AdapterPermissionError), (broken, AdapterLoadError)])
@pytest.mark.parametrize("is_outside", [True, False])
def test_a_directory_that_may_be_entered_but_not_listed(
    adapter: Path, listings: Listings, is_outside: bool, fault: Any, kind: type[AdapterLoadError]
) -> None:
    """Its shard led out of the root: no file of the directory was known, so none was checked."""
    if is_outside:
        outside = (adapter / SHARD).rename(adapter.parents[1] / "secret.safetensors")
        (adapter / SHARD).symlink_to(outside)
    adapter.chmod(0o311)
    listings.fault = fault
    root, given = adapter.parent, str(adapter)
    with pytest.raises(kind, match=r"cannot be listed: (Permission denied|Input/output error)") as caught:
        AdapterSource((root,)).fetch(given)
    assert repr(shortened(given)) in caught.value.message
    with pytest.raises(kind, match="cannot be listed") as caught:
        AdapterRoots.of(ServerConfig(adapter_roots=(str(root),))).check(given, "lora_path")
    assert caught.value.param == "lora_path"
    helper = PEFTHelper.from_local_dir(adapter)
    for roots in (None, frozenset((root,))):
        with pytest.raises(kind, match="cannot be listed"):
            demo_reader().read(adapter, helper, roots)
    adapter.chmod(0o755)


def test_a_snapshot_that_cannot_be_listed(tmp_path: Path, listings: Listings, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    shutil.copytree(ADAPTER, snapshot)
    listed = {"adapter_config.json": 1, "adapter_model.safetensors": 1}
    monkeypatch.setattr(hub, "_listed", lambda adapter: ("a" * 40, listed))
    monkeypatch.setattr(hub, "_download", lambda *asked: None)
    snapshot.chmod(0o311)
    listings.fault = unlistable
    with pytest.raises(AdapterPermissionError, match=r"adapter 'org/name'.* cannot be listed") as caught:
        AdapterSource((), hub_cache=tmp_path).fetch("hf://org/name")
    assert str(tmp_path) not in caught.value.message
    snapshot.chmod(0o755)
    assert AdapterSource((), hub_cache=tmp_path).fetch("hf://org/name") == snapshot


def test_an_index_names_only_files_that_were_listed(adapter: Path, listings: Listings) -> None:
    """What is opened beside the listing was neither checked nor counted."""
    listings.fault = lambda path, number: SHARD
    with pytest.raises(AdapterWeightsMissingError, match=r"a\.safetensors is missing"):
        demo_opener(AdapterSource()).open(str(adapter))


def test_shards_that_appear_after_their_bytes_were_counted_are_not_read(adapter: Path, listings: Listings) -> None:
    """Sparse files that appear in time would be beyond the budget of all readers."""
    helper, reader = PEFTHelper.from_local_dir(adapter), demo_reader()
    expected = reader.read(adapter, helper).adapter_digest
    listings.count, listings.fault = 0, lambda path, number: SHARD if number == 1 else None
    with pytest.raises(AdapterLoadError, match="grew while it was read; load it again"):
        reader.read(adapter, helper)
    assert reader.read(adapter, helper).adapter_digest == expected


def test_a_directory_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    """The check of the roots says nothing about it; the load does (404)."""
    roots = AdapterRoots.of(ServerConfig(adapter_roots=(str(tmp_path),)))
    (tmp_path / "file").touch()
    for name in ("none", "file", "file/below"):
        roots.check(str(tmp_path / name))
        with pytest.raises(AdapterLoadError, match=r"no such directory|not a directory"):
            AdapterSource((tmp_path,)).fetch(str(tmp_path / name))
