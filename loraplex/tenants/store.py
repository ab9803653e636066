"""Tenants, keys and shares in the journal's database: written by the command line and by servers alike.

Every change raises the number under `REVISION` in its own transaction, first, so that changes take turns. A server asks
for that number (`directory.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import tuple_

from loraplex.adapters.journal.database import Database, reason_of
from loraplex.adapters.journal.rows import ABOUT_TABLE, NAMES_TABLE, raw, raw_rows
from loraplex.adapters.journal.tables import SCHEMA_VERSION, engine_of
from loraplex.adapters.journal.tenant_rows import (
    KEYS_TABLE,
    REVISION,
    SHARES_TABLE,
    TENANTS_TABLE,
    USAGE_COUNTS,
    USAGE_TABLE,
    is_revision,
    read_tenant_rows,
    sealed,
    take_checksum,
)
from loraplex.adapters.registry.adapter_name import check_adapter_name
from loraplex.errors import (
    ConfigError,
    DatabaseUnavailableError,
    InvalidRequestError,
    JournalError,
    KeyNotFoundError,
    TenantConflictError,
    TenantNotFoundError,
    shown,
)
from loraplex.tenants.limits import Limits
from loraplex.tenants.records import (
    MAX_KEYS_OF_A_TENANT,
    MAX_SHARES,
    MAX_TENANTS,
    Key,
    Role,
    Tenant,
    TenantTable,
    check_label,
    check_role,
    check_root,
    check_tenant_name,
    key_digest,
    new_secret,
)
from loraplex.tenants.service_level import BOUNDS, ServiceLevel
from loraplex.tenants.usage import Counts, UsageKey, UsageQuery

_COUNTED = (*USAGE_COUNTS, "waiting_s")
_ADD_USAGE = sa.text(
    f"INSERT INTO tenant_usage (day, key_id, adapter, tenant, {', '.join(_COUNTED)}) "
    f"VALUES (:day, :key_id, :adapter, :tenant, {', '.join(f':{name}' for name in _COUNTED)}) "
    "ON CONFLICT (day, key_id, adapter) DO UPDATE SET "
    + ", ".join(f"{name} = tenant_usage.{name} + excluded.{name}" for name in _COUNTED)
)
_FIRST = sa.text(f"INSERT INTO about (key, value) VALUES ('{REVISION}', '0') ON CONFLICT DO NOTHING")
_NEXT = sa.text(f"UPDATE about SET value = CAST(CAST(value AS BIGINT) + 1 AS TEXT) WHERE key = '{REVISION}'")


_log = logging.getLogger(__name__)


class _DamagedRowError(JournalError):
    """A row that is to be changed is not what was written."""


class TenantStore:
    """Thread-safe; every method is one transaction. Raises JournalError when the database cannot be used.

    What a server asks again and again, `revision` and `read`, has sessions of its own, and waits for nothing else.
    """

    def __init__(self, engine: sa.Engine, clock: Callable[[], float] = time.time) -> None:
        self.engine = engine
        self._watched = sa.Engine(engine.pool.recreate(), engine.dialect, engine.url)
        self._clock = clock

    def close(self) -> None:
        self.engine.dispose()
        self._watched.dispose()

    @contextmanager
    def reading(self, engine: sa.Engine | None = None) -> Iterator[sa.Connection]:
        with _as_journal_errors(), (engine or self.engine).connect() as connection:
            yield connection

    @contextmanager
    def _change(self) -> Iterator[sa.Connection]:
        with _as_journal_errors(), self.engine.begin() as connection:
            connection.execute(_FIRST)
            connection.execute(_NEXT)
            damage = None
            try:
                yield connection
            except _DamagedRowError as error:  # found before anything is changed: servers read again, and close the row
                damage = error
        if damage is not None:
            raise damage

    def revision(self) -> int:
        """0: there was never a tenant or a key, no server has made the tables yet, or what is there is no number."""
        query = sa.select(ABOUT_TABLE.c.value).where(ABOUT_TABLE.c.key == REVISION)
        with self.reading(self._watched) as connection:
            try:
                found = connection.execute(query).scalar()
                return int(found) if found is not None and is_revision(found) else 0
            except sa.exc.DBAPIError:
                connection.rollback()
                if sa.inspect(connection).has_table(ABOUT_TABLE.name):
                    raise
                return 0

    def read(self) -> TenantTable:
        """Rows that cannot be used open nothing, and a number that is none counts as one: only a database without any
        rows has revision 0."""
        with self.reading(self._watched) as connection:
            if not sa.inspect(connection).has_table(ABOUT_TABLE.name):
                return TenantTable()
            found = read_tenant_rows(connection)
        tenants = {row["name"]: _tenant_or_closed(row) for row in found.rows["tenants"]}
        keys = {bytes.fromhex(row["digest"]): _key(row) for row in found.rows["tenant_keys"]}
        living = {name for name, tenant in tenants.items() if not tenant.is_deleted} | {None}
        shares: dict[str, frozenset[str]] = {}
        for row in found.rows["tenant_shares"]:
            shares[row["adapter"]] = shares.get(row["adapter"], frozenset()) | {row["tenant"]}
        valid = {digest: key for digest, key in keys.items() if not key.is_revoked and key.tenant in living}
        return TenantTable(int(found.revision or 0), tenants, valid, shares)

    # ---------------------------------------------------------------------------------------------------------- tenants

    def tenants(self) -> list[Tenant]:
        """Those that are not deleted, by name."""
        with self.reading() as connection:
            rows = _sound_rows(connection, TENANTS_TABLE, TENANTS_TABLE.c.name)
        return [tenant for tenant in map(_tenant_or_closed, rows) if not tenant.is_deleted]

    def tenant(self, name: str) -> Tenant:
        """Raises TenantNotFoundError."""
        with self.reading() as connection:
            return _living(connection, name)

    def create_tenant(
        self,
        name: str,
        adapter_roots: Sequence[str] = (),
        limits: Limits | None = None,
        service: ServiceLevel | None = None,
    ) -> Tenant:
        """Raises InvalidRequestError for a name that cannot be, and TenantConflictError for one that was ever given,
        or that adapters of the operator begin with."""
        check_tenant_name(name)
        for root in adapter_roots:
            check_root(root)
        tenant = Tenant(name, self._clock(), tuple(adapter_roots), limits or Limits(), service or ServiceLevel())
        with self._change() as connection:
            is_old = sa.select(TENANTS_TABLE.c.deleted_time).where(TENANTS_TABLE.c.name == name)
            for row in connection.execute(is_old):
                raise TenantConflictError(f"tenant {name!r} {'is there' if row[0] is None else 'was deleted'} already")
            begins = NAMES_TABLE.c.name.startswith(f"{name}/", autoescape=True)
            taken = connection.execute(sa.select(NAMES_TABLE.c.name).where(begins).limit(1)).scalar()
            if taken is not None:
                text = f"adapter {shown(taken)} is the operator's, and would be tenant {name!r}'s: choose another name"
                raise TenantConflictError(text, param="name")
            _check_room(connection, TENANTS_TABLE, MAX_TENANTS, "tenants")
            connection.execute(TENANTS_TABLE.insert(), _tenant_row(tenant))
        return tenant

    def change_tenant(
        self,
        name: str,
        adapter_roots: Sequence[str] | None = None,
        limits: Limits | None = None,
        service: ServiceLevel | None = None,
    ) -> Tenant:
        """What is None stays. Raises TenantNotFoundError, and InvalidRequestError for a root that is no place."""
        for root in adapter_roots or ():
            check_root(root)
        with self._change() as connection:
            tenant = _living(connection, name)
            tenant = replace(
                tenant,
                adapter_roots=tenant.adapter_roots if adapter_roots is None else tuple(adapter_roots),
                limits=limits or tenant.limits,
                service=service or tenant.service,
            )
            connection.execute(TENANTS_TABLE.update().where(TENANTS_TABLE.c.name == name).values(_tenant_row(tenant)))
        return tenant

    def delete_tenant(self, name: str) -> Tenant:
        """Its keys open nothing any longer, and what was granted to it is not. Its adapters stay, for the operator to
        unload, and its name is never given again. Raises TenantNotFoundError."""
        with self._change() as connection:
            tenant = _living(connection, name)
            row = _tenant_row(tenant, self._clock())
            connection.execute(TENANTS_TABLE.update().where(TENANTS_TABLE.c.name == name).values(row))
            connection.execute(SHARES_TABLE.delete().where(SHARES_TABLE.c.tenant == name))
        return replace(tenant, is_deleted=True)

    # ------------------------------------------------------------------------------------------------------------- keys

    def keys_of(self, tenant: str | None = None) -> list[Key]:
        """Of one tenant, or all; the oldest first, the revoked ones too."""
        with self.reading() as connection:
            rows = _sound_rows(connection, KEYS_TABLE, KEYS_TABLE.c.created_time, KEYS_TABLE.c.key_id)
        return [_key(row) for row in rows if tenant is None or row["tenant"] == tenant]

    def create_key(self, role: Role, tenant: str | None = None, label: str = "") -> tuple[Key, str]:
        """The key's record and the key, which is nowhere else. Raises InvalidRequestError, TenantNotFoundError, and
        TenantConflictError for too many keys."""
        check_role(role, tenant)
        check_label(label)
        with self._change() as connection:
            if tenant is not None:
                _living(connection, tenant)
            has_owner = KEYS_TABLE.c.tenant.is_(None) if tenant is None else KEYS_TABLE.c.tenant == tenant
            _check_room(connection, KEYS_TABLE, MAX_KEYS_OF_A_TENANT, "keys", has_owner)
            taken = set(connection.execute(sa.select(KEYS_TABLE.c.key_id)).scalars())
            secret = new_secret()
            while key_digest(secret).hex()[:8] in taken:
                secret = new_secret()
            digest = key_digest(secret).hex()
            key = Key(digest[:8], tenant, role, label, self._clock())
            row = {"digest": digest, "role": role.value, "revoked_time": None}
            named = ("key_id", "tenant", "label", "created_time")
            row |= {each: getattr(key, each) for each in named}
            connection.execute(KEYS_TABLE.insert(), sealed("tenant_keys", row))
        return key, secret

    def revoke_key(self, key_id: str) -> Key:
        """A second time it changes nothing. Raises KeyNotFoundError."""
        with self._change() as connection:
            is_it = KEYS_TABLE.c.key_id == key_id
            row = connection.execute(sa.select(KEYS_TABLE).where(is_it)).mappings().first()
            if row is None:
                raise KeyNotFoundError(f"there is no key {shown(key_id)}; `loraplex key list` has their ids")
            found = _sound(KEYS_TABLE, row)
            if found["revoked_time"] is None:
                values = sealed("tenant_keys", {**found, "revoked_time": self._clock()})
                connection.execute(KEYS_TABLE.update().where(is_it).values(values))
            return replace(_key(found), is_revoked=True)

    # ----------------------------------------------------------------------------------------------------------- shares

    def share(self, adapter: str, tenants: Iterable[str]) -> tuple[str, ...]:
        """Who may use an adapter beside its owner from now on: tenants, or `TenantTable.ALL`. Loaded or not.

        Raises TenantNotFoundError, and InvalidRequestError for what is no name of an adapter.
        """
        check_adapter_name(adapter, (), param="adapter")
        wanted = sorted(set(tenants))
        with self._change() as connection:
            for tenant in wanted:
                if tenant != TenantTable.ALL:
                    _living(connection, tenant)
            connection.execute(SHARES_TABLE.delete().where(SHARES_TABLE.c.adapter == adapter))
            _check_room(connection, SHARES_TABLE, MAX_SHARES, "grants")
            if wanted:
                rows = [sealed("tenant_shares", {"adapter": adapter, "tenant": each}) for each in wanted]
                connection.execute(SHARES_TABLE.insert(), rows)
        return tuple(wanted)

    def shares(self) -> list[tuple[str, str]]:
        """(adapter, tenant), by name."""
        with self.reading() as connection:
            rows = _sound_rows(connection, SHARES_TABLE, SHARES_TABLE.c.adapter, SHARES_TABLE.c.tenant)
        return [(row["adapter"], row["tenant"]) for row in rows]

    # ------------------------------------------------------------------------------------------------------------ usage

    def add_usage(self, used: Mapping[UsageKey, Counts]) -> None:
        """To what is there. In one order, or two servers that write the same rows wait for each other."""
        rows = [{**key._asdict(), **asdict(used[key])} for key in sorted(used)]
        with _as_journal_errors(), self.engine.begin() as connection:
            connection.execute(_ADD_USAGE, rows)

    def forget_usage(self, before_day: str) -> None:
        with _as_journal_errors(), self.engine.begin() as connection:
            connection.execute(USAGE_TABLE.delete().where(USAGE_TABLE.c.day < before_day))

    def usage(self, query: UsageQuery, limit: int, after: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Rows by day, key and adapter. after: these three of the last row of the page before."""
        place = tuple_(USAGE_TABLE.c.day, USAGE_TABLE.c.key_id, USAGE_TABLE.c.adapter)
        only = {name: getattr(query, name) for name in ("tenant", "key_id")}
        found = sa.select(USAGE_TABLE).order_by(*place.clauses).limit(limit)
        found = found.where(*(USAGE_TABLE.c[name] == value for name, value in only.items() if value is not None))
        if query.adapters:
            found = found.where(USAGE_TABLE.c.adapter.in_(query.adapters))
        if query.first_day is not None:
            found = found.where(USAGE_TABLE.c.day >= query.first_day)
        if query.last_day is not None:
            found = found.where(USAGE_TABLE.c.day <= query.last_day)
        if after:
            found = found.where(place > tuple(after))
        with self.reading() as connection:
            return [dict(row) for row in connection.execute(found).mappings()]


def open_store(state_dir: Path | None, database_url: str | None) -> TenantStore:
    """Of a state directory or a database that a server has made; it may be running. Raises ConfigError."""
    if (state_dir is None) == (database_url is None):
        raise ConfigError("give the --state-dir or the --database-url of a server")
    engine = _file_engine(state_dir / "journal.sqlite") if state_dir else Database(str(database_url)).pooled()
    try:
        with engine.connect() as connection:
            schema = connection.execute(sa.select(ABOUT_TABLE.c.value).where(ABOUT_TABLE.c.key == "schema")).scalar()
    except Exception as error:
        engine.dispose()
        raise ConfigError(f"{state_dir or 'the database'} has no journal of a server: {reason_of(error)}") from None
    if schema != SCHEMA_VERSION:
        engine.dispose()
        raise ConfigError(
            f"{state_dir or 'the database'} was written by another version of Loraplex (schema {shown(schema)}, this "
            f"one has {SCHEMA_VERSION}); start a server of this version on it first"
        )
    return TenantStore(engine)


def _file_engine(file: Path) -> sa.Engine:
    """Raises ConfigError for what is not the plain file of a journal."""
    if file.is_symlink() or not file.is_file():
        raise ConfigError(f"{file} is not there, or is no plain file: start a server with this --state-dir once")
    return engine_of(file)


@contextmanager
def _as_journal_errors() -> Iterator[None]:
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        text = f"the database of tenants cannot be used: {reason_of(error)}"
        if isinstance(error, sa.exc.OperationalError) and "psycopg" in type(error.orig).__module__:
            raise DatabaseUnavailableError(f"{text}; try again later") from None
        raise JournalError(text) from None


def _check_room(
    connection: sa.Connection, table: sa.Table, most: int, what: str, *only: sa.ColumnElement[bool]
) -> None:
    num = connection.execute(sa.select(sa.func.count()).select_from(table).where(*only)).scalar_one()
    if num >= most:
        raise TenantConflictError(f"there are {num} {what} already, and at most {most} may be")


def _living(connection: sa.Connection, name: str) -> Tenant:
    query = sa.select(TENANTS_TABLE).where(TENANTS_TABLE.c.name == name, TENANTS_TABLE.c.deleted_time.is_(None))
    row = connection.execute(query).mappings().first()
    if row is None:
        raise TenantNotFoundError(f"there is no tenant {shown(name)}; `loraplex tenant list` has their names")
    return _tenant(_sound(TENANTS_TABLE, row))


def _sound(table: sa.Table, row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row without its checksum. Raises _DamagedRowError."""
    found = {str(key): value for key, value in row.items()}
    if (wrong := take_checksum(table.name, found)) is not None:
        text = f"a row of table {table.name} opens nothing, since it cannot be used: {wrong}"
        raise _DamagedRowError(f"{text}; `loraplex state check` says what is damaged")
    return found


def _sound_rows(connection: sa.Connection, table: sa.Table, *order: sa.ColumnElement[Any]) -> list[dict[str, Any]]:
    """Without their checksums. Those that cannot be used are left out, as `read` does, and the log says how many."""
    found = []
    num_damaged = 0
    for row in map(dict, raw_rows(connection, sa.select(*raw(table)).order_by(*order))):
        if take_checksum(table.name, row) is None:
            found.append(row)
        else:
            num_damaged += 1
    if num_damaged:
        text = "rows of table %s cannot be used and are left out: %d; `loraplex state check` says what is damaged"
        _log.warning(text, table.name, num_damaged)
    return found


def _tenant(row: Any) -> Tenant:
    roots = tuple(msgspec.json.decode(row["adapter_roots"], type=list[str]))
    numbers = msgspec.json.decode(row["limits"], type=dict[str, float])
    service = ServiceLevel.of(numbers)
    limits = Limits.of({name: value for name, value in numbers.items() if name not in BOUNDS})
    return Tenant(row["name"], row["created_time"], roots, limits, service, is_deleted=row["deleted_time"] is not None)


def _tenant_or_closed(row: Any) -> Tenant:
    """With limits that this version does not know it keeps its names, and its keys open nothing."""
    try:
        return _tenant(row)
    except InvalidRequestError:
        return Tenant(row["name"], row["created_time"], is_deleted=True)


def _tenant_row(tenant: Tenant, deleted_time: float | None = None) -> dict[str, Any]:
    row = {
        "name": tenant.name,
        "adapter_roots": msgspec.json.encode(tenant.adapter_roots).decode(),
        "limits": msgspec.json.encode(tenant.limits.given() | tenant.service.given()).decode(),
        "created_time": tenant.created_time,
        "deleted_time": deleted_time,
    }
    return sealed("tenants", row)


def _key(row: Any) -> Key:
    is_revoked = row["revoked_time"] is not None
    return Key(row["key_id"], row["tenant"], Role(row["role"]), row["label"], row["created_time"], is_revoked)
