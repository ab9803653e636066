"""The file of a journal: its tables in SQLite, what is wrong with them, and how rows become records again."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from loraplex.adapters.journal.copies import JournalCopies, counts_of, time_of
from loraplex.adapters.journal.damage import Damage, DamagedRecordError, Row, check_together, name_record
from loraplex.adapters.journal.rows import (
    ABOUT,
    ABOUT_TABLE,
    NAMES_TABLE,
    SCHEMA,
    VERSIONS_TABLE,
    counters,
    name_row,
    raw,
    raw_rows,
    version_rows,
)
from loraplex.adapters.journal.tenant_rows import ADD_CHECKSUMS, REVISION, TenantRows, read_tenant_rows, seal_rows
from loraplex.adapters.registry.records import NameChange, NameRecord, NameUsage
from loraplex.errors import ConfigError

SCHEMA_VERSION = "4"
UPGRADES = {
    "1": ("ALTER TABLE names ADD COLUMN history TEXT NOT NULL DEFAULT '[]'",),
    "2": (),
    "3": ADD_CHECKSUMS,
}
"""Schema to what makes it the present one: a registry without a history takes the order of what is kept. Tables that
are missing, those of tenants in 2, are made before."""

MAX_MESSAGE_CHARS = 1024
MAX_FOUND = 1000
_OF_ONE_ROW = re.compile(r"NULL value in ")
"""What SQLite finds that `read` says of its adapter."""
_CLAUSES = re.compile(r"\b(?:CHECK|COLLATE|CONFLICT|REFERENCES|STRICT|UNIQUE|WHERE|WITHOUT)\b")
_ADAPTER_ID = re.compile(r"[0-9]{1,18}", re.ASCII)


def engine_of(file: Path) -> sa.Engine:
    """Further connections to the file of a journal, which read what is no text as the journal does."""
    engine = sa.create_engine(sa.URL.create("sqlite", database=str(file)))
    sa.event.listen(engine, "connect", lambda connection, _: _read_any_text(connection))
    return engine


def _read_any_text(connection: sqlite3.Connection) -> None:
    """What is not UTF-8 gets half characters: one row is damaged, and others can be read."""
    connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")


def schema_damages(connection: sa.Connection) -> tuple[Damage, ...]:
    """Objects and columns that are not of these tables, or missing: either makes a later write fail or change."""
    expected = _expected_shape()
    found = _shape(connection)
    strange = [f"{each} is not of Loraplex" for each in sorted(found - expected)]
    return tuple(
        Damage(None, what) for what in (*strange, *(f"{each} is missing" for each in sorted(expected - found)))
    )


@cache
def _expected_shape() -> frozenset[str]:
    with sa.create_engine("sqlite://").connect() as fresh:
        SCHEMA.create_all(fresh)
        return frozenset(_shape(fresh))


def _shape(connection: sa.Connection) -> set[str]:
    """Every object of the file, with what decides on what may be written to it. A view is no table."""
    rows = connection.exec_driver_sql("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master").all()
    shape = set()
    for kind, name, table, sql in rows:
        if kind == "view" and name in SCHEMA.tables:
            raise DamagedJournalError(f"table {name} of the journal is missing, and a view has its name")
        clauses = sorted(set(_CLAUSES.findall(sql.upper())))
        if kind == "table" and name in SCHEMA.tables:
            shape |= {f"column {name}.{column}" for column in _columns(connection, name)}
        if not name.startswith("sqlite_stat"):  # ANALYZE's
            of_table = "" if name == table else f" of table {table[:80]!r}"
            shape.add(f"{kind} {name[:80]!r}{of_table}{' with ' if clauses else ''}{', '.join(clauses)}")
    return shape


def _columns(connection: sa.Connection, table: str) -> Iterator[str]:
    for row in connection.exec_driver_sql(f"PRAGMA table_xinfo({table})"):
        kind = "TEXT" if row.type == "JSON" else row.type  # an upgraded file has it as TEXT
        marks = [
            mark for mark, is_on in (("NOT NULL", row.notnull), ("KEY", row.pk), ("generated", row.hidden)) if is_on
        ]
        yield " ".join([f"{row.name[:80]!r}", kind[:80], *marks])


class DamagedJournalError(ConfigError):
    """The file cannot be used as it is; `loraplex state repair` may mend it."""


@dataclass(frozen=True, slots=True)
class JournalContents:
    """All that a journal has. names: those that can be used, in the order of their loads; damages: what cannot;
    tenants: what of tenants can; schema: of the file before it was opened."""

    base_model: str
    names: Mapping[str, NameRecord]
    last_adapter_id: int
    damages: tuple[Damage, ...] = ()
    tenants: TenantRows = field(default_factory=TenantRows)
    schema: str = SCHEMA_VERSION

    def check_age(self, copies: JournalCopies) -> None:
        """Raises DamagedJournalError where the newest copy knows more: what was written since was in SQLite's log, and
        that is lost. Else the server started without its tenants, open to all."""
        for copy in copies.files()[:1]:
            last_adapter_id, revision = counts_of(copy)
            if self.last_adapter_id < last_adapter_id or int(self.tenants.revision or 0) < revision:
                raise DamagedJournalError(f"the journal is older than its copy of {time_of(copy)}")


class JournalTables:
    """One connection. An older schema is made the present one. base_model None: whichever the file is of; called: of
    what it is a copy.

    Raises ConfigError for a file that is not this model's, this version's, or not readable at all.
    """

    def __init__(self, file: Path, base_model: str | None, called: Path | None = None) -> None:
        self._file = called or file
        self._last_adapter_id = 0
        self._base_model = ""
        self._schema = SCHEMA_VERSION
        self._damages: tuple[Damage, ...] = ()
        self._engine = sa.create_engine(
            sa.URL.create("sqlite", database=str(file)),
            poolclass=sa.StaticPool,
            connect_args={"check_same_thread": False},
        )
        try:
            with self._refusing_damage():
                self._open(base_model)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _refusing_damage(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DatabaseError as error:
            raise DamagedJournalError(f"{self._file} cannot be read ({error.orig})") from error
        except UnicodeDecodeError as error:  # SQLite's words about a damaged schema, which quote it
            raise DamagedJournalError(f"{self._file} cannot be read (its schema is no text)") from error

    def _open(self, base_model: str | None) -> None:
        with self._engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            _read_any_text(driver)
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            connection.exec_driver_sql("PRAGMA synchronous=FULL")
            found = connection.exec_driver_sql(f"PRAGMA integrity_check({MAX_FOUND})").scalars().all()
            found = [line for line in found if not _OF_ONE_ROW.match(line)]
            if found not in ([], ["ok"]):
                raise DamagedJournalError(f"{self._file} is damaged: {'; '.join(map(str, found))}"[:MAX_MESSAGE_CHARS])
            SCHEMA.create_all(connection)
            about = {row.key: row.value for row in connection.execute(sa.select(ABOUT_TABLE))}
            if not about and base_model is not None and not self._has_rows(connection):
                about = {"schema": SCHEMA_VERSION, "base_model": base_model, "last_adapter_id": "0"}
                rows = [{"key": key, "value": value} for key, value in about.items()]
                connection.execute(ABOUT_TABLE.insert(), rows)
            self._check_about(about)
            self._schema = about["schema"]
            if about["schema"] in UPGRADES:
                # in this order, the first one begins the transaction that both are in
                connection.execute(
                    ABOUT_TABLE.update().where(ABOUT_TABLE.c.key == "schema").values(value=SCHEMA_VERSION)
                )
                for statement in UPGRADES[about["schema"]]:
                    connection.exec_driver_sql(statement)
                if about["schema"] == "3":
                    seal_rows(connection)
                about["schema"] = SCHEMA_VERSION
            connection.commit()
            self._damages += schema_damages(connection)
        if about["schema"] != SCHEMA_VERSION:
            raise ConfigError(
                f"{self._file} was written by another version of Loraplex (schema {about['schema'][:40]}, this one has "
                f"{SCHEMA_VERSION}); run that version, or give this one a --state-dir of its own"
            )
        if base_model not in (None, about["base_model"]):
            raise ConfigError(
                f"{self._file} has the adapters of base model {about['base_model'][:200]!r}, "
                f"this one is {base_model!r}; "
                "give each model a --state-dir of its own"
            )
        self._base_model = about["base_model"]

    @staticmethod
    def _has_rows(connection: sa.Connection) -> bool:
        return any(connection.execute(sa.select(table).limit(1)).first() for table in (NAMES_TABLE, VERSIONS_TABLE))

    def _check_about(self, about: Mapping[str, Any]) -> None:
        missing = [key for key in ABOUT if not (isinstance(about.get(key), str) and about[key].isprintable())]
        if missing:
            raise DamagedJournalError(f"{self._file} is damaged: its table `about` lacks {', '.join(missing)}")
        if not _ADAPTER_ID.fullmatch(about["last_adapter_id"]):
            raise DamagedJournalError(f"{self._file} is damaged: last_adapter_id in its table `about` is no number")
        if strange := sorted(map(repr, about.keys() - {*ABOUT, REVISION})):
            self._damages += (Damage(None, f"its table `about` has {', '.join(strange)[:200]}"),)

    def read(self, *, with_usage: bool = False) -> JournalContents:
        """Every name with its record, and the highest adapter_id ever. Rows that cannot be used are `damages`.

        with_usage: also what tenants have used, which only a repair needs.
        """
        with self._refusing_damage(), self._engine.connect() as connection:
            names = {row["name"]: row for row in raw_rows(connection, sa.select(*raw(NAMES_TABLE)))}
            versions: defaultdict[Any, list[Row]] = defaultdict(list)
            for row in raw_rows(connection, sa.select(*raw(VERSIONS_TABLE)).order_by(VERSIONS_TABLE.c.place)):
                versions[row["name"]].append(row)
            is_last = ABOUT_TABLE.c.key == "last_adapter_id"
            self._last_adapter_id = int(connection.execute(sa.select(ABOUT_TABLE.c.value).where(is_last)).scalar_one())
            tenants = read_tenant_rows(connection, with_usage=with_usage)
        records: dict[str, NameRecord] = {}
        damages = [
            *self._damages,
            *tenants.damages,
            *(Damage(str(name), "its name has no row") for name in versions if name not in names),
        ]
        for name, row in names.items():
            try:
                records[name] = name_record(row, versions[name])
            except DamagedRecordError as error:
                damages.append(Damage(str(name), str(error)))
        damages += check_together(records, self._last_adapter_id)
        damaged = {damage.name for damage in damages}
        by_age = sorted(records.keys() - damaged, key=lambda name: records[name].versions[0].adapter_id)
        names_by_age = {name: records[name] for name in by_age}
        found = (self._base_model, names_by_age, self._last_adapter_id, tuple(damages), tenants)
        return JournalContents(*found, self._schema)

    def tenants_revision(self) -> str | None:
        """The number of the last change of tenants and keys; None: there are none."""
        with self._engine.connect() as connection:
            is_it = ABOUT_TABLE.c.key == REVISION
            return connection.execute(sa.select(ABOUT_TABLE.c.value).where(is_it)).scalar()

    def write_tenants(self, tenants: TenantRows) -> None:
        """Into a journal without any."""
        with self._engine.begin() as connection:
            tenants.write(connection)

    def copy_to(self, copies: JournalCopies) -> Path:
        """Add a dated copy. Raises OSError or sqlite3.Error."""
        with self._engine.connect() as connection:
            source = connection.connection.driver_connection
            assert isinstance(source, sqlite3.Connection)
            made = copies.add(source)
            source.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # what a copy has is not in the log alone
            return made

    def raise_last_adapter_id(self, last_adapter_id: int) -> None:
        """No id up to this one is given again, even if no version in the journal has it."""
        self._last_adapter_id = max(self._last_adapter_id, last_adapter_id)

    def write(self, changes: Sequence[NameChange]) -> None:
        """All of it or nothing; it is on disk when this returns."""
        names = [{"old_name": change.name} for change in changes]
        records = {change.name: change.record for change in changes if change.record is not None}
        versions = [row for name, record in records.items() for row in version_rows(name, record)]
        last_adapter_id = max((self._last_adapter_id, *(row["adapter_id"] for row in versions)))
        is_last = ABOUT_TABLE.c.key == "last_adapter_id"
        with self._engine.begin() as connection:
            for table in (NAMES_TABLE, VERSIONS_TABLE) if names else ():
                connection.execute(table.delete().where(table.c.name == sa.bindparam("old_name")), names)
            if records:
                connection.execute(NAMES_TABLE.insert(), [name_row(name, record) for name, record in records.items()])
                connection.execute(VERSIONS_TABLE.insert(), versions)
            connection.execute(ABOUT_TABLE.update().where(is_last).values(value=str(last_adapter_id)))
        self._last_adapter_id = last_adapter_id

    def write_usage(self, usage: Sequence[NameUsage]) -> None:
        if not usage:
            return
        rows = [{"used_name": each.name, **counters(each)} for each in usage]
        values: Any = {name: sa.bindparam(name) for name in counters(usage[0])}
        with self._engine.begin() as connection:
            connection.execute(
                NAMES_TABLE.update().where(NAMES_TABLE.c.name == sa.bindparam("used_name")).values(values),
                rows,
            )

    def close(self) -> None:
        self._engine.dispose()
