"""Texts of versions in a state directory: as long on disk as the version is in the journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from loraplex.adapters.journal import SqliteJournal
from loraplex.adapters.registry import AdapterText, LoRARegistry, OpenedAdapter
from loraplex.errors import ConfigError, JournalError
from tests.adapters.fake_store import Bench

BASE, DIGEST = "/models/base", "d" * 64


def text_of(words: str) -> AdapterText:
    return AdapterText.of({"chat_templates": {"default": words}})


class Life:
    """One server on a state directory. An adapter at /words/N says `words`; one at /plain has no text of its own."""

    def __init__(self, directory: Path) -> None:
        self.journal = SqliteJournal(directory, BASE)
        self.registry = LoRARegistry(Bench().store, self._open, journal=self.journal, run_later=lambda job: job())
        self.registry.resume(self.journal.names, self.journal.last_adapter_id)

    @staticmethod
    def _open(path: str) -> OpenedAdapter:
        return OpenedAdapter(path, DIGEST, 1, 8, None if path == "/plain" else text_of(path))

    def texts(self) -> dict[str, AdapterText | None]:
        return {name: ref.text for name, ref in self.registry.refs().items()}


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[], Life]]:
    begun: list[Life] = []

    def start() -> Life:
        for life in begun:
            life.journal.close()
        begun.append(Life(tmp_path / "state"))
        return begun[-1]

    yield start
    for life in begun:
        life.journal.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "texts"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_texts_of_current_and_kept_versions_come_back(begin: Callable[[], Life], folder: Path) -> None:
    life = begin()
    life.registry.load("plain", "/plain")
    assert not folder.exists()
    life.registry.load("a", "/one")
    life.registry.load("a", "/two", load_inplace=True)
    assert names_in(folder) == {"2.json", "3.json"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    life = begin()
    assert life.texts() == {"plain": None, "a": text_of("/two")}
    life.registry.move("a")
    assert life.texts()["a"] == text_of("/one")
    assert begin().texts()["a"] == text_of("/one")


def test_a_clone_has_the_text_of_what_it_is_a_copy_of(begin: Callable[[], Life]) -> None:
    """They share their KV, which is of one vocabulary and one context."""
    life = begin()
    life.registry.load("a", "/one")
    life.registry.clone("a", "copy")
    assert life.texts() == begin().texts() == {"a": text_of("/one"), "copy": text_of("/one")}


def test_a_text_goes_with_its_version(begin: Callable[[], Life], folder: Path) -> None:
    life = begin()
    for path in ("/one", "/two", "/three"):
        life.registry.load("a", path, load_inplace=True)
    assert names_in(folder) == {"2.json", "3.json"}
    life.registry.unload("a")
    assert names_in(folder) == set()


def test_what_a_killed_server_left_is_removed_at_the_start(begin: Callable[[], Life], folder: Path) -> None:
    life = begin()
    life.registry.load("a", "/one")
    life.journal.close()
    (folder / "77.json").write_text("{}")
    (folder / "2.new").write_text("half of it")
    assert begin().texts() == {"a": text_of("/one")}
    assert names_in(folder) == {"1.json"}


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b'{"digest": "x", "document": {}}', b"\xff"])
def test_a_damaged_text_is_refused_with_what_to_do(begin: Callable[[], Life], folder: Path, damage: bytes) -> None:
    """The version would answer with the base's text instead."""
    life = begin()
    life.registry.load("a", "/one")
    life.journal.close()
    (folder / "1.json").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"1\.json, the text of adapter 'a', is damaged .* remove it, and load"):
        begin()
    (folder / "1.json").unlink()
    assert begin().texts() == {"a": None}


def test_a_link_is_not_followed(begin: Callable[[], Life], folder: Path, tmp_path: Path) -> None:
    life = begin()
    life.registry.load("a", "/one")
    life.journal.close()
    elsewhere = tmp_path / "elsewhere"
    (folder / "1.json").rename(elsewhere)
    (folder / "1.json").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"1\.json is a link, or not a plain file"):
        begin()


def test_a_text_that_could_not_be_written_is_written_with_the_next(begin: Callable[[], Life], folder: Path) -> None:
    """The verb says so, and the journal does not have the version before its text."""
    life = begin()
    with patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")), pytest.raises(JournalError):
        life.registry.load("a", "/one")
    assert life.texts() == {"a": text_of("/one")}
    life.registry.load("b", "/two")
    assert names_in(folder) == {"1.json", "2.json"}
    assert begin().texts() == {"a": text_of("/one"), "b": text_of("/two")}


def test_what_activates_an_alora_outlives_the_process_and_its_files(begin: Callable[[], Life]) -> None:
    life = begin()
    opened = AdapterText.activated(None, (5, 6)), AdapterText.activated(text_of("x"), (7,))
    for text in opened:
        with patch.object(Life, "_open", staticmethod(lambda path, text=text: OpenedAdapter(path, DIGEST, 1, 8, text))):
            life = begin()
            life.registry.load("a", f"/{text.digest}", load_inplace=True)
    life = begin()
    assert life.registry.resolve("a").invocation_tokens == (7,)
    assert life.registry.resolve("a@1").invocation_tokens == (5, 6)
    life.registry.move("a")
    assert begin().registry.resolve("a").invocation_tokens == (5, 6)
