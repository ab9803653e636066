"""The journal on disk: what was acknowledged is there after any end, and nothing else is."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.adapters.journal import SqliteJournal
from loraplex.adapters.journal import tables as journal_tables
from loraplex.adapters.registry import LoadStatus, LoRARegistry, NameChange, NameRecord, NameUsage
from loraplex.core import Tier
from loraplex.errors import AdapterConflictError, AdapterNotFoundError, ConfigError, JournalError
from tests.adapters.fake_store import Bench

BASE = "/models/base"
NEVER_S = 1e6
WAIT_S = 60


class Life:
    """One server on a state directory: a registry over fakes, and its journal."""

    def __init__(self, directory: Path, count_interval_s: float = NEVER_S, max_versions_kept: int = 2) -> None:
        self.directory = directory
        self.journal = SqliteJournal(directory, BASE, count_interval_s)
        self.bench = Bench(max_versions_kept=max_versions_kept, journal=self.journal)
        self.registry = self.bench.registry
        self.registry.resume(self.journal.names, self.journal.last_adapter_id)

    def picture(self) -> dict[str, NameRecord | None]:
        """All that is remembered, as the journal is told it."""
        table = self.registry._table
        return {name: table.change_of(name).record for name in sorted(table.current)}

    def copy_to(self, directory: Path) -> Path:
        """The files as a power cut would leave them now."""
        return Path(shutil.copytree(self.directory, directory))


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Callable[[], Life]]:
    """Starts a server on the same directory, after the end of the one before. `kill` ends one without a word."""
    begun: list[Life] = []

    def begin() -> Life:
        for life in begun:
            life.journal.close()
        begun.append(Life(tmp_path / "state"))
        return begun[-1]

    yield begin
    for life in begun:
        life.journal.close()


def reopened(directory: Path) -> dict[str, NameRecord]:
    with SqliteJournal(directory, BASE) as journal:
        return dict(journal.names)


def furnish(life: Life) -> None:
    """Something of everything."""
    registry = life.registry
    registry.load("a", "/a", lora_int_id=7, is_pinned=True, origin="flag")
    registry.load("b", "/b")
    registry.load("c", "/c", lora_int_id=2**62)
    registry.load("b", "/b2", load_inplace=True)
    registry.switch("c", "b")
    registry.load("gone", "/gone")
    registry.unload("gone")
    life.bench.run_jobs()


# ------------------------------------------------------------------------------------------------------- life and death


def test_a_new_server_has_everything(lives: Callable[[], Life]) -> None:
    before = lives()
    furnish(before)
    after = lives()
    assert after.picture() == before.picture()
    assert after.bench.sources.num_opened == {}
    assert after.bench.store.count("add") == 0
    assert {where.tier for where in after.bench.store.adapters.values()} == {Tier.SOURCE}
    after.bench.run_jobs()
    pinned = after.registry.resolve("a")
    assert after.bench.store.pinned() == {pinned.adapter_id}
    assert (after.registry.name_of(7), after.registry.name_of(2**62)) == ("a", "c")
    assert after.registry.describe("c").alias_of == "b"
    assert after.registry.resolve("c@1").lora_path == "/c"
    assert after.registry.move("b").ref.lora_path == "/b"
    after.bench.check_idle()


def test_a_name_that_the_base_model_has_now_is_refused(lives: Callable[[], Life]) -> None:
    first = lives()
    furnish(first)
    first.journal.close()
    second = LoRARegistry(first.bench.store, first.bench.sources.open, base_names=["other", "b"])
    with pytest.raises(AdapterConflictError, match="adapter name 'b' would select the base model 'b'"):
        second.resume(reopened(first.directory), 10)
    assert second.names() == ()


def test_ids_are_never_used_again(lives: Callable[[], Life]) -> None:
    first = lives()
    furnish(first)
    highest = max(adapter_id for verb, adapter_id in first.bench.store.calls if verb == "add")
    assert highest not in {spec.adapter_id for spec in first.registry.specs()}  # that of `gone`
    second = lives()
    assert second.registry.load("new", "/new").ref.adapter_id == highest + 1


def test_a_version_number_is_not_used_again_after_a_restart(lives: Callable[[], Life]) -> None:
    first = lives()
    for _ in range(3):
        first.registry.load("a", "/a", load_inplace=True)
    first.registry.move("a")
    assert lives().registry.load("a", "/a", load_inplace=True).ref.adapter_version == 4


def test_fewer_versions_are_kept_from_now_on(tmp_path: Path) -> None:
    many = Life(tmp_path / "state", max_versions_kept=4)
    for _ in range(5):
        many.registry.load("a", "/a", load_inplace=True)
    many.journal.close()
    few = Life(tmp_path / "state", max_versions_kept=2)
    assert [each.ref.adapter_version for each in few.registry.describe("a").versions] == [5, 4]
    few.bench.check_idle()
    few.journal.close()


def test_the_way_back_survives(lives: Callable[[], Life]) -> None:
    first = lives()
    for path in ("/a", "/a2"):
        first.registry.load("a", path, load_inplace=True)
    first.registry.move("a")
    for name in ("green", "blue"):
        first.registry.load(name, f"/{name}")
        first.registry.switch("a", name)
    assert [lives().registry.move("a").ref.lora_path for _ in range(2)] == ["/green", "/blue"]
    life = lives()
    life.registry.unload("green")
    assert life.registry.move("a").ref.lora_path == "/a"


def test_a_state_directory_without_a_history_is_taken_over(tmp_path: Path) -> None:
    """As schema 1 wrote it: what is kept says the order, and a switch came last."""
    first = Life(tmp_path / "state")
    furnish(first)
    first.registry.load("c", "/c2", load_inplace=True)
    first.registry.switch("c", "a")
    first.journal.close()
    with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as old:
        old.execute("ALTER TABLE names DROP COLUMN history")
        old.execute("UPDATE about SET value = '1' WHERE key = 'schema'")
    old.close()
    second = Life(tmp_path / "state")
    assert second.picture()["c"].history == (1, 2)
    assert second.registry.move("c").ref.adapter_version == 2
    assert second.registry.move("b").ref.adapter_version == 1
    second.journal.close()
    assert reopened(tmp_path / "state")["c"].history == (1, "a")


def test_the_same_load_after_a_restart_is_a_no_op(lives: Callable[[], Life]) -> None:
    furnish(lives())
    life = lives()
    assert life.registry.load("a", "/a").status is LoadStatus.ALREADY_LOADED
    assert life.bench.sources.num_opened == {}


def test_when_an_adapter_was_registered_survives(lives: Callable[[], Life]) -> None:
    life = lives()
    life.bench.now = 321.5
    life.registry.load("a", "/a")
    assert lives().registry.refs()["a"].loaded_time == 321.5


def test_counters_are_written_at_the_end(lives: Callable[[], Life]) -> None:
    life = lives()
    furnish(life)
    life.bench.now = 500.0
    for _ in range(3):
        life.registry.release(life.registry.acquire("a"))
    info = lives().registry.describe("a")
    assert (info.num_loads, info.num_requests, info.last_used_time) == (1, 3, 500.0)


def test_counters_are_written_now_and_then(tmp_path: Path) -> None:
    life = Life(tmp_path / "state", count_interval_s=0.01)
    asked = threading.Event()
    take_usage = life.registry.take_usage

    def watched() -> list[NameUsage]:
        if len(asked_twice) == 2:
            asked.set()
        asked_twice.append(0)
        return take_usage()

    asked_twice: list[int] = []
    life.registry.load("a", "/a")
    life.registry.release(life.registry.acquire("a"))
    life.journal.count(watched)
    assert asked.wait(WAIT_S)  # what the first call gave is written when the third comes
    assert reopened(life.copy_to(tmp_path / "copy"))["a"].usage.num_requests == 1
    life.journal.close()


def test_a_verb_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    """The files are taken after each verb, without any end: what was acknowledged is there."""
    life = Life(tmp_path / "state")
    registry = life.registry
    verbs: list[Callable[[], object]] = [
        lambda: registry.load("a", "/a", lora_int_id=1),
        lambda: registry.load("b", "/b", is_pinned=True),
        lambda: registry.pin("a"),
        lambda: registry.load("a", "/a2", load_inplace=True),
        lambda: registry.move("a"),
        lambda: registry.switch("a", "b"),
        lambda: registry.unpin("b"),
        lambda: registry.load("b", "/b", lora_int_id=5),
        lambda: registry.switch("b", "a"),
        lambda: registry.unload("a"),
    ]
    for number, verb in enumerate(verbs):
        verb()
        assert reopened(life.copy_to(tmp_path / str(number))) == life.picture()
    life.journal.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_write_loses_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    """The tail that a crash tore is cut off, or is noise: the last verb is whole or absent, all before it is there."""
    chance = random.Random(seed)
    life = Life(tmp_path / "state")
    log = life.directory / "journal.sqlite-wal"
    furnish(life)
    for number in range(8):
        acknowledged, num_safe = life.picture(), log.stat().st_size
        life.registry.load(f"n{number}", "/x", lora_int_id=100 + number)
        life.registry.pin(f"n{number}")
        both = life.picture()
        copy = life.copy_to(tmp_path / f"copy{number}")
        damage(copy / "journal.sqlite-wal", num_safe, chance)
        found = reopened(copy)
        assert found in (acknowledged, both, {**acknowledged, f"n{number}": unpinned(both[f"n{number}"])})
    life.journal.close()


def unpinned(record: NameRecord | None) -> NameRecord:
    assert record is not None
    return replace(record, versions=tuple(replace(version, is_pinned=False) for version in record.versions))


def damage(log: Path, num_safe: int, chance: random.Random) -> None:
    """Beyond `num_safe` bytes: cut off at random, or one random byte changed, or noise behind."""
    data = bytearray(log.read_bytes())
    assert len(data) > num_safe
    where = chance.randrange(num_safe, len(data))
    kind = chance.choice(["cut", "flip", "noise"])
    if kind == "cut":
        del data[where:]
    elif kind == "flip":
        data[where] ^= 1 << chance.randrange(8)
    else:
        data[where:] = chance.randbytes(len(data) - where + 5000)
    log.write_bytes(data)


def test_a_killed_process_leaves_all_that_it_said(tmp_path: Path) -> None:
    """A server that is killed while it writes as fast as it can; it prints each name when its load has returned."""
    code = (
        "import sys, itertools\n"
        "from pathlib import Path\n"
        "from tests.adapters.test_journal import Life\n"
        "life = Life(Path(sys.argv[1]))\n"
        "for number in itertools.count():\n"
        "    life.registry.load(f'n{number}', '/x', lora_int_id=number + 1, is_pinned=True)\n"
        "    print(number, flush=True)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(40)]
    process.kill()
    said += map(int, process.stdout.read().split())
    process.wait()
    process.stdout.close()
    names = reopened(tmp_path)
    assert len(names) - len(said) in (0, 1)  # the last one may be written and not said
    for number in said:
        record = names[f"n{number}"]
        assert (record.lora_int_id, record.versions[0].is_pinned) == (number + 1, True)


def test_many_verbs_at_once_are_all_there(lives: Callable[[], Life]) -> None:
    life = lives()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: life.registry.load(f"n{number}", "/x", is_pinned=number % 2 == 0), range(100)))
        list(pool.map(lambda number: life.registry.unload(f"n{number}"), range(0, 100, 3)))
    before = life.picture()
    assert lives().picture() == before


# ------------------------------------------------------------------------------------------------- waiting for the disk


def test_no_request_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path / "state")
    life.registry.load("a", "/a")
    arrived, opened = threading.Event(), threading.Event()
    write = life.journal._tables.write

    def slow(changes: list[NameChange]) -> None:
        arrived.set()
        assert opened.wait(WAIT_S)
        write(changes)

    monkeypatch.setattr(life.journal._tables, "write", slow)
    with ThreadPoolExecutor(2) as pool:
        load = pool.submit(life.registry.load, "b", "/b")
        assert arrived.wait(WAIT_S)
        life.registry.release(life.registry.acquire("a"))
        life.registry.release(life.registry.acquire("b"))  # it answers; only its loader waits for the disk
        assert not load.done()
        opened.set()
        assert load.result(WAIT_S).status is LoadStatus.LOADED
    life.journal.close()


def test_what_could_not_be_written_is_written_with_the_next(
    lives: Callable[[], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = lives()

    def fail(changes: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(life.journal._tables, "write", fail)
        with pytest.raises(JournalError, match=r"could not be written to its state directory \(disk I/O error\)"):
            life.registry.load("a", "/a", lora_int_id=1)
        with pytest.raises(JournalError):  # not "already loaded"
            life.registry.load("a", "/a", lora_int_id=1)
        with pytest.raises(JournalError):
            life.registry.unload("a")
        with pytest.raises(JournalError):  # not "unknown"
            life.registry.unload("a")
        with pytest.raises(JournalError):
            life.registry.load("b", "/b", lora_int_id=1)
    assert life.registry.load("b", "/b", lora_int_id=1).status is LoadStatus.ALREADY_LOADED
    with closing(sqlite3.connect(life.directory / "journal.sqlite")) as database:
        assert database.execute("SELECT name FROM names").fetchall() == [("b",)]
    with pytest.raises(AdapterNotFoundError):
        life.registry.unload("a")
    life.registry.load("c", "/c")
    before = life.picture()
    assert list(before) == ["b", "c"]
    assert lives().picture() == before


def _removed(directory: Path) -> None:
    shutil.rmtree(directory)


def _moved(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def _made_again(directory: Path) -> None:
    shutil.rmtree(directory)
    SqliteJournal(directory, BASE).close()


def _without_its_log(directory: Path) -> None:
    (directory / "journal.sqlite-wal").unlink()


@pytest.mark.parametrize("mishap", [_removed, _moved, _made_again, _without_its_log])
def test_nothing_is_acknowledged_without_the_journal_at_its_path(
    lives: Callable[[], Life], mishap: Callable[[Path], None]
) -> None:
    life = lives()
    life.registry.load("a", "/a")
    mishap(life.directory)
    for _ in range(2):
        with pytest.raises(JournalError, match=r"could not be written .*is not the file that this server opened"):
            life.registry.load("b", "/b")
    with pytest.raises(JournalError):
        life.registry.unload("a")


def test_a_journal_that_goes_while_it_is_written_is_noticed(
    lives: Callable[[], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = lives()
    write = life.journal._tables.write

    def write_and_lose(changes: Sequence[NameChange]) -> None:
        write(changes)
        _moved(life.directory)

    monkeypatch.setattr(life.journal._tables, "write", write_and_lose)
    with pytest.raises(JournalError, match="is not the file that this server opened"):
        life.registry.load("a", "/a")


def test_a_journal_that_is_put_back_goes_on(lives: Callable[[], Life]) -> None:
    life = lives()
    aside = life.directory.rename(life.directory.with_name("aside"))
    with pytest.raises(JournalError):
        life.registry.load("a", "/a")
    aside.rename(life.directory)
    life.registry.load("b", "/b")
    before = life.picture()
    assert list(before) == ["a", "b"]
    assert lives().picture() == before


def test_a_journal_that_is_gone_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a verb, too."""
    with SqliteJournal(tmp_path / "state", BASE, count_interval_s=0.01) as journal:
        shutil.rmtree(tmp_path / "state")
        until = time.monotonic() + WAIT_S
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        for _ in range(3):
            with pytest.raises(JournalError):
                journal.record(()).result(WAIT_S)
        time.sleep(0.05)
    (only,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert "journal.sqlite is not the file that this server opened" in only


def test_after_the_end_nothing_is_promised(lives: Callable[[], Life]) -> None:
    life = lives()
    life.journal.close()
    life.journal.close()
    with pytest.raises(JournalError, match="the server is shutting down"):
        life.registry.load("a", "/a")


def test_nobody_pays_for_sqlalchemy_without_a_state_directory() -> None:
    code = (
        "import sys, loraplex.cli, loraplex.server.run, loraplex.frontend.async_engine, loraplex.frontend.llm\n"
        "assert 'sqlalchemy' not in sys.modules\n"
        "import loraplex.adapters.journal\n"
        "assert 'sqlalchemy' in sys.modules and 'torch' not in sys.modules.keys() - before\n"
    ).replace("import loraplex.adapters", "before = set(sys.modules)\nimport loraplex.adapters")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_two_servers_cannot_share_a_directory(tmp_path: Path) -> None:
    with SqliteJournal(tmp_path, BASE), pytest.raises(ConfigError, match=r"in use by another server \(process \d+\)"):
        SqliteJournal(tmp_path, BASE)
    SqliteJournal(tmp_path, BASE).close()


def test_another_models_directory_is_refused(tmp_path: Path) -> None:
    SqliteJournal(tmp_path, BASE).close()
    with pytest.raises(ConfigError, match="has the adapters of base model '/models/base', this one is '/other'"):
        SqliteJournal(tmp_path, "/other")
    SqliteJournal(tmp_path, BASE).close()


def test_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(journal_tables, "SCHEMA_VERSION", "99")
        SqliteJournal(tmp_path, BASE).close()
    with pytest.raises(ConfigError, match="schema 99, this one has 4"):
        SqliteJournal(tmp_path, BASE)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"not a database at all, but long enough to be looked at" * 50)
    with pytest.raises(ConfigError, match=r"cannot be read .*loraplex state check"):
        SqliteJournal(tmp_path, BASE)


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        SqliteJournal(tmp_path / "file" / "state", BASE)
    with pytest.raises(ConfigError, match="file cannot be used: it is a file; give a directory"):
        SqliteJournal(tmp_path / "file", BASE)


def test_a_first_start_that_was_interrupted_is_a_first_start(tmp_path: Path) -> None:
    """The tables are there, and nothing that says whose they are."""
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        database.execute("CREATE TABLE about (key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (key))")
    database.close()
    with SqliteJournal(tmp_path, BASE) as journal:
        assert (journal.names, journal.last_adapter_id) == ({}, 0)


def test_the_settings_that_make_it_safe(tmp_path: Path) -> None:
    with SqliteJournal(tmp_path, BASE) as journal, journal._tables._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2  # FULL
