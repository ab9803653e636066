"""Folders from which packed weights are served as they lie there: others must not be able to put any in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from loraplex.config import LoRAConfig
from loraplex.engine.build import open_disk_tier
from loraplex.errors import ConfigError
from loraplex.private_folder import private_folder


def check(folder: Path) -> Path:
    return private_folder(folder, "the folder", "give another")


def test_a_missing_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = check(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for each in (folder, folder.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    assert check(folder) == folder


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"can be written to by other users .*{mode:o}.*: chmod 700 it, or give another"
    ):
        check(tmp_path)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_a_folder_that_others_may_only_read_is_fine(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    check(tmp_path)
    tmp_path.chmod(0o700)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(ConfigError, match="belongs to another user"):
        check(tmp_path)


def test_a_link_to_such_a_folder_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(ConfigError, match="can be written to"):
        check(tmp_path / "link")


def test_a_place_where_no_folder_can_be_is_for_its_user_to_report(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check(tmp_path / "file" / "x") == tmp_path / "file" / "x"


class NoPacker:
    """Refuses to be asked: the folder is looked at first."""


def test_the_disk_tier_checks_its_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    settings = LoRAConfig(disk_cache_dir=str(tmp_path), disk_memory_bytes=2**20)
    with pytest.raises(ConfigError, match="--disk-cache-dir"):
        open_disk_tier(settings, NoPacker())  # type: ignore[arg-type]
