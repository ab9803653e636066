"""The tables of a registry in PostgreSQL: the journal's own, a log of what changed in which turn, and texts.

A turn has a number, `sequence`. A server that has seen turn N learns of all that came later by the names that the log
has after N; their rows are what they are now. The log keeps the last KEPT_TURNS; a server that was away for longer
reads everything. Each server says in `servers` which turns it has read and which its names have, several times a
second. One that finds a smaller number, or an older row of its own, reads everything, too: the database was restored.
Ids of adapters that it knows come no second time then: what still runs has them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from loraplex.adapters.journal.damage import Damage, DamagedRecordError, Row, check_together, name_record, summary
from loraplex.adapters.journal.rows import (
    ABOUT,
    ABOUT_TABLE,
    NAMES_TABLE,
    SCHEMA,
    VERSIONS_TABLE,
    name_row,
    raw_rows,
    version_rows,
)
from loraplex.adapters.journal.tables import SCHEMA_VERSION, UPGRADES
from loraplex.adapters.journal.tenant_rows import seal_rows
from loraplex.adapters.registry.records import AdapterText, NameChange, NameRecord
from loraplex.errors import ConfigError

CHANNEL = "loraplex"
KEPT_TURNS = 10_000
_KEY = "hashtextextended(current_schema() || '/' || {}, 0)"
"""Of an advisory lock: those of a database are numbers that all its schemas share."""

SHARED = sa.MetaData()
CHANGES_TABLE = sa.Table(
    "changes",
    SHARED,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("name", sa.Text, primary_key=True),
)
TEXTS_TABLE = sa.Table(
    "texts",
    SHARED,
    sa.Column("adapter_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)
SERVERS_TABLE = sa.Table(
    "servers",
    SHARED,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("seen", sa.BigInteger, nullable=False),
    sa.Column("applied", sa.BigInteger, nullable=False),
    sa.Column("at", sa.DateTime(timezone=True), nullable=False),
)


@dataclass(frozen=True, slots=True)
class News:
    """What changed until turn `sequence`. damages: names that are there and cannot be used, and why. is_restored: the
    database has fewer turns than it had."""

    sequence: int
    changes: tuple[NameChange, ...]
    damages: tuple[Damage, ...] = ()
    is_restored: bool = False


def make_tables(connection: sa.Connection, base_model: str, place: str) -> None:
    """Of a new database. Raises ConfigError for one that is another model's or another version's, or no registry."""
    connection.exec_driver_sql("BEGIN")
    connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({_KEY.format(':name')})"), {"name": ""})  # of all starts
    SCHEMA.create_all(connection)
    SHARED.create_all(connection)
    known = _about(connection)
    if not known and connection.execute(sa.select(NAMES_TABLE.c.name).limit(1)).first() is None:
        known = {"schema": SCHEMA_VERSION, "base_model": base_model, "last_adapter_id": "0", "sequence": "0"}
        connection.execute(ABOUT_TABLE.insert(), [{"key": key, "value": value} for key, value in known.items()])
    if known.get("schema") in ("2", "3"):  # the tables of tenants are made by now
        for statement in UPGRADES[known["schema"]]:
            connection.exec_driver_sql(statement)
        if known["schema"] == "3":
            seal_rows(connection)
        known["schema"] = SCHEMA_VERSION
        connection.execute(ABOUT_TABLE.update().where(ABOUT_TABLE.c.key == "schema").values(value=SCHEMA_VERSION))
    connection.exec_driver_sql("COMMIT")
    if missing := [key for key in (*ABOUT, "sequence") if key not in known]:
        raise ConfigError(f"database {place} is no registry of Loraplex: its table `about` lacks {', '.join(missing)}")
    if known["schema"] != SCHEMA_VERSION:
        raise ConfigError(
            f"database {place} was written by another version of Loraplex (schema {known['schema'][:40]}, this one has "
            f"{SCHEMA_VERSION}); run that version, or give this one a database of its own"
        )
    if known["base_model"] != base_model:
        raise ConfigError(
            f"database {place} has the adapters of base model {known['base_model'][:200]!r}, this one is "
            f"{base_model!r}; give each model a database, or a schema, of its own"
        )


def _about(connection: sa.Connection) -> dict[str, str]:
    return {row.key: row.value for row in connection.execute(sa.select(ABOUT_TABLE))}


def sequence_of(connection: sa.Connection, *, is_locked: bool = False) -> int:
    """The number of the last turn. is_locked: the next one is this session's, until its transaction ends."""
    query = sa.select(ABOUT_TABLE.c.value).where(ABOUT_TABLE.c.key == "sequence")
    return int(connection.execute(query.with_for_update() if is_locked else query).scalar_one())


@dataclass(frozen=True, slots=True)
class Beat:
    """sequence: the number of the last turn. last_adapter_id: as it is written. before, now: the times of this server's
    row, by the database's clock; before is None where there was no row."""

    sequence: int
    last_adapter_id: str
    before: datetime | None
    now: datetime


def beat(connection: sa.Connection, server: str, seen: int, applied: int) -> Beat:
    """This server is there, and has so much."""
    query = sa.text(
        "WITH beat AS (INSERT INTO servers (id, seen, applied, at) VALUES (:id, :seen, :applied, clock_timestamp()) "
        "ON CONFLICT (id) DO UPDATE SET seen = EXCLUDED.seen, applied = EXCLUDED.applied, at = EXCLUDED.at "
        "RETURNING at) SELECT (SELECT value::bigint FROM about WHERE key = 'sequence'), "
        "(SELECT value FROM about WHERE key = 'last_adapter_id'), (SELECT at FROM servers WHERE id = :id), at FROM beat"
    )
    return Beat(*connection.execute(query, {"id": server, "seen": seen, "applied": applied}).one())


def join_servers(connection: sa.Connection, server: str, applied: int) -> None:
    """From now on turns wait for this server. Those that left without a word yesterday are forgotten."""
    connection.execute(sa.text("DELETE FROM servers WHERE at < clock_timestamp() - interval '1 day'"))
    beat(connection, server, applied, applied)


def leave_servers(connection: sa.Connection, server: str) -> None:
    connection.execute(SERVERS_TABLE.delete().where(SERVERS_TABLE.c.id == server))


def least_of_others(connection: sa.Connection, server: str, lease_s: float | None) -> tuple[float, float]:
    """The last turn that the names of all other servers have, and the last that all have read; inf: there is no other.

    lease_s: one that has not been heard for so long refuses its names, and is not counted; None: each is counted.
    """
    query = sa.text(
        "SELECT min(applied), min(greatest(seen, applied)) FROM servers "
        "WHERE id <> :id AND at > clock_timestamp() - make_interval(secs => :lease_s)"
    )
    row = connection.execute(query, {"id": server, "lease_s": 86400.0 if lease_s is None else lease_s}).one()
    return (math.inf, math.inf) if row[0] is None else (row[0], row[1])


def lock_verb(connection: sa.Connection, name: str) -> bool:
    query = sa.text(f"SELECT pg_try_advisory_lock({_KEY.format(':name')})")
    return bool(connection.execute(query, {"name": name}).scalar_one())


def unlock_verb(connection: sa.Connection, name: str) -> None:
    connection.execute(sa.text(f"SELECT pg_advisory_unlock({_KEY.format(':name')})"), {"name": name})


def take_adapter_id(connection: sa.Connection, known: int) -> int:
    """known: one that was used, whatever the database says: it may have been restored."""
    query = sa.text(
        "UPDATE about SET value = (greatest(value::bigint, :known) + 1)::text "
        "WHERE key = 'last_adapter_id' RETURNING value::bigint"
    )
    return int(connection.execute(query, {"known": known}).scalar_one())


def raise_last_adapter_id(connection: sa.Connection, written: str, known: int) -> None:
    """From what was read, unless another server has raised it meanwhile."""
    is_last = (ABOUT_TABLE.c.key == "last_adapter_id") & (ABOUT_TABLE.c.value == written)
    connection.execute(ABOUT_TABLE.update().where(is_last).values(value=str(known)))


# ------------------------------------------------------------------------------------------------------------- reading


def read_all(connection: sa.Connection, known: Iterable[str] = ()) -> News:
    """Everything; of the known names those that are gone, too. In one transaction that sees one moment."""
    sequence = sequence_of(connection)
    records, damages = _records(connection, None)
    damages += check_together(records, int(_about(connection)["last_adapter_id"]))
    unusable = {damage.name for damage in damages}
    by_age = sorted(records.keys() - unusable, key=lambda name: records[name].versions[0].adapter_id)
    gone = [name for name in known if name not in records and name not in unusable]
    changes = (*(NameChange(name, None) for name in gone), *(NameChange(name, records[name]) for name in by_age))
    return News(sequence, changes, tuple(damages))


def read_news(
    connection: sa.Connection, seen: int, known: Collection[str], unsure: Collection[str], at_least: float
) -> News:
    """What changed after turn `seen`, and what the unsure names are. In one transaction that sees one moment.

    at_least: the number of a turn that was there already; inf: the database was restored.
    """
    sequence = sequence_of(connection)
    query = sa.select(CHANGES_TABLE.c.name).where(CHANGES_TABLE.c.sequence > seen).distinct()
    oldest = connection.execute(sa.select(sa.func.min(CHANGES_TABLE.c.sequence))).scalar_one()
    if sequence < at_least or (sequence > seen and (oldest is None or seen + 1 < oldest)):
        return replace(read_all(connection, known), is_restored=sequence < at_least)
    names = {*connection.execute(query).scalars(), *unsure}
    if not names:
        return News(sequence, ())
    records, damages = _records(connection, sorted(names))
    unusable = {damage.name for damage in damages}
    changes = (NameChange(name, records.get(name)) for name in sorted(names - unusable))
    return News(sequence, tuple(changes), tuple(damages))


def _records(connection: sa.Connection, names: Sequence[str] | None) -> tuple[dict[str, NameRecord], list[Damage]]:
    """None: of all names."""
    rows = _rows(connection, NAMES_TABLE, NAMES_TABLE.c.name, names)
    versions: defaultdict[Any, list[Row]] = defaultdict(list)
    for row in _rows(connection, VERSIONS_TABLE, VERSIONS_TABLE.c.name, names):
        versions[row["name"]].append(row)
    ids = None if names is None else [row["adapter_id"] for each in versions.values() for row in each]
    texts = {row["adapter_id"]: row for row in _rows(connection, TEXTS_TABLE, TEXTS_TABLE.c.adapter_id, ids)}
    records, damages = {}, []
    for row in rows:
        name = row["name"]
        try:
            records[name] = _with_texts(name_record(row, sorted(versions[name], key=lambda each: each["place"])), texts)
        except DamagedRecordError as error:
            damages.append(Damage(name, str(error)))
    return records, damages


def _rows(
    connection: sa.Connection, table: sa.Table, column: sa.ColumnElement[Any], wanted: Sequence[Any] | None
) -> list[Row]:
    """As SQLite has them: JSON is text, a truth value a number."""
    plain = {sa.JSON: sa.Text, sa.Boolean: sa.Integer}
    columns = [
        sa.cast(each, plain[type(each.type)]).label(each.name) if type(each.type) in plain else each
        for each in table.columns
    ]
    query = sa.select(*columns)
    if wanted is not None:
        query = query.where(column == sa.any_(sa.literal(list(wanted), pg.ARRAY(column.type))))
    return raw_rows(connection, query)


def _with_texts(record: NameRecord, texts: Mapping[int, Row]) -> NameRecord:
    versions = []
    for version in record.versions:
        row = texts.get(version.adapter_id)
        if row is not None:
            try:
                text = AdapterText.of(json.loads(row["document"]))
            except (ValueError, RecursionError) as error:
                raise DamagedRecordError(f"the text of its version {version.number} is no JSON: {error}") from None
            if text.digest != row["digest"]:
                raise DamagedRecordError(f"the text of its version {version.number} is not what was written")
            version = replace(version, text=text)
        versions.append(version)
    return replace(record, versions=tuple(versions))


def refuse_damage(news: News, place: str) -> None:
    """Raises ConfigError."""
    if news.damages:
        raise ConfigError(
            f"database {place} is damaged: {summary(news.damages)}; restore it from a backup, or delete the rows of "
            "these names from its tables `names` and `versions`"
        )


# ------------------------------------------------------------------------------------------------------------- writing


def write_turn(connection: sa.Connection, changes: Sequence[NameChange], sequence: int) -> None:
    """In the transaction that has the turn; it is told to the servers when that is committed."""
    names = [change.name for change in changes]
    records = {change.name: change.record for change in changes if change.record is not None}
    is_named = sa.any_(sa.literal(names, pg.ARRAY(sa.Text)))
    deleted = connection.execute(
        VERSIONS_TABLE.delete().where(VERSIONS_TABLE.c.name == is_named).returning(VERSIONS_TABLE.c.adapter_id)
    )
    earlier = list(deleted.scalars())
    gone = sa.any_(sa.literal([name for name in names if name not in records], pg.ARRAY(sa.Text)))
    connection.execute(NAMES_TABLE.delete().where(NAMES_TABLE.c.name == gone))
    if records:
        insert = pg.insert(NAMES_TABLE)
        counted = ("name", "num_requests", "last_used_time")  # the counters of all servers add up (`write_counts`)
        kept = {each.name: insert.excluded[each.name] for each in NAMES_TABLE.columns if each.name not in counted}
        connection.execute(
            insert.on_conflict_do_update(index_elements=["name"], set_=kept),
            [name_row(name, record) for name, record in records.items()],
        )
        rows = [row for name, record in records.items() for row in version_rows(name, record)]
        connection.execute(VERSIONS_TABLE.insert(), rows)
    _write_texts(connection, records.values(), earlier)
    connection.execute(CHANGES_TABLE.insert(), [{"sequence": sequence, "name": name} for name in dict.fromkeys(names)])
    connection.execute(CHANGES_TABLE.delete().where(CHANGES_TABLE.c.sequence <= sequence - KEPT_TURNS))
    connection.execute(ABOUT_TABLE.update().where(ABOUT_TABLE.c.key == "sequence").values(value=str(sequence)))
    connection.execute(sa.select(sa.func.pg_notify(CHANNEL, "")))


def _write_texts(connection: sa.Connection, records: Iterable[NameRecord], earlier: Sequence[int]) -> None:
    versions = [version for record in records for version in record.versions]
    texts = [
        {"adapter_id": each.adapter_id, "digest": each.text.digest, "document": each.text.json.decode()}
        for each in versions
        if each.text is not None
    ]
    if texts:
        connection.execute(pg.insert(TEXTS_TABLE).on_conflict_do_nothing(), texts)
    if lost := sorted(set(earlier) - {each.adapter_id for each in versions}):
        is_lost = sa.any_(sa.literal(lost, pg.ARRAY(sa.BigInteger)))
        connection.execute(TEXTS_TABLE.delete().where(TEXTS_TABLE.c.adapter_id == is_lost))


def write_counts(connection: sa.Connection, counted: Sequence[tuple[str, int, float]]) -> None:
    """Name, further requests, and when the last one was. In one order, or two servers wait for each other's rows."""
    query = NAMES_TABLE.update().where(NAMES_TABLE.c.name == sa.bindparam("used_name"))
    more = {
        "num_requests": NAMES_TABLE.c.num_requests + sa.bindparam("further", type_=sa.BigInteger),
        "last_used_time": sa.func.greatest(NAMES_TABLE.c.last_used_time, sa.bindparam("used_time", type_=sa.Float)),
    }
    rows = [{"used_name": name, "further": further, "used_time": time} for name, further, time in sorted(counted)]
    connection.execute(query.values(more), rows)
