"""Uploads are there whole or not at all, bounded together, and leave nothing behind."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from loraplex.adapter_store import AddOutcome
from loraplex.adapters.registry import LoRARegistry, OpenedAdapter
from loraplex.adapters.sources import uploads
from loraplex.adapters.sources.uploads import SPARE_DISK_BYTES, Upload, UploadLimits, UploadStore
from loraplex.core import AdapterSpec
from loraplex.errors import AdapterDiskFullError, AdapterTooLargeError, ConfigError
from tests.adapters.fake_store import FakeStore

NAME = "adapter_model.safetensors"


def store_at(folder: Path | None, **limits: int) -> UploadStore:
    return UploadStore(folder, UploadLimits(**limits))


def sent(store: UploadStore, data: bytes = b"weights", tenant: str = "") -> Upload:
    upload = store.receive(tenant)
    upload.write(NAME, data)
    return upload


def test_an_upload_is_kept_under_its_digest(tmp_path: Path) -> None:
    store = store_at(tmp_path / "uploads")
    upload = sent(store, b"wei")
    upload.write(NAME, memoryview(b"ghts"))
    assert upload.sha256(NAME) == hashlib.sha256(b"weights").hexdigest()
    folder = upload.keep("abc")
    assert folder.parent == tmp_path / "uploads"
    assert folder.name.startswith("abc-")
    assert [(each.name, each.read_bytes()) for each in folder.iterdir()] == [(NAME, b"weights")]
    assert store.has(str(folder))
    assert not store.has(str(tmp_path))
    assert store.num_bytes == 7


def test_equal_uploads_have_folders_of_their_own(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    first, second = (sent(store).keep("abc") for _ in range(2))
    store.remove(str(first))
    assert not first.exists()
    assert second.exists()
    assert store.num_bytes == 7


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_discarded_upload_leaves_nothing(tmp_path: Path, is_kept: bool) -> None:
    store = store_at(tmp_path)
    upload = sent(store)
    if is_kept:
        upload.keep("abc")
    upload.discard()
    assert not list(tmp_path.iterdir())
    assert store.num_bytes == 0


def test_others_folders_are_not_removed(tmp_path: Path) -> None:
    store = store_at(tmp_path / "uploads")
    sent(store).keep("abc")
    other = tmp_path / "other"
    other.mkdir()
    for path in (other, tmp_path / "uploads" / ".." / "other", tmp_path, tmp_path / "uploads"):
        store.remove(str(path))
    assert other.is_dir()
    assert store.num_bytes == 7


def test_one_upload_is_bounded(tmp_path: Path) -> None:
    upload = sent(store_at(tmp_path, max_bytes=8))
    upload.write(NAME, b"!")
    with pytest.raises(AdapterTooLargeError, match="longer than 8 bytes"):
        upload.write("other", b"!")
    upload.discard()


def test_all_together_are_bounded(tmp_path: Path) -> None:
    store = store_at(tmp_path, total_bytes=15)
    kept = sent(store).keep("abc")
    coming = sent(store)
    third = store.receive()
    with pytest.raises(AdapterDiskFullError, match="16 bytes, and it may have 15"):
        third.write(NAME, b"12")
    third.discard()
    store.remove(str(kept))
    sent(store)
    coming.discard()
    assert store.num_bytes == 7


def test_one_tenant_leaves_room_for_another(tmp_path: Path) -> None:
    """It filled the whole folder, and no other could upload anything until it unloaded some."""
    store = store_at(tmp_path, total_bytes=40)
    folders = [sent(store, tenant="acme").keep("abc") for _ in range(2)]
    with pytest.raises(AdapterDiskFullError, match="'acme' have 21 bytes, and 19 stay free"):
        sent(store, tenant="acme")
    folders.append(sent(store, tenant="beta").keep("abc"))
    again = store_at(tmp_path, total_bytes=40)
    again.sweep({str(folder): tenant for folder, tenant in zip(folders, ("acme", "acme", "beta"), strict=True)})
    with pytest.raises(AdapterDiskFullError):
        sent(again, tenant="acme")
    sent(again, b"wei", tenant="beta")
    sent(again, b"weights and more")  # the operator's may fill it


def test_what_no_version_has_goes_at_the_start(tmp_path: Path) -> None:
    before = store_at(tmp_path)
    used, unused = (sent(before).keep("abc") for _ in range(2))
    sent(before)  # the server is killed
    store = store_at(tmp_path)
    store.sweep({str(used): "acme", str(tmp_path / "gone"): ""})
    assert list(tmp_path.iterdir()) == [used]
    assert unused != used
    assert store.num_bytes == 7


def test_what_is_not_of_uploads_stays_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    used = sent(store_at(tmp_path)).keep("abc")
    (tmp_path / "link").symlink_to(used)
    (tmp_path / "abc-0123abcd").symlink_to(used)
    (tmp_path / "file").write_text("?")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "etc" / "ssl").mkdir(parents=True)
    before = sorted(tmp_path.iterdir())
    store_at(tmp_path).sweep({str(used): ""})
    assert sorted(tmp_path.iterdir()) == before
    assert f"5 entries of {tmp_path} are no uploads of this server, and stay there" in caplog.text


def test_a_link_in_place_of_the_folder_is_refused_and_nothing_behind_it_goes(tmp_path: Path) -> None:
    """A start as root with a link to /etc there emptied /etc."""
    (tmp_path / "etc" / "abc-0123abcd").mkdir(parents=True)
    (tmp_path / "uploads").symlink_to(tmp_path / "etc")
    with pytest.raises(ConfigError, match="uploads is a link"):
        store_at(tmp_path / "uploads").sweep({})
    assert (tmp_path / "etc" / "abc-0123abcd").is_dir()


def test_uploads_stay_where_the_state_directory_has_another_path(tmp_path: Path) -> None:
    """A start by a link to it removed all that the journal names."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    used = sent(store_at(tmp_path / "link")).keep("abc")
    store = store_at(tmp_path / "real")
    store.sweep({str(used): ""})
    assert [each.name for each in (tmp_path / "real").iterdir()] == [used.name]
    assert store.num_bytes == 7


def test_a_temporary_store_goes_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path))
    store = store_at(None)
    assert not store.has(str(tmp_path))
    assert not list(tmp_path.iterdir())
    folder = sent(store).keep("abc")
    assert folder.is_relative_to(tmp_path)
    assert store.has(str(folder))
    other = store_at(None)
    sent(other)
    assert folder.exists()  # what another process has is left alone
    store.close()
    assert not folder.exists()
    other.close()
    assert not list(tmp_path.iterdir())


def test_without_a_cache_folder_the_systems_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE", "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = store_at(None)
    assert sent(store).keep("abc").is_relative_to(tmp_path)
    store.close()
    assert not list(tmp_path.iterdir())


def test_a_clone_keeps_the_files_of_an_upload_that_is_unloaded_meanwhile(tmp_path: Path) -> None:
    """It was published without them: served from memory, and lost with the next start."""
    uploads, store = store_at(tmp_path), FakeStore()
    registry = LoRARegistry(store, no_adapter, on_unused=uploads.remove, run_later=lambda job: job())
    folder = str(sent(uploads).keep("abc"))
    opened = OpenedAdapter(folder, "d" * 64, 7, 8)
    registry.receive("sql", "upload://abc", lambda loaded, spec: opened)
    add = store.add_adapter

    def and_unload(spec: AdapterSpec) -> AddOutcome:
        outcome = add(spec)
        assert not registry.unload("sql").is_drained
        return outcome

    store.add_adapter = and_unload  # type: ignore[method-assign]
    registry.clone("sql", "copy")
    assert registry.names() == ("copy",)
    assert Path(registry.spec_of(registry.resolve("copy")).path).exists()
    assert registry.num_references == 0
    registry.unload("copy")
    assert not Path(folder).exists()
    registry.check_integrity()


def no_adapter(path: str) -> OpenedAdapter:
    raise AssertionError(f"{path} was opened")


def test_a_disk_that_fills_up_while_an_upload_comes_keeps_its_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [SPARE_DISK_BYTES + 10]
    monkeypatch.setattr(uploads.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    upload = sent(store_at(tmp_path), b"weights")
    free[0] -= 7
    with pytest.raises(AdapterDiskFullError, match="too full"):
        upload.write(NAME, b"more")
    upload.write(NAME, b"mor")
