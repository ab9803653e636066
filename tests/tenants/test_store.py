"""Tenants, keys and shares in SQLite and PostgreSQL: what is stored, what is refused, what other processes see."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import sqlalchemy as sa

from loraplex.adapters.journal import SqliteJournal, repair
from loraplex.adapters.journal.database import Database
from loraplex.adapters.journal.postgres_journal import PostgresJournal
from loraplex.adapters.journal.tables import SCHEMA_VERSION, JournalTables
from loraplex.adapters.journal.tenant_rows import KeyRow
from loraplex.adapters.registry import NameChange, NameRecord, NameUsage, VersionRecord
from loraplex.errors import (
    ConfigError,
    DatabaseUnavailableError,
    InvalidRequestError,
    JournalError,
    KeyNotFoundError,
    TenantConflictError,
    TenantNotFoundError,
)
from loraplex.server.responses import encode
from loraplex.tenants.directory import TenantDirectory
from loraplex.tenants.limits import Limits
from loraplex.tenants.records import Role, TenantTable, key_digest
from loraplex.tenants.service_level import ServiceLevel
from loraplex.tenants.store import TenantStore, open_store
from loraplex.tenants.usage import Counts, UsageKey, UsageQuery
from tests.tenants.conftest import BASE, new_state_dir, until


def named(name: str) -> NameRecord:
    version = VersionRecord(1, 1, "a" * 64, "/a", "/a", "", 8, 4, False, 1.0)
    return NameRecord(None, None, 1, (version,), NameUsage(name, 1, 0, 1.0), ())


def test_nothing_is_configured_at_first(store: TenantStore) -> None:
    assert store.revision() == 0
    table = store.read()
    assert table == TenantTable()
    assert not table.is_configured


def test_a_tenant_with_its_roots_and_limits(store: TenantStore) -> None:
    limits = Limits(adapters=3, requests_per_s=0.5)
    made = store.create_tenant("acme", ["/srv/acme", "hf://acme"], limits)
    assert store.tenant("acme") == made == store.read().tenants["acme"]
    assert (made.adapter_roots, made.limits) == (("/srv/acme", "hf://acme"), limits)
    changed = store.change_tenant("acme", limits=Limits(pins=1))
    assert (changed.adapter_roots, changed.limits) == (made.adapter_roots, Limits(pins=1))
    assert store.tenants() == [changed]


@pytest.mark.parametrize("root", ["adapters", "./adapters", "../x", "file:///srv", "", "/srv/\x1b[1m", "hf:/x"])
def test_a_root_that_is_no_place_is_refused(store: TenantStore, root: str) -> None:
    """A relative one was taken, and each load from it failed later."""
    with pytest.raises(InvalidRequestError, match="--adapter-root"):
        store.create_tenant("acme", ["/srv", root])
    store.create_tenant("acme", ["/srv", "hf://org", "s3://bucket/loras"])
    with pytest.raises(InvalidRequestError, match="--adapter-root"):
        store.change_tenant("acme", [root])
    assert store.tenant("acme").adapter_roots == ("/srv", "hf://org", "s3://bucket/loras")


def test_a_service_level_is_kept_beside_limits(store: TenantStore) -> None:
    limits, service = Limits(pins=1), ServiceLevel(weight=0.5, ttft_target_ms=100)
    made = store.create_tenant("acme", limits=limits, service=service)
    assert store.tenant("acme") == made == store.read().tenants["acme"]
    assert (made.limits, made.service) == (limits, service)
    changed = store.change_tenant("acme", service=ServiceLevel(itl_target_ms=20))
    assert (changed.limits, changed.service) == (limits, ServiceLevel(itl_target_ms=20))
    changed = store.change_tenant("acme", limits=Limits())
    assert store.tenant("acme") == changed
    assert (changed.limits, changed.service) == (Limits(), ServiceLevel(itl_target_ms=20))


@pytest.mark.parametrize(
    "wrong",
    [{"weight": 0}, {"weight": float("nan")}, {"max_priority": 1001}, {"ttft_target_ms": 0}, {"itl_target_ms": 10**9}],
)
def test_service_levels_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        ServiceLevel(**wrong)


@pytest.mark.parametrize("name", ["", "Acme", "a/b", "-a", "a b", "ä", "a" * 64, "..", "a\n"])
def test_names_that_no_tenant_has(store: TenantStore, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        store.create_tenant(name)
    assert store.revision() == 0, "nothing was written"


def test_a_name_is_given_once(store: TenantStore) -> None:
    store.create_tenant("acme")
    with pytest.raises(TenantConflictError, match="is there already"):
        store.create_tenant("acme")
    store.delete_tenant("acme")
    with pytest.raises(TenantConflictError, match="was deleted already"):
        store.create_tenant("acme")
    for change in (store.delete_tenant, store.change_tenant, store.tenant):
        with pytest.raises(TenantNotFoundError, match="'acme'"):
            change("acme")


def test_the_operators_adapters_do_not_become_a_tenants(tmp_path: Path) -> None:
    with SqliteJournal(tmp_path / "state", BASE) as journal:
        journal.record([NameChange("acme/sql", named("acme/sql"))]).result(30)
        with closing(open_store(tmp_path / "state", None)) as store:
            with pytest.raises(TenantConflictError, match="'acme/sql' is the operator's"):
                store.create_tenant("acme")
            store.create_tenant("acm")


def test_a_key_is_stored_as_its_digest(store: TenantStore) -> None:
    store.create_tenant("acme")
    key, secret = store.create_key(Role.TENANT, "acme", "the app")
    assert secret.startswith("lp-")
    assert len(secret) == 3 + 43
    assert store.read().keys == {key_digest(secret): key}
    assert key.key_id == key_digest(secret).hex()[:8]
    assert store.keys_of("acme") == [key]
    if store.engine.dialect.name == "sqlite":
        data = Path(str(store.engine.url.database)).read_bytes()
        assert secret.encode() not in data
        assert secret[3:].encode() not in data


def test_two_keys_are_two(store: TenantStore) -> None:
    secrets = {store.create_key(Role.ADMIN)[1] for _ in range(20)}
    assert len(secrets) == 20


@pytest.mark.parametrize(
    ("role", "tenant"),
    [(Role.TENANT, None), (Role.ADMIN, "acme"), (Role.OPERATOR, "acme"), (Role.INFERENCE, None)],
)
def test_a_role_and_its_tenant_fit(store: TenantStore, role: Role, tenant: str | None) -> None:
    store.create_tenant("acme")
    with pytest.raises(InvalidRequestError, match="role"):
        store.create_key(role, tenant)
    assert store.keys_of() == []


@pytest.mark.parametrize("label", ["two\nlines", "\x1b[2Jcleared", "\u202ereversed", "x" * 201, f"of lp-{'k' * 43}"])
def test_a_label_is_one_printable_line(store: TenantStore, label: str) -> None:
    with pytest.raises(InvalidRequestError, match="at most 200 printable characters"):
        store.create_key(Role.ADMIN, None, label)
    assert store.keys_of() == []


def test_a_revoked_key_opens_nothing(store: TenantStore) -> None:
    store.create_tenant("acme")
    key, secret = store.create_key(Role.TENANT, "acme")
    other, other_secret = store.create_key(Role.READ_ONLY, "acme")
    assert store.revoke_key(key.key_id).is_revoked
    assert store.read().keys == {key_digest(other_secret): other}
    assert [each.is_revoked for each in store.keys_of()] == [True, False]
    store.revoke_key(key.key_id)
    with pytest.raises(KeyNotFoundError, match="no key '00000000'"):
        store.revoke_key("00000000")
    assert key_digest(secret) not in store.read().keys


def test_a_deleted_tenants_keys_and_grants_are_gone(store: TenantStore) -> None:
    store.create_tenant("acme")
    store.create_tenant("beta")
    store.create_key(Role.TENANT, "acme")
    store.share("sql", ["acme", "beta"])
    store.delete_tenant("acme")
    table = store.read()
    assert table.keys == {}
    assert table.shares == {"sql": {"beta"}}
    assert table.is_configured
    assert table.owner_of("acme/x") == "acme", "and no other tenant's"
    with pytest.raises(TenantNotFoundError):
        store.create_key(Role.TENANT, "acme")


def test_shares_are_replaced(store: TenantStore) -> None:
    store.create_tenant("acme")
    assert store.share("sql", ["acme", TenantTable.ALL, "acme"]) == ("*", "acme")
    assert store.shares() == [("sql", "*"), ("sql", "acme")]
    store.share("sql", [])
    assert store.shares() == []
    with pytest.raises(TenantNotFoundError):
        store.share("sql", ["nobody-here"])
    with pytest.raises(InvalidRequestError):
        store.share("a\x00b", [])


def test_every_change_is_seen_by_its_number(store: TenantStore) -> None:
    numbers = [store.revision()]
    store.create_tenant("acme")
    numbers.append(store.revision())
    key, _ = store.create_key(Role.TENANT, "acme")
    numbers.append(store.revision())
    store.revoke_key(key.key_id)
    store.share("sql", ["acme"])
    numbers.append(store.revision())
    store.delete_tenant("acme")
    numbers.append(store.revision())
    assert numbers == [0, 1, 2, 4, 5]


def test_two_at_a_time_do_not_both_get_a_name(store: TenantStore) -> None:
    results: list[str] = []

    def create() -> None:
        try:
            store.create_tenant("acme")
            results.append("made")
        except TenantConflictError:
            results.append("refused")

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["made", *["refused"] * 7]
    assert store.revision() == 1


def test_a_server_sees_what_another_process_changes(store: TenantStore) -> None:
    directory = TenantDirectory(TenantStore(store.engine), poll_s=0.01)
    try:
        store.create_tenant("acme")
        key, secret = store.create_key(Role.TENANT, "acme")
        until(lambda: key_digest(secret) in directory.table.keys)
        store.revoke_key(key.key_id)
        until(lambda: key_digest(secret) not in directory.table.keys)
    finally:
        directory.close()


def test_a_revoked_key_is_seen_while_other_sessions_are_taken(store: TenantStore) -> None:
    """Two long questions for usage had all that a server has, and the key opened its doors until one was answered."""
    key, secret = store.create_key(Role.ADMIN)
    pool = store.engine.pool.recreate()
    assert isinstance(pool, sa.QueuePool)
    own = TenantStore(sa.Engine(pool, store.engine.dialect, store.engine.url))
    with closing(TenantDirectory(own, poll_s=0.01)) as directory, ExitStack() as taken:
        for _ in range(pool.size() + pool._max_overflow):
            taken.enter_context(own.engine.connect())
        store.revoke_key(key.key_id)
        until(lambda: key_digest(secret) not in directory.table.keys)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_before_a_server_has_made_the_tables_there_is_no_tenant(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The ingress of replicas that have yet to start has their database already."""
    if kind == "sqlite":
        engine = sa.create_engine(sa.URL.create("sqlite", database=str(tmp_path / "journal.sqlite")))
    else:
        pytest.importorskip("psycopg")
        url = request.getfixturevalue("postgres_cluster").new_schema()
        engine = Database(url).pooled()
    directory = TenantDirectory(TenantStore(engine), poll_s=0.01)
    with closing(directory):
        assert not directory.table.is_configured
        if kind == "sqlite":
            JournalTables(tmp_path / "journal.sqlite", BASE).close()
        else:
            PostgresJournal(url, BASE).close()
        directory.store.create_tenant("acme")
        until(lambda: "acme" in directory.table.tenants)


def test_a_database_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    engine = sa.create_engine(sa.URL.create("sqlite", database=str(tmp_path / "no" / "journal.sqlite")))
    with closing(TenantStore(engine)) as store, pytest.raises(JournalError, match="cannot be used"):
        store.revision()


def test_a_postgres_that_is_away_is_unavailable() -> None:
    """A tenant that asked for its usage meanwhile got 500, as for a disk that is full."""
    pytest.importorskip("psycopg")
    engine = Database("postgresql://loraplex@127.0.0.1:1/loraplex").pooled()
    with closing(TenantStore(engine)) as store, pytest.raises(DatabaseUnavailableError, match="try again later"):
        store.usage(UsageQuery(), 10)


# --------------------------------------------------------------------------------------------------------------- usage


def test_usage_adds_up(store: TenantStore) -> None:
    one = UsageKey("2026-11-23", "aaaaaaaa", "sql", "acme")
    other = UsageKey("2026-11-24", "bbbbbbbb", "", "beta")
    for _ in range(3):
        store.add_usage({one: Counts(1, 0, 10, 4, 5, 0.5), other: Counts(1, 1, 1, 0, 0, 0.0)})
    rows = store.usage(UsageQuery(tenant="acme"), 10)
    assert rows == [
        {
            "day": "2026-11-23",
            "key_id": "aaaaaaaa",
            "adapter": "sql",
            "tenant": "acme",
            "requests": 3,
            "errors": 0,
            "prompt_tokens": 30,
            "cached_tokens": 12,
            "generated_tokens": 15,
            "waiting_s": 1.5,
        }
    ]
    assert [row["day"] for row in store.usage(UsageQuery(), 10)] == ["2026-11-23", "2026-11-24"]
    assert [row["day"] for row in store.usage(UsageQuery(first_day="2026-11-24"), 10)] == ["2026-11-24"]
    assert [row["day"] for row in store.usage(UsageQuery(last_day="2026-11-23"), 10)] == ["2026-11-23"]
    assert [row["day"] for row in store.usage(UsageQuery(), 10, after=one[:3])] == ["2026-11-24"]
    assert store.usage(UsageQuery(key_id="bbbbbbbb", adapters=("x",)), 10) == []
    store.forget_usage("2026-11-24")
    assert [row["day"] for row in store.usage(UsageQuery(), 10)] == ["2026-11-24"]


def test_usage_is_written_in_one_order(store: TenantStore) -> None:
    """Two servers that had counted the same keys in two orders waited for each other, and one was refused."""
    written: list[str] = []

    def note(connection: object, cursor: object, statement: str, rows: Any, *others: object) -> None:
        written.extend(row["key_id"] if isinstance(row, dict) else row[1] for row in rows)

    sa.event.listen(store.engine, "before_cursor_execute", note)
    keys = [UsageKey("2026-11-23", key_id, "sql", "acme") for key_id in ("cccccccc", "aaaaaaaa", "bbbbbbbb")]
    store.add_usage({key: Counts(requests=1) for key in keys})
    sa.event.remove(store.engine, "before_cursor_execute", note)
    assert written == ["aaaaaaaa", "bbbbbbbb", "cccccccc"]


# ------------------------------------------------------------------------------------------------ journals and repairs


def test_what_is_no_state_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start a server"):
        open_store(tmp_path, None)
    with pytest.raises(ConfigError, match="--state-dir or the --database-url"):
        open_store(None, None)
    (tmp_path / "journal.sqlite").write_bytes(b"no database, but as long as one" * 40)
    with pytest.raises(ConfigError, match="no journal"):
        open_store(tmp_path, None)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").mkdir()
    new_state_dir(tmp_path / "state")
    (tmp_path / "link" / "journal.sqlite").symlink_to(tmp_path / "state" / "journal.sqlite")
    with pytest.raises(ConfigError, match="no plain file"):
        open_store(tmp_path / "link", None)


def test_another_version_is_refused(state_dir: Path) -> None:
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
        file.execute("UPDATE about SET value = '2' WHERE key = 'schema'")
    with pytest.raises(ConfigError, match="schema '2'"):
        open_store(state_dir, None)


def test_a_journal_of_schema_2_gets_the_tables(state_dir: Path) -> None:
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
        file.execute("UPDATE about SET value = '2' WHERE key = 'schema'")
        for table in ("tenants", "tenant_keys", "tenant_shares", "tenant_usage"):
            file.execute(f"DROP TABLE {table}")
    SqliteJournal(state_dir, BASE).close()
    with closing(open_store(state_dir, None)) as store:
        store.create_tenant("acme")
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file:
        assert file.execute("SELECT value FROM about WHERE key = 'schema'").fetchone() == (SCHEMA_VERSION,)


def test_a_database_of_schema_2_gets_the_tables(database_url: str, postgres_cluster: object) -> None:
    from tests.postgres import Cluster

    assert isinstance(postgres_cluster, Cluster)
    postgres_cluster.sql("UPDATE about SET value = '2' WHERE key = 'schema'", database_url)
    postgres_cluster.sql("DROP TABLE tenants, tenant_keys, tenant_shares, tenant_usage", database_url)
    PostgresJournal(database_url, BASE).close()
    with closing(open_store(None, database_url)) as store:
        store.create_tenant("acme")
        assert store.revision() == 1


def test_rows_of_schema_3_get_checksums(state_dir: Path) -> None:
    key_id, _ = filled(state_dir)
    with closing(open_store(state_dir, None)) as store:
        before = store.read()
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
        file.execute("UPDATE about SET value = '3' WHERE key = 'schema'")
        for table in ("tenants", "tenant_keys", "tenant_shares"):
            file.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
    SqliteJournal(state_dir, BASE).close()
    assert repair.check_state(state_dir).is_whole
    with closing(open_store(state_dir, None)) as store:
        assert store.read() == before
        assert store.revoke_key(key_id).is_revoked


def test_rows_of_a_database_of_schema_3_get_checksums(database_url: str, postgres_cluster: object) -> None:
    from tests.postgres import Cluster

    assert isinstance(postgres_cluster, Cluster)
    with closing(open_store(None, database_url)) as store:
        store.create_tenant("acme")
        store.create_key(Role.TENANT, "acme")
        store.share("upper", ["acme"])
        before = store.read()
    postgres_cluster.sql("UPDATE about SET value = '3' WHERE key = 'schema'", database_url)
    for table in ("tenants", "tenant_keys", "tenant_shares"):
        postgres_cluster.sql(f"ALTER TABLE {table} DROP COLUMN checksum", database_url)
    PostgresJournal(database_url, BASE).close()
    with closing(open_store(None, database_url)) as store:
        assert store.read() == before
        assert len(before.keys) == len(before.shares) == 1


def test_a_journal_goes_on_beside_the_store(tmp_path: Path) -> None:
    """The server's journal and the command line write to one file."""
    with SqliteJournal(tmp_path / "state", BASE) as journal, closing(open_store(tmp_path / "state", None)) as store:
        for number in range(20):
            store.create_tenant(f"t{number}")
            name = f"a{number}"
            journal.record([NameChange(name, named(name))]).result(30)
            journal.record([NameChange(name, None)]).result(30)
    assert repair.check_state(tmp_path / "state").is_whole
    with SqliteJournal(tmp_path / "state", BASE), closing(open_store(tmp_path / "state", None)) as store:
        assert len(store.tenants()) == 20


def filled(state_dir: Path) -> tuple[str, str]:
    """The ids of a valid key and of a revoked one."""
    with closing(open_store(state_dir, None)) as store:
        store.create_tenant("acme", ["/srv"], Limits(pins=2))
        key, _ = store.create_key(Role.TENANT, "acme")
        revoked, _ = store.create_key(Role.READ_ONLY, "acme")
        store.revoke_key(revoked.key_id)
        store.share("sql", ["acme"])
        store.add_usage({UsageKey("2026-11-23", key.key_id, "sql", "acme"): Counts(requests=1)})
    return key.key_id, revoked.key_id


DAMAGES = [
    "UPDATE tenant_keys SET role = 'emperor' WHERE revoked_time IS NULL",
    "UPDATE tenant_keys SET digest = 'x' WHERE revoked_time IS NULL",
    "UPDATE tenant_keys SET key_id = '00000000' WHERE revoked_time IS NULL",
    "UPDATE tenant_keys SET role = 'admin' WHERE revoked_time IS NULL",
    "UPDATE tenant_keys SET tenant = NULL WHERE revoked_time IS NULL",
    'UPDATE tenants SET limits = \'{"pins": "many"}\'',
    "UPDATE tenants SET adapter_roots = 7",
    "UPDATE tenants SET name = 'A/B'",
    "UPDATE tenant_shares SET tenant = 'A/B'",
    "UPDATE tenant_usage SET requests = -1",
    "DELETE FROM about WHERE key = 'tenants'",
    "UPDATE about SET value = 'many' WHERE key = 'tenants'",
    "UPDATE about SET value = '0' WHERE key = 'tenants'",
    "UPDATE about SET value = '-1' WHERE key = 'tenants'",
    f"UPDATE about SET value = '{'9' * 5000}' WHERE key = 'tenants'",
    "UPDATE about SET value = '²' WHERE key = 'tenants'",
]


@pytest.mark.parametrize("damage", [each for each in DAMAGES if "about" in each])
def test_a_running_server_that_finds_no_number_stays_closed(state_dir: Path, damage: str) -> None:
    filled(state_dir)
    with closing(TenantDirectory(open_store(state_dir, None), poll_s=600)) as directory:
        known = directory.table
        with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
            file.execute(damage)
        with pytest.raises(JournalError, match="lost the number of the last change"):
            directory.refresh()
        assert directory.table is known
    with closing(TenantDirectory(open_store(state_dir, None), poll_s=600)) as again:
        assert (again.table.is_configured, again.table.keys) == (True, known.keys)


@pytest.mark.parametrize("limits", ['{"of_another_version": 1}', '{"concurrency": 0}'])
def test_limits_that_are_not_known_close_their_tenant_alone(state_dir: Path, limits: str) -> None:
    with closing(open_store(state_dir, None)) as store:
        for name in ("acme", "beta"):
            store.create_tenant(name)
            store.create_key(Role.TENANT, name)
        with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
            file.execute("UPDATE tenants SET limits = ? WHERE name = 'acme'", (limits,))
        table = store.read()
        assert [key.tenant for key in table.keys.values()] == ["beta"]
        assert table.owner_of("acme/sql") == "acme", "its adapters are no one else's"


def test_the_watcher_goes_on_after_any_error(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = TenantDirectory(open_store(state_dir, None), poll_s=0.001)
    num_errors = 0

    def fails() -> int:
        nonlocal num_errors
        num_errors += 1
        raise ValueError("a number of another kind")

    with closing(directory):
        with monkeypatch.context() as patched:
            patched.setattr(directory.store, "revision", fails)
            until(lambda: num_errors > 2)
        directory.store.create_tenant("acme")
        until(lambda: "acme" in directory.table.tenants)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rows_are_said_and_open_nothing(state_dir: Path, damage: str) -> None:
    key_id, _ = filled(state_dir)
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
        file.execute(damage)
    report = repair.check_state(state_dir)
    assert not report.is_whole
    assert "tenant" in report.describe()
    assert repair.repair_state(state_dir).damages == report.damages
    assert repair.check_state(state_dir).is_whole
    with closing(open_store(state_dir, None)) as store:
        table = store.read()
        assert table.is_configured, "the server stays closed"
        is_of_keys = "tenant_keys" in damage or "UPDATE tenants" in damage
        assert {key.key_id for key in table.keys.values()} == (set() if is_of_keys else {key_id})


ANOTHER_ROW = [
    "UPDATE tenant_keys SET revoked_time = NULL WHERE revoked_time IS NOT NULL",
    "UPDATE tenant_keys SET role = 'read-only' WHERE revoked_time IS NULL",
    "UPDATE tenant_keys SET tenant = 'acmf' WHERE revoked_time IS NULL",
    "UPDATE tenant_keys SET checksum = '' WHERE revoked_time IS NULL",
    "UPDATE tenant_shares SET tenant = '*'",
    "UPDATE tenant_shares SET adapter = 'another'",
    "UPDATE tenants SET limits = '{}'",
    """UPDATE tenants SET adapter_roots = '["/"]'""",
    "UPDATE tenants SET created_time = 1.0",
]
"""Damage whose row could be there."""
NO_TEXT = [
    "UPDATE tenant_keys SET label = CAST(x'e2' AS TEXT) WHERE revoked_time IS NULL",
    "UPDATE tenant_keys SET label = 'a' || char(0) WHERE revoked_time IS NULL",
    "UPDATE tenant_shares SET adapter = CAST(x'f3716c' AS TEXT)",
    "UPDATE tenants SET limits = CAST(x'7bff7d' AS TEXT)",
]


def test_a_damaged_key_that_is_to_be_revoked_is_closed_at_servers(state_dir: Path) -> None:
    key_id, _ = filled(state_dir)
    with closing(TenantDirectory(open_store(state_dir, None), poll_s=600)) as directory:
        assert key_id in {key.key_id for key in directory.table.keys.values()}
        with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
            file.execute("UPDATE tenant_keys SET role = 'tenanu' WHERE key_id = ?", (key_id,))
        with pytest.raises(JournalError, match="opens nothing"):
            directory.store.revoke_key(key_id)
        directory.refresh()
        assert directory.table.keys == {}


def test_rows_without_a_checksum_get_none_where_schema_3_did_not_have_them(state_dir: Path) -> None:
    filled(state_dir)
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
        file.execute("UPDATE tenant_keys SET checksum = '', role = 'admin', tenant = NULL WHERE revoked_time IS NULL")
        file.execute("UPDATE about SET value = '2' WHERE key = 'schema'")
    assert not repair.check_state(state_dir).is_whole
    with pytest.raises(ConfigError, match="state check"):
        SqliteJournal(state_dir, BASE)
    with closing(open_store(state_dir, None)) as store:
        assert store.read().keys == {}


@pytest.mark.parametrize("schema", ["3", SCHEMA_VERSION])
@pytest.mark.parametrize("damage", NO_TEXT)
def test_a_row_that_is_no_text_stops_no_other(state_dir: Path, damage: str, schema: str) -> None:
    """Neither the start, nor a repair, nor that another key is revoked at a server that runs."""
    filled(state_dir)
    with closing(open_store(state_dir, None)) as store:
        other, _ = store.create_key(Role.ADMIN)
        with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
            assert file.execute(f"{damage}{' AND tenant IS NOT NULL' if 'label' in damage else ''}").rowcount == 1
        before = store.read()
        store.revoke_key(other.key_id)
        assert other.key_id not in {key.key_id for key in store.read().keys.values()}
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
        if schema == "3":
            file.execute("UPDATE about SET value = '3' WHERE key = 'schema'")
            for table in ("tenants", "tenant_keys", "tenant_shares"):
                file.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
    report = repair.check_state(state_dir)
    assert any("not text" in str(each) for each in report.damages)
    repair.repair_state(state_dir)
    assert repair.check_state(state_dir).is_whole
    with closing(open_store(state_dir, None)) as store:
        assert store.read().keys.items() <= before.keys.items()


@pytest.mark.parametrize("damage", [*DAMAGES, *NO_TEXT])
def test_lists_leave_out_rows_that_cannot_be_used(
    state_dir: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled(state_dir)

    def listed(store: TenantStore) -> list[list[Any]]:
        return [store.tenants(), store.keys_of(), store.keys_of("acme"), store.shares()]

    with closing(open_store(state_dir, None)) as store:
        before = listed(store)
        with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
            file.execute(damage)
        after = listed(store)
    is_listed = damage.startswith(("UPDATE tenants", "UPDATE tenant_keys", "UPDATE tenant_shares"))
    assert all(each in old for old, new in zip(before, after, strict=True) for each in new)
    assert (after != before) == is_listed
    assert ("state check" in caplog.text) == is_listed
    assert encode(after), "as the server answers"


@pytest.mark.parametrize("damage", ANOTHER_ROW)
def test_a_row_that_was_not_written_opens_nothing(state_dir: Path, damage: str) -> None:
    filled(state_dir)
    with closing(open_store(state_dir, None)) as store:
        before = store.read()
        with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
            assert file.execute(damage).rowcount == 1
        after = store.read()
        assert after.keys.items() <= before.keys.items()
        assert after.shares.items() < before.shares.items() or after.shares == before.shares
        assert after.tenants.keys() == before.tenants.keys()
        if "UPDATE tenants" in damage:
            with pytest.raises(JournalError, match="state check"):
                store.change_tenant("acme", limits=Limits())
            with pytest.raises(JournalError, match="state check"):
                store.create_key(Role.TENANT, "acme")
    [found] = repair.check_state(state_dir).damages
    assert "checksum" in str(found)
    repair.repair_state(state_dir)
    assert repair.check_state(state_dir).is_whole
    with closing(open_store(state_dir, None)) as store:
        assert (store.read().keys, store.read().shares) == (after.keys, after.shares)


@pytest.mark.parametrize(
    "damage", ["DELETE FROM tenants", "UPDATE tenants SET limits = 7", "UPDATE tenants SET deleted_time = 'soon'"]
)
def test_a_tenant_whose_row_is_lost_keeps_its_adapters_to_itself(state_dir: Path, damage: str) -> None:
    """Else `acme/sql` would be the operator's, for clients with the key of --api-key to use."""
    filled(state_dir)
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
        file.execute(damage)
    for _ in range(2):
        with closing(open_store(state_dir, None)) as store:
            table = store.read()
            assert table.owner_of("acme/sql") == "acme"
            assert not table.may_see("", "acme/sql")
            assert table.keys == {}
        repair.repair_state(state_dir)
    assert repair.check_state(state_dir).is_whole


def test_a_repair_keeps_tenants_whole(state_dir: Path) -> None:
    """What is wrong elsewhere takes nothing of them."""
    filled(state_dir)
    with closing(open_store(state_dir, None)) as store:
        before, keys, usage = store.read(), store.keys_of(), store.usage(UsageQuery(), 10)
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as file, file:
        file.execute("INSERT INTO names VALUES ('odd', NULL, NULL, 0, '[]', 1, 0, 0.0)")
    assert repair.repair_state(state_dir).dropped == ("odd",)
    with closing(open_store(state_dir, None)) as store:
        assert (store.read(), store.keys_of(), store.usage(UsageQuery(), 10)) == (before, keys, usage)


def test_a_repair_from_a_copy_says_that_keys_are_old(state_dir: Path) -> None:
    filled(state_dir)
    SqliteJournal(state_dir, BASE).close()  # makes a copy
    (state_dir / "journal.sqlite").write_bytes(b"")
    report = repair.repair_state(state_dir)
    assert report.has_old_keys
    assert "revoke again" in report.describe()
    with closing(open_store(state_dir, None)) as store:
        assert len(store.read().keys) == 1


def test_a_revoked_key_is_in_the_next_copy(tmp_path: Path) -> None:
    """Else a repair from the copy would open it again, however long ago that was."""
    with SqliteJournal(tmp_path / "state", BASE, count_interval_s=0.01, copy_interval_s=0.01):
        with closing(open_store(tmp_path / "state", None)) as store:
            key, _ = store.create_key(Role.ADMIN)
            store.revoke_key(key.key_id)

        def is_copied() -> bool:
            newest = max((tmp_path / "state" / "copies").glob("journal-*.sqlite"))
            with closing(sqlite3.connect(newest)) as copy:
                return copy.execute("SELECT revoked_time FROM tenant_keys").fetchone() not in (None, (None,))

        until(is_copied)


def test_the_roles_of_rows_are_the_roles() -> None:
    assert set(get_args(get_type_hints(KeyRow)["role"])) == {*map(str, Role)} - {"inference"}


def test_a_journal_whose_log_was_emptied_is_refused_and_restored_from_its_copy(tmp_path: Path) -> None:
    """All of it was in SQLite's log: the server started without tenants, open to all."""
    directory, lost = tmp_path / "state", tmp_path / "lost"
    with SqliteJournal(directory, BASE) as journal, closing(open_store(directory, None)) as store:
        store.create_tenant("acme")
        key, _ = store.create_key(Role.TENANT, "acme")
        journal.record([NameChange("sql", named("sql"))]).result()
        shutil.copytree(directory, lost)
        journal._copy()
        shutil.rmtree(lost / "copies")
        shutil.copytree(directory / "copies", lost / "copies")
    (lost / "journal.sqlite-wal").write_bytes(b"")
    (lost / "journal.sqlite-shm").unlink(missing_ok=True)
    report = repair.check_state(lost)
    assert "older than its copy" in report.describe()
    with pytest.raises(ConfigError, match=r"older than its copy .*state check"):
        SqliteJournal(lost, BASE)
    assert repair.repair_state(lost).restored == ("sql",)
    assert repair.check_state(lost).is_whole
    with SqliteJournal(lost, BASE) as journal, closing(open_store(lost, None)) as store:
        assert [each.key_id for each in store.read().keys.values()] == [key.key_id]
        assert "sql" in journal.names


def test_what_a_copy_has_is_in_the_journals_own_file(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    with SqliteJournal(directory, BASE) as journal, closing(open_store(directory, None)) as store:
        store.create_tenant("acme")
        store.close()
        journal._copy()
        alone = shutil.copy(directory / "journal.sqlite", tmp_path / "alone.sqlite")
        with closing(sqlite3.connect(alone)) as database:
            assert database.execute("SELECT name FROM tenants").fetchall() == [("acme",)]
