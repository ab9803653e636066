"""Rows of tenants in the journal's database: their tables, what is wrong with them, and a repair's copy of them.

The tables are made with the journal's own. `about` has the number of the last change under `REVISION`; while it is
missing the server has no tenants and asks for no key of theirs. Rows that decide what a key opens have a checksum: one
that damage made of another opens nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from loraplex.adapters.journal.damage import Count, Damage, Digest, Row, Text, Time, is_plain_text
from loraplex.adapters.journal.rows import ABOUT_TABLE, SCHEMA, raw, raw_rows

REVISION = "tenants"


def _checksum_column() -> sa.Column[str]:
    return sa.Column("checksum", sa.Text, nullable=False)


TENANTS_TABLE = sa.Table(
    "tenants",
    SCHEMA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("adapter_roots", sa.Text, nullable=False),  # JSON: a list of texts
    sa.Column("limits", sa.Text, nullable=False),  # JSON: numbers by name, of its service level too
    sa.Column("created_time", sa.Float, nullable=False),
    sa.Column("deleted_time", sa.Float),
    _checksum_column(),
)
KEYS_TABLE = sa.Table(
    "tenant_keys",
    SCHEMA,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False, unique=True),
    sa.Column("tenant", sa.Text),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("created_time", sa.Float, nullable=False),
    sa.Column("revoked_time", sa.Float),
    _checksum_column(),
)
SHARES_TABLE = sa.Table(
    "tenant_shares",
    SCHEMA,
    sa.Column("adapter", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, primary_key=True),  # `*`: all of them
    _checksum_column(),
)
USAGE_COUNTS = ("requests", "errors", "prompt_tokens", "cached_tokens", "generated_tokens")
USAGE_TABLE = sa.Table(
    "tenant_usage",
    SCHEMA,
    sa.Column("day", sa.Text, primary_key=True),  # 2026-11-23, in UTC
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("adapter", sa.Text, primary_key=True),  # as registered; empty: the base model
    sa.Column("tenant", sa.Text, nullable=False),  # empty: the operator's
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in USAGE_COUNTS),
    sa.Column("waiting_s", sa.Float, nullable=False),
)

_SEALED = (TENANTS_TABLE, KEYS_TABLE, SHARES_TABLE)
ADD_CHECKSUMS = tuple(f"ALTER TABLE {each.name} ADD COLUMN checksum TEXT NOT NULL DEFAULT ''" for each in _SEALED)
"""To the tables of an older schema; `seal_rows` gives their rows theirs."""

_REVISION = re.compile(r"[1-9][0-9]{0,15}")

KeyId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}\Z")]
TenantName = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9._-]{0,62}\Z")]


class TenantRow(msgspec.Struct, forbid_unknown_fields=True):
    name: TenantName
    adapter_roots: str
    limits: str
    created_time: Time
    deleted_time: Time | None


class KeyRow(msgspec.Struct, forbid_unknown_fields=True):
    key_id: KeyId
    digest: Digest
    tenant: TenantName | None
    role: Literal["admin", "operator", "tenant", "read-only"]
    label: Annotated[str, Meta(max_length=200)]
    created_time: Time
    revoked_time: Time | None


class ShareRow(msgspec.Struct, forbid_unknown_fields=True):
    adapter: Text
    tenant: Annotated[str, Meta(pattern=r"\A(\*|[a-z0-9][a-z0-9._-]{0,62})\Z")]


class UsageRow(msgspec.Struct, forbid_unknown_fields=True):
    day: Annotated[str, Meta(pattern=r"\A\d{4}-\d\d-\d\d\Z")]
    key_id: str
    adapter: str
    tenant: str
    requests: Count
    errors: Count
    prompt_tokens: Count
    cached_tokens: Count
    generated_tokens: Count
    waiting_s: float


WRONG_ROLES = {True: ("tenant",), False: ("admin", "operator")}
"""Without a tenant, and with one."""

ROW_KINDS: Mapping[str, type[msgspec.Struct]] = {
    "tenants": TenantRow,
    "tenant_keys": KeyRow,
    "tenant_shares": ShareRow,
    "tenant_usage": UsageRow,
}


@dataclass(frozen=True, slots=True)
class TenantRows:
    """Sound rows by table, the number of the last change (None: there are no tenants), and what is not sound."""

    revision: str | None = None
    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    damages: tuple[Damage, ...] = ()

    def write(self, connection: sa.Connection) -> None:
        """Into empty tables."""
        if self.revision is not None:
            connection.execute(ABOUT_TABLE.insert(), {"key": REVISION, "value": self.revision})
        for name, rows in self.rows.items():
            if rows:
                connection.execute(SCHEMA.tables[name].insert(), [sealed(name, row) for row in rows])


def sealed(table: str, row: Row) -> dict[str, Any]:
    """The row as it is written, with its checksum where its table has one."""
    has_checksum = "checksum" in SCHEMA.tables[table].columns
    return {**row, "checksum": _checksum(row, ROW_KINDS[table])} if has_checksum else dict(row)


def seal_rows(connection: sa.Connection) -> None:
    """Rows that have no checksum yet, and can be used, get theirs."""
    for table in _SEALED:
        for row in map(dict, raw_rows(connection, sa.select(*raw(table)).where(table.c.checksum == ""))):
            del row["checksum"]
            if _fault(row, ROW_KINDS[table.name]) is None:
                is_it = sa.and_(*(column == row[column.name] for column in table.primary_key))
                connection.execute(table.update().where(is_it).values(checksum=sealed(table.name, row)["checksum"]))


def is_revision(found: object) -> bool:
    """Whether it counts changes. 0 does not: without any change there is no number."""
    return _REVISION.fullmatch(str(found)) is not None


def read_tenant_rows(connection: sa.Connection, *, with_usage: bool = False) -> TenantRows:
    """A damaged row opens nothing: it is left out, and a repair drops it. A tenant whose name is left, in its row or in
    a key's, is a deleted one: its adapters do not become the operator's."""
    found = connection.execute(sa.select(ABOUT_TABLE.c.value).where(ABOUT_TABLE.c.key == REVISION)).scalar()
    rows: dict[str, list[Row]] = {}
    damages = []
    if found is not None and not is_revision(found):
        damages.append(Damage(None, "the number of the last change of its tenants is none from 1 on"))
        found = "1"  # there were tenants: the server stays closed
    for name in ROW_KINDS:
        rows[name] = []
        if name == USAGE_TABLE.name and not with_usage:
            continue
        for row in map(dict, raw_rows(connection, sa.select(*raw(SCHEMA.tables[name])))):
            wrong = take_checksum(name, row)
            if wrong is None:
                rows[name].append(row)
            else:
                if name == TENANTS_TABLE.name and _fault({**row, **_CLOSED}, TenantRow) is None:
                    rows[name].append({**row, **_CLOSED})  # else its adapters became the operator's
                damages.append(Damage(None, f"a row of its table {name} ({_shown(row)}) cannot be used: {wrong}"))
    known = {row["name"] for row in rows["tenants"]}
    for name in sorted({row["tenant"] for row in rows["tenant_keys"] if row["tenant"] is not None} - known):
        damages.append(Damage(None, f"tenant {name!r} has keys and no row: it is closed, and its name stays its own"))
        rows["tenants"].append(_closed_tenant(name))
    if found is None and any(rows[each] for each in ("tenants", "tenant_keys")):
        damages.append(Damage(None, "it has tenants, and no number of their last change"))
        found = "1"
    return TenantRows(found, rows, tuple(damages))


def take_checksum(table: str, row: dict[str, Any]) -> str | None:
    """Takes it off the row; what is wrong with the row."""
    checksum = row.pop("checksum", None)
    wrong = _fault(row, ROW_KINDS[table])
    if wrong is None and checksum != sealed(table, row).get("checksum"):
        return "it is not what was written: its checksum is another one's"
    return wrong


_CLOSED: Row = {"adapter_roots": "[]", "limits": "{}", "created_time": 0.0, "deleted_time": 0.0}
"""Of a tenant that is known by its name alone: deleted, so that its keys open nothing."""


def _closed_tenant(name: str) -> Row:
    return {"name": name, **_CLOSED}


def _fault(row: Row, kind: type[msgspec.Struct]) -> str | None:
    for column, value in row.items():
        if isinstance(value, str) and not is_plain_text(value):
            return f"its {column} is not text: it has a NUL character or is not UTF-8"
    try:
        made: Any = msgspec.convert(dict(row), kind)
        if kind is TenantRow:
            msgspec.json.decode(made.adapter_roots, type=list[str])
            msgspec.json.decode(made.limits, type=dict[str, float])
        if kind is KeyRow and not made.digest.startswith(made.key_id):
            return "its key_id is not that of its digest"
        if kind is KeyRow and made.role in WRONG_ROLES[made.tenant is None]:
            return f"its role is {made.role!r}, and its tenant {made.tenant!r}"
    except (msgspec.MsgspecError, UnicodeError) as error:
        return str(error)[:200]
    return None


def _checksum(row: Row, kind: type[msgspec.Struct]) -> str:
    """Half of the sha256 of the row's values as JSON, in the order of the table's columns."""
    values = msgspec.structs.astuple(msgspec.convert(dict(row), kind))
    return hashlib.sha256(msgspec.json.encode(values)).hexdigest()[:32]


def _shown(row: Row) -> str:
    return ", ".join(str(value)[:40] for value in list(row.values())[:1])
