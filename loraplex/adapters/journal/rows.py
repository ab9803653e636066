"""The tables of a journal by SQLAlchemy Core, in SQLite and PostgreSQL alike, and how records become their rows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from loraplex.adapters.journal.damage import Row
from loraplex.adapters.registry.records import NameRecord, NameUsage

ABOUT = ("schema", "base_model", "last_adapter_id")

_Whole = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
"""SQLite's integers have 64 bits under this name; PostgreSQL's have 32."""

SCHEMA = sa.MetaData()
ABOUT_TABLE = sa.Table(
    "about",
    SCHEMA,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
NAMES_TABLE = sa.Table(
    "names",
    SCHEMA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("lora_int_id", sa.BigInteger, unique=True),
    sa.Column("alias_of", sa.Text),
    sa.Column("last_number", _Whole, nullable=False),
    sa.Column(
        "history", sa.JSON, nullable=False
    ),  # [2, "other"]: numbers of its own versions, and names; the last to answer last
    sa.Column("num_loads", _Whole, nullable=False),
    sa.Column("num_requests", _Whole, nullable=False),
    sa.Column("last_used_time", sa.Float, nullable=False),
)
VERSIONS_TABLE = sa.Table(
    "versions",
    SCHEMA,
    sa.Column("adapter_id", _Whole, primary_key=True, autoincrement=False),
    sa.Column("name", sa.Text, nullable=False, index=True),
    sa.Column("place", _Whole, nullable=False),  # 0: current; then the kept ones, the last to answer first
    sa.Column("number", _Whole, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("lora_path", sa.Text, nullable=False),
    sa.Column("origin", sa.Text, nullable=False),
    sa.Column("nbytes", sa.BigInteger, nullable=False),
    sa.Column("max_rank", _Whole, nullable=False),
    sa.Column("is_pinned", sa.Boolean, nullable=False),
    sa.Column("loaded_time", sa.Float, nullable=False),
)


def raw(table: sa.Table) -> list[sa.ColumnElement[Any]]:
    """The columns as SQLite has them: what a column's type makes of a damaged value would be an error of all rows."""
    return [sa.type_coerce(column, sa.types.NullType()).label(column.name) for column in table.columns]


def raw_rows(connection: sa.Connection, query: sa.Select[Any]) -> list[Row]:
    return [{str(key): value for key, value in row._mapping.items()} for row in connection.execute(query)]


def name_row(name: str, record: NameRecord) -> dict[str, Any]:
    return {
        "name": name,
        "lora_int_id": record.lora_int_id,
        "alias_of": record.alias_of,
        "last_number": record.last_number,
        "history": record.history,
        **counters(record.usage),
    }


def version_rows(name: str, record: NameRecord) -> list[dict[str, Any]]:
    columns = [column.name for column in VERSIONS_TABLE.columns if column.name not in ("name", "place")]
    return [
        {"name": name, "place": place, **{column: getattr(version, column) for column in columns}}
        for place, version in enumerate(record.versions)
    ]


def counters(usage: NameUsage) -> dict[str, Any]:
    return {
        "num_loads": usage.num_loads,
        "num_requests": usage.num_requests,
        "last_used_time": usage.last_used_time,
    }
