"""Texts of registered versions, beside the journal: DIR/texts/ADAPTER_ID.json, for versions that bring one.

A file is on disk before the journal names its version, and goes after the journal has let the version go: a version
whose text was acknowledged never answers with the base's instead. The folder is made when it is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from loraplex.adapters.journal.damage import Damage
from loraplex.adapters.journal.state_directory import FILE_MODE, StateDirectory
from loraplex.adapters.registry.records import AdapterText, NameChange, NameRecord, VersionRecord
from loraplex.errors import ConfigError

MAX_BYTES = 2**24
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


class SavedTexts:
    """Belongs to the thread that writes the journal, once `attach` has returned."""

    def __init__(self, directory: StateDirectory) -> None:
        self._directory = directory
        self._folder = directory.path / "texts"
        self._saved: dict[str, set[int]] = {}

    def attach(self, names: Mapping[str, NameRecord]) -> dict[str, NameRecord]:
        """The records with their texts; files of no version are removed. Raises ConfigError for a damaged one."""
        if not os.path.lexists(self._folder):
            return dict(names)
        self._directory.make_folder(self._folder)
        found = {path.name: path for path in self._folder.iterdir()}
        attached = {}
        for name, record in names.items():
            versions = tuple(self._with_text(name, each, found) for each in record.versions)
            attached[name] = replace(record, versions=versions)
        for left in found.values():
            self._directory.remove(left)
        return attached

    def _with_text(self, name: str, version: VersionRecord, found: dict[str, Path]) -> VersionRecord:
        path = found.pop(_file_name(version.adapter_id), None)
        if path is None:
            return version
        self._directory.make_private(path)
        self._saved.setdefault(name, set()).add(version.adapter_id)
        try:
            return replace(version, text=_read(path))
        except _UNREADABLE as error:
            raise ConfigError(
                f"{path}, the text of adapter {name[:80]!r}, is damaged ({error}); remove it, and load the adapter "
                "again once the server is up (`loraplex state repair` sets it aside): until then its requests are read "
                "as the base model's, and an aLoRA acts on all rows"
            ) from error

    def damaged(self, names: Mapping[str, NameRecord]) -> dict[Path, Damage]:
        """Files with which `attach` would refuse to start."""
        found = {}
        versions = [(name, each) for name, record in names.items() for each in record.versions]
        for name, version in versions if self._folder.is_dir() else ():
            path = self._folder / _file_name(version.adapter_id)
            if os.path.lexists(path):
                try:
                    self._directory.make_private(path)
                    _read(path)
                except (ConfigError, *_UNREADABLE) as error:
                    found[path] = Damage(name, f"its text {path} is damaged ({error})")
        return found

    def save(self, changes: Sequence[NameChange]) -> None:
        """Before the journal has the changes. Raises OSError, ConfigError."""
        for change in changes:
            for version in () if change.record is None else change.record.versions:
                saved = self._saved.setdefault(change.name, set())
                if version.text is not None and version.adapter_id not in saved:
                    self._write(version.adapter_id, version.text)
                    saved.add(version.adapter_id)

    def prune(self, changes: Sequence[NameChange]) -> None:
        """After the journal has the changes. What cannot be removed now is at the next start."""
        for change in changes:
            kept = set() if change.record is None else {each.adapter_id for each in change.record.versions}
            for adapter_id in self._saved.get(change.name, set()) - kept:
                with suppress(OSError):
                    (self._folder / _file_name(adapter_id)).unlink()
            self._saved[change.name] = self._saved.get(change.name, set()) & kept
            if not self._saved[change.name]:
                del self._saved[change.name]

    def _write(self, adapter_id: int, text: AdapterText) -> None:
        self._directory.make_folder(self._folder)
        path = self._folder / _file_name(adapter_id)
        made = path.with_suffix(".new")
        with suppress(FileNotFoundError):
            made.unlink()
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with open(descriptor, "wb") as file:
            file.write(b'{"digest": "%s", "document": %s}' % (text.digest.encode(), text.json))
            file.flush()
            os.fsync(file.fileno())
        made.rename(path)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _file_name(adapter_id: int) -> str:
    return f"{adapter_id}.json"


def _read(path: Path) -> AdapterText:
    """Raises one of _UNREADABLE."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    content = json.loads(path.read_bytes())
    text = AdapterText.of(content["document"])
    if text.digest != content["digest"]:
        raise ValueError("its content is not what was written")
    return text
