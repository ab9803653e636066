"""The commands `loraplex tenant` and `loraplex key`, on a state directory or a database, beside a running server or
without one. What they need is imported when they run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from loraplex.cli_help import Flat, Listed, group_fields
from loraplex.errors import InvalidRequestError
from loraplex.tenants.limits import Limits
from loraplex.tenants.service_level import ServiceLevel

if TYPE_CHECKING:
    from loraplex.tenants.store import TenantStore

DATABASE_VARIABLE = "LORAPLEX_DATABASE_URL"

tenant_app = App(name="tenant", help="Tenants of a server: what each may load, use and see.")
key_app = App(name="key", help="API keys of a server's tenants and operators.")
group_fields(Limits, "Limits")
group_fields(ServiceLevel, "Service level")

Names = Annotated[tuple[str, ...], Parameter(negative=())]


@tenant_app.command(name="create")
def create_tenant(
    name: str,
    /,
    *,
    adapter_root: Annotated[tuple[str, ...], Listed] = (),
    limits: Annotated[Limits | None, Flat] = None,
    service: Annotated[ServiceLevel | None, Flat] = None,
    state_dir: Path | None = None,
    database_url: str | None = None,
) -> int:
    """Make a tenant. From the first one on, a server answers only requests that bring a key.

    Parameters
    ----------
    name
        Name of the tenant: a-z, 0-9, '.', '_' and '-'. Its adapters are NAME/adapter. It is never given twice.
    adapter_root
        A directory, hf://ORG or s3://BUCKET/PREFIX that its keys may load adapters from, inside those of the server;
        may be given several times (default: its keys load nothing).
    state_dir
        The --state-dir of the server.
    database_url
        The --database-url of the server; or the variable LORAPLEX_DATABASE_URL.
    """
    with _changing("tenant create", state_dir, database_url, tenant=name) as (store, _):
        print(store.create_tenant(name, adapter_root, limits, service).name)
    return 0


@tenant_app.command(name="change")
def change_tenant(
    name: str,
    /,
    *,
    adapter_root: Annotated[tuple[str, ...] | None, Listed] = None,
    limits: Annotated[Limits | None, Flat] = None,
    service: Annotated[ServiceLevel | None, Flat] = None,
    unset: Annotated[tuple[str, ...], Listed] = (),
    state_dir: Path | None = None,
    database_url: str | None = None,
) -> int:
    """Give a tenant other roots, limits, or parts of its service level. What is not given stays.

    Parameters
    ----------
    name
        Name of the tenant.
    adapter_root
        As of `tenant create`; all that it has are those given here.
    unset
        A limit, or a part of the service level, to take away, such as requests-per-s; may be given several times.
    state_dir
        The --state-dir of the server.
    database_url
        The --database-url of the server; or the variable LORAPLEX_DATABASE_URL.
    """
    with _changing("tenant change", state_dir, database_url, tenant=name) as (store, _):
        removed = _removed(unset)
        known = store.tenant(name)
        print(
            store.change_tenant(
                name,
                adapter_root,
                Limits.of(_left(known.limits.given(), limits, removed)),
                ServiceLevel.of(_left(known.service.given(), service, removed)),
            ).name
        )
    return 0


def _removed(names: tuple[str, ...]) -> set[str]:
    removed = {each.replace("-", "_") for each in names}
    if unknown := removed - {each.name for each in (*fields(Limits), *fields(ServiceLevel))}:
        raise InvalidRequestError(f"--unset {min(unknown)[:40]!r} is no limit and no part of the service level")
    return removed


def _left(known: dict[str, float], given: Limits | ServiceLevel | None, removed: set[str]) -> dict[str, float]:
    numbers = known | (given.given() if given else {})
    return {name: value for name, value in numbers.items() if name not in removed}


def _exact(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


@tenant_app.command(name="list")
def list_tenants(*, state_dir: Path | None = None, database_url: str | None = None) -> int:
    """Tenants, a line each: name, when it was made, limits and service level, roots of adapters.

    Parameters
    ----------
    state_dir
        The --state-dir of the server.
    database_url
        The --database-url of the server; or the variable LORAPLEX_DATABASE_URL.
    """
    with _store(state_dir, database_url) as store:
        for tenant in store.tenants():
            numbers = tenant.limits.given() | tenant.service.given()
            given = " ".join(f"{name}={_exact(value)}" for name, value in numbers.items())
            columns = (tenant.name, _time(tenant.created_time), given or "-", " ".join(tenant.adapter_roots) or "-")
            print("\t".join(columns))
    return 0


@tenant_app.command(name=("delete", "revoke"))
def delete_tenant(name: str, /, *, state_dir: Path | None = None, database_url: str | None = None) -> int:
    """Delete a tenant, or revoke it, which is the same: its keys open nothing within a second. Its adapters stay until
    the operator unloads them.

    Parameters
    ----------
    name
        Name of the tenant.
    state_dir
        The --state-dir of the server.
    database_url
        The --database-url of the server; or the variable LORAPLEX_DATABASE_URL.
    """
    with _changing("tenant delete", state_dir, database_url, tenant=name) as (store, _):
        print(store.delete_tenant(name).name)
    return 0


@tenant_app.command
def share(
    adapter: str,
    tenants: Names = (),
    /,
    *,
    public: bool = False,
    state_dir: Path | None = None,
    database_url: str | None = None,
) -> int:
    """Say which tenants may use an adapter beside its owner: those given here, and no others.

    Parameters
    ----------
    adapter
        Name of the adapter as the operator reads it: sql, or acme/sql for one of tenant acme.
    tenants
        Names of tenants; none, and not public: its owner alone uses it.
    public
        All tenants may use it.
    state_dir
        The --state-dir of the server.
    database_url
        The --database-url of the server; or the variable LORAPLEX_DATABASE_URL.
    """
    from loraplex.tenants.records import TenantTable

    with _changing("tenant share", state_dir, database_url, adapter=adapter) as (store, _):
        shared = store.share(adapter, (*tenants, *([TenantTable.ALL] if public else ())))
        print(f"{adapter}: {' '.join(shared) or '-'}")
    return 0


@tenant_app.command(name="shares")
def list_shares(*, state_dir: Path | None = None, database_url: str | None = None) -> int:
    """Public and granted adapters, a line each: adapter, tenant (*: all).

    Parameters
    ----------
    state_dir
        The --state-dir of the server.
    database_url
        The --database-url of the server; or the variable LORAPLEX_DATABASE_URL.
    """
    with _store(state_dir, database_url) as store:
        for adapter, tenant in store.shares():
            print(f"{adapter}\t{tenant}")
    return 0


@key_app.command(name="create")
def create_key(
    tenant: str | None = None,
    /,
    *,
    role: str | None = None,
    label: str = "",
    state_dir: Path | None = None,
    database_url: str | None = None,
) -> int:
    """Make a key and show it, once: it is stored as its SHA-256. The id is on standard error.

    Parameters
    ----------
    tenant
        Tenant of the key; none: it is the server's.
    role
        admin (everything), operator (everything but tenants and keys), tenant (requests, and its own adapters) or
        read-only (default: tenant).
    label
        Words to tell it by, at most 200 characters.
    state_dir
        The --state-dir of the server.
    database_url
        The --database-url of the server; or the variable LORAPLEX_DATABASE_URL.
    """
    import sys

    from loraplex.tenants.records import as_role

    with _changing("key create", state_dir, database_url, tenant=tenant) as (store, targets):
        key, secret = store.create_key(as_role(role), tenant, label)
        targets["key"] = key.key_id
    print(secret)
    print(f"id {key.key_id}, role {key.role.value}: keep the key, it is not shown again", file=sys.stderr)
    return 0


@key_app.command(name="list")
def list_keys(tenant: str | None = None, /, *, state_dir: Path | None = None, database_url: str | None = None) -> int:
    """Keys, a line each: id, tenant, role, when it was made, whether it is revoked, label.

    Parameters
    ----------
    tenant
        Those of one tenant.
    state_dir
        The --state-dir of the server.
    database_url
        The --database-url of the server; or the variable LORAPLEX_DATABASE_URL.
    """
    with _store(state_dir, database_url) as store:
        for key in store.keys_of(tenant):
            state = "revoked" if key.is_revoked else "valid"
            columns = (key.key_id, key.tenant or "-", key.role.value, _time(key.created_time), state, key.label)
            print("\t".join(columns))
    return 0


@key_app.command(name="revoke")
def revoke_key(key_id: str, /, *, state_dir: Path | None = None, database_url: str | None = None) -> int:
    """Revoke a key: it opens nothing within a second. Requests that run go on.

    Parameters
    ----------
    key_id
        Id of the key, of `loraplex key list`.
    state_dir
        The --state-dir of the server.
    database_url
        The --database-url of the server; or the variable LORAPLEX_DATABASE_URL.
    """
    with _changing("key revoke", state_dir, database_url, key=key_id) as (store, _):
        print(store.revoke_key(key_id).key_id)
    return 0


@contextmanager
def _changing(
    verb: str, state_dir: Path | None, database_url: str | None, **targets: str | None
) -> Iterator[tuple[TenantStore, dict[str, str | None]]]:
    """The store, for a verb that is recorded, and what the record says that it is about."""
    from loraplex.tenants.audit import recording

    with recording(verb, state_dir, **targets) as about, _store(state_dir, database_url) as store:
        yield store, about


@contextmanager
def _store(state_dir: Path | None, database_url: str | None) -> Iterator[TenantStore]:
    from loraplex.tenants.store import open_store

    if state_dir is None and database_url is None:
        database_url = os.environ.get(DATABASE_VARIABLE)
    with closing(open_store(state_dir, database_url)) as store:
        yield store


def _time(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M}"
