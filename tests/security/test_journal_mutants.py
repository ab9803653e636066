"""Every column of the journal with every kind of wrong value, and its schema with one object more or less.

An edit is refused at the start, named by `state check` and mended by `state repair`; or it is one that the registry
could have written itself (`HARMLESS`), and the server that starts on it works.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from loraplex.adapters.journal import SqliteJournal
from loraplex.adapters.journal.repair import check_state, repair_state
from loraplex.errors import ConfigError
from tests.adapters.fake_store import Bench

BASE = "/models/base"
NAMES = {"n1", "n2", "n3"}

COLUMNS = {
    "about": ("key", "value"),
    "names": (
        "name",
        "lora_int_id",
        "alias_of",
        "last_number",
        "history",
        "num_loads",
        "num_requests",
        "last_used_time",
    ),
    "versions": (
        "adapter_id",
        "name",
        "place",
        "number",
        "digest",
        "path",
        "lora_path",
        "origin",
        "nbytes",
        "max_rank",
        "is_pinned",
        "loaded_time",
    ),
}
VALUES = {
    "NULL": "NULL",
    "blob": "x'00ff'",
    "no UTF-8": "CAST(x'ff41' AS TEXT)",
    "empty": "''",
    "x": "'x'",
    "relative": "'a/b'",
    "NUL": "'/a' || char(0) || 'b'",
    "line end": "'a' || char(10) || 'b'",
    "upper hex": f"'{'D' * 64}'",
    "long": f"'/{'9' * 9000}'",
    "-1": "-1",
    "0": "0",
    "2": "2",
    "1.5": "1.5",
    "10^15": "1000000000000000",
    "2^63-1": "9223372036854775807",
    "-2^63": "-9223372036854775808",
    "infinite": "9e999",
}
ROW_COLUMNS = [f"{table}.{name}" for table in ("names", "versions") for name in COLUMNS[table]]
HARMLESS = {
    "about.schema": {"2"},
    "about.last_adapter_id": {"10^15"},
    "names.lora_int_id": {"NULL", "2", "10^15", "2^63-1"},
    "names.alias_of": {
        "NULL",
        "x",
        "relative",
        "line end",
        "upper hex",
        "-1",
        "0",
        "2",
        "1.5",
        "10^15",
        "2^63-1",
        "-2^63",
        "infinite",
    },
    "names.last_number": {"2", "10^15"},
    "names.num_loads": {"2", "10^15"},
    "names.num_requests": {"0", "2", "10^15"},
    "names.last_used_time": {"0", "2", "1.5"},
    "versions.adapter_id": {"2"},
    "versions.place": {"0"},
    "versions.lora_path": {"x", "relative", "upper hex", "line end", "-1", "0", "2", "1.5", "10^15"}
    | {"2^63-1", "-2^63", "infinite"},
    "versions.origin": {"empty", "x", "relative", "upper hex", "line end", "-1", "0", "2", "1.5", "10^15"}
    | {"2^63-1", "-2^63", "infinite"},
    "versions.nbytes": {"2", "10^15"},
    "versions.max_rank": {"0", "2"},  # IA3 has none
    "versions.is_pinned": {"0"},
    "versions.loaded_time": {"0", "2", "1.5"},
}
"""column -> values that the registry could have written."""

LOOSE = """
CREATE TABLE loose AS SELECT * FROM {table};
DROP TABLE {table};
ALTER TABLE loose RENAME TO {table};
"""
OBJECTS = {
    "trigger": "CREATE TRIGGER evil AFTER INSERT ON versions BEGIN UPDATE versions SET path = '/evil'; END",
    "trigger that refuses": "CREATE TRIGGER evil BEFORE UPDATE ON names BEGIN SELECT RAISE(ABORT, 'no'); END",
    "trigger on facts": "CREATE TRIGGER evil AFTER UPDATE ON about BEGIN DELETE FROM names; END",
    "view": "CREATE VIEW evil AS SELECT * FROM names",
    "table": "CREATE TABLE evil (x)",
    "unique index": "CREATE UNIQUE INDEX evil ON versions (digest)",
    "column": "ALTER TABLE names ADD COLUMN evil TEXT",
    "generated column": "ALTER TABLE names ADD COLUMN evil TEXT AS (name || 'x') VIRTUAL",
    "no index": "DROP INDEX ix_versions_name",
    "no keys of names": LOOSE.format(table="names"),
    "no keys of versions": LOOSE.format(table="versions"),
    "no key of facts": LOOSE.format(table="about"),
    "no column": "ALTER TABLE versions DROP COLUMN digest",
    "renamed column": "ALTER TABLE versions RENAME COLUMN digest TO hash",
    "renamed table": "ALTER TABLE versions RENAME TO older",
    "no names": "DROP TABLE names",
    "no facts": "DROP TABLE about",
    "view of names": "ALTER TABLE names RENAME TO real; CREATE VIEW names AS SELECT * FROM real",
    "fact of its own": "INSERT INTO about VALUES ('evil', '1')",
    "check": LOOSE.format(table="versions").replace(
        "CREATE TABLE loose AS SELECT * FROM versions;",
        "CREATE TABLE loose (adapter_id INTEGER NOT NULL PRIMARY KEY, name TEXT NOT NULL, place INTEGER NOT NULL,"
        " number INTEGER NOT NULL, digest TEXT NOT NULL, path TEXT NOT NULL, lora_path TEXT NOT NULL,"
        " origin TEXT NOT NULL, nbytes BIGINT NOT NULL, max_rank INTEGER NOT NULL, is_pinned BOOLEAN NOT NULL,"
        " loaded_time FLOAT NOT NULL, CHECK (adapter_id < 9));INSERT INTO loose SELECT * FROM versions;",
    )
    + "CREATE INDEX ix_versions_name ON versions (name)",
}


def furnish(directory: Path) -> None:
    with SqliteJournal(directory, BASE) as journal:
        registry = Bench(journal=journal).registry
        for name in sorted(NAMES):
            registry.load(name, f"/{name}", lora_int_id=int(name[1:]) + 100)


@contextmanager
def opened(state: Path) -> Iterator[sqlite3.Connection]:
    """Without a wait for the disk: no edit has to outlive a crash."""
    with closing(sqlite3.connect(state / "journal.sqlite")) as database:
        database.execute("PRAGMA synchronous = OFF")
        yield database


def edit(state: Path, script: str) -> None:
    with opened(state) as database:
        database.executescript(script)


def set_value(state: Path, column: str, value: str, where: str = "name = 'n2'") -> bool:
    """Whether SQLite keeps such a value there. NOT NULL is off meanwhile, as in an editor of files."""
    table, _, name = column.partition(".")
    with opened(state) as database:
        [sql] = database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    _set_schema(state, table, sql.replace("NOT NULL", ""))
    try:
        edit(state, f"UPDATE {table} SET {name} = {VALUES[value]} WHERE {where}")
    except sqlite3.IntegrityError:
        return False
    finally:
        _set_schema(state, table, sql)
    return True


def _set_schema(state: Path, table: str, sql: str) -> None:
    with opened(state) as database:
        database.execute("PRAGMA writable_schema = ON")
        database.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (sql, table))
        database.commit()


def assert_works(state: Path) -> None:
    """A server that starts on it has these adapters, loads another version, and so does the one after it."""
    with SqliteJournal(state, BASE) as journal:
        assert set(journal.names) == NAMES
        registry = Bench(journal=journal).registry
        registry.resume(journal.names, journal.last_adapter_id)
        registry.load("n1", "/other", load_inplace=True)
        registry.check_integrity()
    with SqliteJournal(state, BASE) as journal:
        assert journal.names["n1"].versions[0].lora_path == "/other"


def assert_refused_and_mended(state: Path, *, named: str) -> None:
    with pytest.raises(ConfigError, match="loraplex state check") as refusal:
        SqliteJournal(state, BASE)
    assert len(str(refusal.value)) < 2048
    assert str(refusal.value).isprintable()
    before = (state / "journal.sqlite").read_bytes()
    report = repair_state(state)
    assert named in report.describe()
    assert {*report.kept, *report.restored} == NAMES
    assert any(file.read_bytes() == before for file in (state / "damaged").rglob("journal.sqlite"))
    report = check_state(state)
    assert (report.is_whole, set(report.kept)) == (True, NAMES)


NUM_PARTS = 4


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("template") / "state"
    furnish(directory)
    return directory


@pytest.fixture
def states(template: Path, tmp_path: Path) -> Iterator[Path]:
    """Directories, each with the same three adapters."""
    return (Path(shutil.copytree(template, tmp_path / str(number))) for number in itertools.count())


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))])
@pytest.mark.parametrize("column", ROW_COLUMNS)
def test_a_wrong_value_of_a_row_is_refused_and_mended(states: Iterator[Path], column: str, part: int) -> None:
    """A part of the values for each column; the next column begins with the next one."""
    wrong = sorted(VALUES.keys() - HARMLESS.get(column, set()))
    begin = (part + sorted(ROW_COLUMNS).index(column)) % NUM_PARTS
    for value, state in zip(wrong[begin::NUM_PARTS], states, strict=False):
        if set_value(state, column, value):
            print(column, value)
            assert_refused_and_mended(state, named="n2")


@pytest.mark.parametrize("column", ROW_COLUMNS)
def test_what_the_registry_could_have_written_is_taken(states: Iterator[Path], column: str) -> None:
    for value, state in zip(sorted(HARMLESS.get(column, ())), states, strict=False):
        print(column, value)
        assert set_value(state, column, value)
        assert_works(state)


@pytest.mark.parametrize("fact", ["schema", "base_model", "last_adapter_id"])
def test_a_wrong_fact_is_refused(states: Iterator[Path], fact: str) -> None:
    for value, state in zip(sorted(VALUES.keys() - HARMLESS.get(f"about.{fact}", set())), states, strict=False):
        print(fact, value)
        assert set_value(state, "about.value", value, where=f"key = '{fact}'")
        with pytest.raises(ConfigError) as refusal:
            SqliteJournal(state, BASE)
        assert "loraplex state check" in str(refusal.value) or "--state-dir of its own" in str(refusal.value)
        assert len(str(refusal.value)) < 2048


@pytest.mark.parametrize("change", OBJECTS)
def test_an_object_more_or_less_is_refused_and_mended(states: Iterator[Path], change: str) -> None:
    state = next(states)
    edit(state, OBJECTS[change])
    assert_refused_and_mended(state, named="evil" if "evil" in OBJECTS[change] else "damaged")


def test_changes_since_the_last_copy_outlive_a_trigger(states: Iterator[Path]) -> None:
    state = next(states)
    for copy in (state / "copies").iterdir():
        copy.unlink()
    edit(state, OBJECTS["trigger"])
    report = repair_state(state)
    assert (set(report.kept), report.dropped) == (NAMES, ())
    assert_works(state)
