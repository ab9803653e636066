"""The tables of the journal, by SQLAlchemy Core: how records become rows and rows records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from loraplex.adapters.registry.records import NameChange, NameRecord, NameUsage, VersionRecord
from loraplex.errors import ConfigError

SCHEMA_VERSION = "2"
UPGRADES = {"1": "ALTER TABLE names ADD COLUMN history TEXT NOT NULL DEFAULT '[]'"}
"""Schema to what makes it the present one: a registry without a history takes the order of what is kept."""

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


class JournalTables:
    """One connection. Raises ConfigError for a file that is not this model's, this version's, or not readable at all."""

    def __init__(self, file: Path, base_model: str) -> None:
        self._file = file
        self._last_adapter_id = 0
        self._engine = sa.create_engine(
            sa.URL.create("sqlite", database=str(file)),
            poolclass=sa.StaticPool,
            connect_args={"check_same_thread": False},
        )
        try:
            self._open(base_model)
        except sa.exc.DatabaseError as error:
            self.close()
            raise ConfigError(
                f"the state directory's {file} cannot be read ({error.orig}); move it away to start with no adapters"
            ) from error
        except BaseException:
            self.close()
            raise

    def _open(self, base_model: str) -> None:
        with self._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            connection.exec_driver_sql("PRAGMA synchronous=FULL")
            _schema.create_all(connection)
            about = {row.key: row.value for row in connection.execute(sa.select(_about))}
            if "schema" not in about:
                facts = {"schema": SCHEMA_VERSION, "base_model": base_model, "last_adapter_id": "0"}
                rows = [{"key": key, "value": value} for key, value in facts.items()]
                connection.execute(_about.insert(), rows)
                about = facts
            if about["schema"] in UPGRADES:
                # in this order, the first one begins the transaction that both are in
                connection.execute(_about.update().where(_about.c.key == "schema").values(value=SCHEMA_VERSION))
                connection.exec_driver_sql(UPGRADES[about["schema"]])
                about["schema"] = SCHEMA_VERSION
            connection.commit()
        if about["schema"] != SCHEMA_VERSION:
            raise ConfigError(
                f"{self._file} was written by another version of Loraplex (schema {about['schema']}, this one has "
                f"{SCHEMA_VERSION}); run that version, or give this one a --state-dir of its own"
            )
        if about["base_model"] != base_model:
            raise ConfigError(
                f"{self._file} has the adapters of base model {about['base_model']!r}, this one is {base_model!r}; "
                "give each model a --state-dir of its own"
            )

    def read(self) -> tuple[dict[str, NameRecord], int]:
        """Every name with its record, in the order of their loads, and the highest adapter_id ever."""
        versions: defaultdict[str, list[VersionRecord]] = defaultdict(list)
        names: dict[str, NameRecord] = {}
        with self._engine.connect() as connection:
            for row in connection.execute(sa.select(_versions).order_by(_versions.c.name, _versions.c.place)):
                fields = dict(row._mapping)
                del fields["place"]
                versions[fields.pop("name")].append(VersionRecord(**fields))
            for row in connection.execute(sa.select(_names)):
                usage = NameUsage(row.name, row.num_loads, row.num_requests, row.last_used_time)
                kept = tuple(versions[row.name])
                record = NameRecord(row.lora_int_id, row.alias_of, row.last_number, kept, usage, tuple(row.history))
                names[row.name] = record
            is_last = _about.c.key == "last_adapter_id"
            self._last_adapter_id = int(connection.execute(sa.select(_about.c.value).where(is_last)).scalar_one())
        by_age = sorted(names, key=lambda name: names[name].versions[0].adapter_id)
        return {name: names[name] for name in by_age}, self._last_adapter_id

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
    return [{"name": name, "place": place, **asdict(version)} for place, version in enumerate(record.versions)]


def _counters(usage: NameUsage) -> dict[str, Any]:
    return {
        "num_loads": usage.num_loads,
        "num_requests": usage.num_requests,
        "last_used_time": usage.last_used_time,
    }
