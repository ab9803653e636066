"""`loraplex state check` and `repair`: what of a state directory can be used, and a journal made of it.

What can be used of the journal stays as it is. A name whose rows are damaged is taken from the newest copy that can be
read, if it is whole there and shares no id with what stays; else it is dropped. A journal that cannot be read at all is
replaced by that copy. A damaged text is set aside: its adapter's requests are read as the base model's until it is
loaded again. Nothing is deleted: what was replaced is moved to DIR/damaged/. A check changes no journal.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from loraplex.adapters.journal.copies import JournalCopies, counts_of, time_of
from loraplex.adapters.journal.damage import Damage
from loraplex.adapters.journal.state_directory import StateDirectory
from loraplex.adapters.journal.tables import SCHEMA_VERSION, DamagedJournalError, JournalContents, JournalTables
from loraplex.adapters.journal.tenant_rows import TenantRows
from loraplex.adapters.journal.texts import SavedTexts
from loraplex.adapters.registry.records import NameChange, NameRecord
from loraplex.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class StateReport:
    """What a check found. base_model None: neither the journal nor a copy can be read, and nothing can be repaired.

    kept: names that the journal has whole; restored: those that the copy of `copy_time` has; dropped: what no copy has.
    textless: those whose text is damaged. has_old_keys: keys of tenants come from a copy, too. schema: of the journal,
    or of that copy.
    """

    path: str
    base_model: str | None
    kept: tuple[str, ...]
    restored: tuple[str, ...]
    dropped: tuple[str, ...]
    textless: tuple[str, ...]
    damages: tuple[Damage, ...]
    num_tenants: int
    has_old_keys: bool
    num_copies: int
    copy_time: str | None
    schema: str = SCHEMA_VERSION

    @property
    def is_whole(self) -> bool:
        return not self.damages

    def describe(self) -> str:
        lines = [
            f"state directory {self.path}",
            f"  base model   {self.base_model or 'unknown'}",
            f"  adapters     {len(self.kept)}",
            *([f"  tenants      {self.num_tenants}"] if self.num_tenants else ()),
            f"  copies       {self.num_copies}" + (f", the newest of {self.copy_time}" if self.copy_time else ""),
            *(f"  damaged      {damage}" for damage in self.damages),
        ]
        if self.schema != SCHEMA_VERSION:
            text = f"a server of this version makes it {SCHEMA_VERSION}, and those before refuse the directory then"
            lines.append(f"  schema       {self.schema}: {text}")
        return "\n".join([*lines, *self._outlook()])

    def _outlook(self) -> list[str]:
        if self.is_whole:
            return ["nothing is damaged"]
        if self.base_model is None:
            return [f"nothing can be restored: move {self.path} away to start without adapters"]
        lines = [f"a repair keeps {len(self.kept)} adapters as they are"]
        if self.restored:
            lines.append(f"  takes from the copy of {self.copy_time}: {_listed(self.restored)}")
        if self.dropped:
            lines.append(f"  drops: {_listed(self.dropped)}")
        if self.has_old_keys:
            lines.append(
                f"  takes tenants and keys from that copy: revoke again what was revoked after {self.copy_time}"
            )
        if self.textless:
            lines.append(f"  leaves without a text of their own, until they are loaded again: {_listed(self.textless)}")
        return lines


def check_state(state_dir: str | Path) -> StateReport:
    """Raises ConfigError when the directory is missing, in use, or of another version of Loraplex."""
    with StateDirectory(state_dir, must_exist=True) as directory:
        return _examine(directory).report


def repair_state(state_dir: str | Path) -> StateReport:
    """Do what `check_state` foretells; a directory in which nothing is damaged is left alone.

    Raises ConfigError as it does.
    """
    with StateDirectory(state_dir, must_exist=True) as directory:
        found = _examine(directory)
        report = found.report
        if report.is_whole or report.base_model is None:
            return report
        grave = directory.make_folder(directory.damaged) / f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
        directory.make_folder(grave)
        for file in found.texts:
            file.rename(grave / file.name)
        if len(found.texts) < len(report.damages):
            _replace_journal(directory, report.base_model, found, grave)
        return report


def _replace_journal(directory: StateDirectory, base_model: str, found: _Found, grave: Path) -> None:
    made = directory.path / "journal.repaired.sqlite"
    if os.path.lexists(made):
        directory.remove(made)
    directory.make_private(made)
    with closing(JournalTables(made, base_model)) as tables:
        tables.raise_last_adapter_id(found.last_adapter_id)
        tables.write([NameChange(name, record) for name, record in found.names.items()])
        tables.write_tenants(found.tenants)
    for suffix in ("-wal", "-shm", ""):
        file = Path(f"{directory.journal_file}{suffix}")
        if file.exists():
            file.rename(grave / file.name)
    made.rename(directory.journal_file)


@dataclass(frozen=True, slots=True)
class _Found:
    """The report, the names and tenants of a repaired journal, the highest adapter_id that either file knows, damaged
    texts."""

    report: StateReport
    names: Mapping[str, NameRecord]
    last_adapter_id: int
    texts: Mapping[Path, Damage]
    tenants: TenantRows


def _examine(directory: StateDirectory) -> _Found:
    copies = JournalCopies(directory.copies).files()
    damages: tuple[Damage, ...] = ()
    contents: JournalContents | None = None
    try:
        contents = _read_journal(directory)
        damages = contents.damages
    except DamagedJournalError as error:
        damages = (Damage(None, str(error)),)
    found = (None, None) if not damages else _newest_readable(copies)
    copy_file, copy = found
    known = [each for each in (contents, copy) if each is not None]
    kept = dict(contents.names) if contents is not None else {}
    lost = [damage.name for damage in damages if damage.name is not None] if contents is not None else []
    wanted = lost if contents is not None else list(copy.names if copy is not None else ())
    restored = _restorable(kept, wanted, {} if copy is None else copy.names)
    names = {**kept, **restored}
    texts = SavedTexts(directory).damaged(names)
    report = StateReport(
        path=str(directory.path),
        base_model=known[0].base_model if known else None,
        kept=tuple(kept),
        restored=tuple(restored),
        dropped=tuple(sorted({name for name in lost if name not in restored})),
        textless=tuple(str(damage.name) for damage in texts.values()),
        damages=(*damages, *texts.values()),
        num_tenants=len(known[0].tenants.rows.get("tenants", ())) if known else 0,
        has_old_keys=contents is None and copy is not None and copy.tenants.revision is not None,
        num_copies=len(copies),
        copy_time=time_of(copy_file or copies[0]) if copies else None,
        schema=known[0].schema if known else SCHEMA_VERSION,
    )
    tenants = known[0].tenants if known else TenantRows()
    if tenants.revision is not None and copies:  # else the repaired journal would be older than its copy
        tenants = replace(tenants, revision=str(max(int(tenants.revision), counts_of(copies[0])[1])))
    return _Found(report, names, max((each.last_adapter_id for each in known), default=0), texts, tenants)


def _read_journal(directory: StateDirectory) -> JournalContents:
    if not directory.has_journal:
        is_empty = directory.journal_file.exists()
        raise DamagedJournalError(f"{directory.journal_file} is {'empty' if is_empty else 'missing'}")
    directory.make_private(directory.journal_file)
    with _copied(directory.journal_file) as tables:
        contents = tables.read(with_usage=True)
    if not contents.damages:
        contents.check_age(JournalCopies(directory.copies))
    return contents


@contextmanager
def _copied(file: Path) -> Iterator[JournalTables]:
    """A copy of it with SQLite's log, since to open one may upgrade it: the file stays as it is."""
    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        try:
            made = Path(shutil.copy(file, folder))
            log = Path(f"{file}-wal")
            if log.is_file():
                shutil.copy(log, folder)
        except OSError as error:
            raise ConfigError(f"{file} cannot be copied to be read: {error.strerror}") from error
        with closing(JournalTables(made, None, called=file)) as tables:
            yield tables


def _newest_readable(copies: list[Path]) -> tuple[Path | None, JournalContents | None]:
    for file in copies:
        try:
            with _copied(file) as tables:
                contents = tables.read(with_usage=True)
        except ConfigError:
            continue
        if not contents.damages:
            return file, contents
    return None, None


def _restorable(
    kept: Mapping[str, NameRecord], wanted: list[str], copied: Mapping[str, NameRecord]
) -> dict[str, NameRecord]:
    """Of the wanted names those that the copy has, and whose ids and numbers nothing that stays has."""
    ids = {version.adapter_id for record in kept.values() for version in record.versions}
    numbers = {record.lora_int_id for record in kept.values()} - {None}
    return {
        name: copied[name]
        for name in dict.fromkeys(wanted)
        if name in copied
        and copied[name].lora_int_id not in numbers
        and not any(version.adapter_id in ids for version in copied[name].versions)
    }


def _listed(names: tuple[str, ...]) -> str:
    """Damaged ones may have any characters."""
    first = ", ".join(shown(name, 80) for name in names[:8])
    return first if len(names) <= 8 else f"{first} and {len(names) - 8} more"
