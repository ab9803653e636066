"""The tables of the journal, by SQLAlchemy Core: how records become rows and rows records."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from loraplex.adapters.journal.copies import JournalCopies
from loraplex.adapters.journal.damage import (
    Damage,
    DamagedRecordError,
    Row,
    check_together,
    name_record,
)
from loraplex.adapters.registry.records import NameChange, NameRecord, NameUsage
from loraplex.errors import ConfigError

SCHEMA_VERSION = "2"
UPGRADES = {"1": "ALTER TABLE names ADD COLUMN history TEXT NOT NULL DEFAULT '[]'"}
"""Schema to what makes it the present one: a registry without a history takes the order of what is kept."""

ABOUT = ("schema", "base_model", "last_adapter_id")
MAX_MESSAGE_CHARS = 1024
MAX_FOUND = 1000
_OF_ONE_ROW = re.compile(r"NULL value in ")
"""What SQLite finds that `read` says of its adapter."""
_CLAUSES = re.compile(r"\b(?:CHECK|COLLATE|CONFLICT|REFERENCES|STRICT|UNIQUE|WHERE|WITHOUT)\b")
_ADAPTER_ID = re.compile(r"[0-9]{1,18}", re.ASCII)

_schema = sa.MetaData()
_about = sa.Table(
    "about",
    _schema,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
_names = sa.Table(
    "names",
    _schema,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("lora_int_id", sa.BigInteger, unique=True),
    sa.Column("alias_of", sa.Text),
    sa.Column("last_number", sa.Integer, nullable=False),
    sa.Column(
        "history", sa.JSON, nullable=False
    ),  # [2, "other"]: numbers of its own versions, and names; the last to answer last
    sa.Column("num_loads", sa.Integer, nullable=False),
    sa.Column("num_requests", sa.Integer, nullable=False),
    sa.Column("last_used_time", sa.Float, nullable=False),
)
_versions = sa.Table(
    "versions",
    _schema,
    sa.Column("adapter_id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, index=True),
    sa.Column("place", sa.Integer, nullable=False),  # 0: current; then the kept ones, the last to answer first
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("lora_path", sa.Text, nullable=False),
    sa.Column("origin", sa.Text, nullable=False),
    sa.Column("nbytes", sa.BigInteger, nullable=False),
    sa.Column("max_rank", sa.Integer, nullable=False),
    sa.Column("is_pinned", sa.Boolean, nullable=False),
    sa.Column("loaded_time", sa.Float, nullable=False),
)


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
        _schema.create_all(fresh)
        return frozenset(_shape(fresh))


def _shape(connection: sa.Connection) -> set[str]:
    """Every object of the file, with what decides on what may be written to it. A view is no table."""
    rows = connection.exec_driver_sql("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master").all()
    shape = set()
    for kind, name, table, sql in rows:
        if kind == "view" and name in _schema.tables:
            raise DamagedJournalError(f"table {name} of the journal is missing, and a view has its name")
        clauses = sorted(set(_CLAUSES.findall(sql.upper())))
        if kind == "table" and name in _schema.tables:
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
    """All that a journal has. names: those that can be used, in the order of their loads; damages: what cannot."""

    base_model: str
    names: Mapping[str, NameRecord]
    last_adapter_id: int
    damages: tuple[Damage, ...] = ()


class JournalTables:
    """One connection. base_model None: whichever the file is of.

    Raises ConfigError for a file that is not this model's, this version's, or not readable at all.
    """

    def __init__(self, file: Path, base_model: str | None) -> None:
        self._file = file
        self._last_adapter_id = 0
        self._base_model = ""
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

    def _open(self, base_model: str | None) -> None:
        with self._engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            driver.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            connection.exec_driver_sql("PRAGMA synchronous=FULL")
            found = connection.exec_driver_sql(f"PRAGMA integrity_check({MAX_FOUND})").scalars().all()
            found = [line for line in found if not _OF_ONE_ROW.match(line)]
            if found not in ([], ["ok"]):
                raise DamagedJournalError(f"{self._file} is damaged: {'; '.join(map(str, found))}"[:MAX_MESSAGE_CHARS])
            _schema.create_all(connection)
            about = {row.key: row.value for row in connection.execute(sa.select(_about))}
            if not about and base_model is not None and not self._has_rows(connection):
                about = {"schema": SCHEMA_VERSION, "base_model": base_model, "last_adapter_id": "0"}
                rows = [{"key": key, "value": value} for key, value in about.items()]
                connection.execute(_about.insert(), rows)
            self._check_about(about)
            if about["schema"] in UPGRADES:
                # in this order, the first one begins the transaction that both are in
                connection.execute(_about.update().where(_about.c.key == "schema").values(value=SCHEMA_VERSION))
                connection.exec_driver_sql(UPGRADES[about["schema"]])
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
        return any(connection.execute(sa.select(table).limit(1)).first() for table in (_names, _versions))

    def _check_about(self, about: Mapping[str, Any]) -> None:
        missing = [key for key in ABOUT if not (isinstance(about.get(key), str) and about[key].isprintable())]
        if missing:
            raise DamagedJournalError(f"{self._file} is damaged: its table `about` lacks {', '.join(missing)}")
        if not _ADAPTER_ID.fullmatch(about["last_adapter_id"]):
            raise DamagedJournalError(f"{self._file} is damaged: last_adapter_id in its table `about` is no number")
        if strange := sorted(map(repr, about.keys() - set(ABOUT))):
            self._damages += (Damage(None, f"its table `about` has {', '.join(strange)[:200]}"),)

    def read(self) -> JournalContents:
        """Every name with its record, and the highest adapter_id ever. Rows that cannot be used are `damages`."""
        with self._refusing_damage(), self._engine.connect() as connection:
            names = {row["name"]: row for row in _raw_rows(connection, sa.select(*_raw(_names)))}
            versions: defaultdict[Any, list[Row]] = defaultdict(list)
            for row in _raw_rows(connection, sa.select(*_raw(_versions)).order_by(_versions.c.place)):
                versions[row["name"]].append(row)
            is_last = _about.c.key == "last_adapter_id"
            self._last_adapter_id = int(connection.execute(sa.select(_about.c.value).where(is_last)).scalar_one())
        records: dict[str, NameRecord] = {}
        damages = [
            *self._damages,
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
        return JournalContents(
            self._base_model, {name: records[name] for name in by_age}, self._last_adapter_id, tuple(damages)
        )

    def copy_to(self, copies: JournalCopies) -> Path:
        """Add a dated copy. Raises OSError or sqlite3.Error."""
        with self._engine.connect() as connection:
            source = connection.connection.driver_connection
            assert isinstance(source, sqlite3.Connection)
            return copies.add(source)

    def raise_last_adapter_id(self, last_adapter_id: int) -> None:
        """No id up to this one is given again, even if no version in the journal has it."""
        self._last_adapter_id = max(self._last_adapter_id, last_adapter_id)

    def write(self, changes: Sequence[NameChange]) -> None:
        """All of it or nothing; it is on disk when this returns."""
        names = [{"old_name": change.name} for change in changes]
        records = {change.name: change.record for change in changes if change.record is not None}
        versions = [row for name, record in records.items() for row in _version_rows(name, record)]
        last_adapter_id = max((self._last_adapter_id, *(row["adapter_id"] for row in versions)))
        is_last = _about.c.key == "last_adapter_id"
        with self._engine.begin() as connection:
            connection.execute(_names.delete().where(_names.c.name == sa.bindparam("old_name")), names)
            connection.execute(_versions.delete().where(_versions.c.name == sa.bindparam("old_name")), names)
            if records:
                connection.execute(_names.insert(), [_name_row(name, record) for name, record in records.items()])
                connection.execute(_versions.insert(), versions)
            connection.execute(_about.update().where(is_last).values(value=str(last_adapter_id)))
        self._last_adapter_id = last_adapter_id

    def write_usage(self, usage: Sequence[NameUsage]) -> None:
        if not usage:
            return
        rows = [{"used_name": each.name, **_counters(each)} for each in usage]
        values: Any = {name: sa.bindparam(name) for name in _counters(usage[0])}
        with self._engine.begin() as connection:
            connection.execute(
                _names.update().where(_names.c.name == sa.bindparam("used_name")).values(values),
                rows,
            )

    def close(self) -> None:
        self._engine.dispose()


def _raw(table: sa.Table) -> list[sa.ColumnElement[Any]]:
    """The columns as SQLite has them: what a column's type makes of a damaged value would be an error of all rows."""
    return [sa.type_coerce(column, sa.types.NullType()).label(column.name) for column in table.columns]


def _raw_rows(connection: sa.Connection, query: sa.Select[Any]) -> list[Row]:
    return [{str(key): value for key, value in row._mapping.items()} for row in connection.execute(query)]


def _name_row(name: str, record: NameRecord) -> dict[str, Any]:
    return {
        "name": name,
        "lora_int_id": record.lora_int_id,
        "alias_of": record.alias_of,
        "last_number": record.last_number,
        "history": record.history,
        **_counters(record.usage),
    }


def _version_rows(name: str, record: NameRecord) -> list[dict[str, Any]]:
    columns = [column.name for column in _versions.columns if column.name not in ("name", "place")]
    return [
        {"name": name, "place": place, **{column: getattr(version, column) for column in columns}}
        for place, version in enumerate(record.versions)
    ]


def _counters(usage: NameUsage) -> dict[str, Any]:
    return {
        "num_loads": usage.num_loads,
        "num_requests": usage.num_requests,
        "last_used_time": usage.last_used_time,
    }
