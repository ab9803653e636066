"""A store of tenants in a journal that no server has, in SQLite and in PostgreSQL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from loraplex.adapters.journal.tables import JournalTables
from loraplex.tenants.store import TenantStore, open_store

BASE = "/models/base"


def until(is_so: Callable[[], bool]) -> None:
    patience_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < patience_s
        threading.Event().wait(0.005)


def new_state_dir(folder: Path) -> Path:
    """With the journal that the first start of a server makes."""
    folder.mkdir(mode=0o700)
    JournalTables(folder / "journal.sqlite", BASE).close()
    return folder


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return new_state_dir(tmp_path / "state")


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> str:
    """Of a new registry. Skips where PostgreSQL is not installed."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install loraplex[postgres])")
    from loraplex.adapters.journal.postgres_journal import PostgresJournal

    url: str = request.getfixturevalue("postgres_cluster").new_schema()
    PostgresJournal(url, BASE).close()
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[TenantStore]:
    if request.param == "sqlite":
        opened = open_store(request.getfixturevalue("state_dir"), None)
    else:
        opened = open_store(None, request.getfixturevalue("database_url"))
    with closing(opened):
        yield opened
