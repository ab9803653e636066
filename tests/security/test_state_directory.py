"""A state directory that was emptied, edited, made readable or booby-trapped is refused, and can be repaired."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.journal import SqliteJournal
from loraplex.adapters.journal import damage as damages
from loraplex.adapters.journal.copies import JournalCopies
from loraplex.adapters.journal.repair import check_state, repair_state
from loraplex.adapters.journal.state_directory import FOLDERS, StateDirectory
from loraplex.adapters.registry.records import AdapterText, NameChange, NameRecord, NameUsage, VersionRecord
from loraplex.cli import app
from loraplex.errors import ConfigError

BASE = "/models/base"
Damage = Callable[[Path], None]


def a_record(number: int) -> NameRecord:
    version = VersionRecord(number, 1, "d" * 64, f"/cache/{number}", f"/{number}", "", 1000, 8, number == 1, 12.5)
    return NameRecord(100 + number, None, 1, (version,), NameUsage(f"n{number}", 1, 2, 20.0), ())


def furnish(directory: Path, num_names: int = 3) -> None:
    with SqliteJournal(directory, BASE) as journal:
        changes = [NameChange(f"n{number}", a_record(number)) for number in range(1, num_names + 1)]
        journal.record(changes).result()


def names_in(directory: Path) -> list[str]:
    with SqliteJournal(directory, BASE) as journal:
        return list(journal.names)


def execute(*statements: str) -> Damage:
    def damage(file: Path) -> None:
        with closing(sqlite3.connect(file)) as database:
            for statement in statements:
                database.execute(statement)
            database.commit()

    return damage


def truncate(file: Path) -> None:
    file.write_bytes(b"")


def remove(file: Path) -> None:
    file.unlink()


def overwrite_the_middle(file: Path) -> None:
    execute("PRAGMA wal_checkpoint(TRUNCATE)")(file)
    data = bytearray(file.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    file.write_bytes(data)


def flip_a_bit_of_the_schema(file: Path) -> None:
    """SQLite's error quotes the schema, which is no UTF-8 any more."""
    execute("PRAGMA wal_checkpoint(TRUNCATE)")(file)
    data = file.read_bytes()
    assert data.count(b"CREATE TABLE names") == 1
    file.write_bytes(data.replace(b"CREATE TABLE names", b"CR\xc5ATE TABLE names"))


def overwrite_all(file: Path) -> None:
    file.write_bytes(b"no database at all, but long enough to be looked at" * 100)


WHOLE_FILE = {
    "emptied": truncate,
    "removed": remove,
    "overwritten": overwrite_all,
    "pages overwritten": overwrite_the_middle,
    "a bit of the schema": flip_a_bit_of_the_schema,
    "no facts": execute("DELETE FROM about"),
    "no base model": execute("DELETE FROM about WHERE key = 'base_model'"),
    "last id is a text": execute("UPDATE about SET value = 'many' WHERE key = 'last_adapter_id'"),
    "last id is huge": execute(f"UPDATE about SET value = '{'9' * 5000}' WHERE key = 'last_adapter_id'"),
    "no table": execute("DROP TABLE versions"),
}
"""Damage that leaves nothing of the journal: a repair takes all from the newest copy."""

ONE_NAME = {
    "no version": "DELETE FROM versions WHERE name = 'n2'",
    "no name": "DELETE FROM names WHERE name = 'n2'",
    "history is no JSON": "UPDATE names SET history = '[1,' WHERE name = 'n2'",
    "history is an object": "UPDATE names SET history = '{}' WHERE name = 'n2'",
    "history of numbers below 1": "UPDATE names SET history = '[0]' WHERE name = 'n2'",
    "history is deep": f"UPDATE names SET history = '{'[' * 5000}' WHERE name = 'n2'",
    "rank is a text": "UPDATE versions SET max_rank = 'eight' WHERE name = 'n2'",
    "rank is negative": "UPDATE versions SET max_rank = -1 WHERE name = 'n2'",
    "path is a blob": "UPDATE versions SET path = x'00ff' WHERE name = 'n2'",
    "path is empty": "UPDATE versions SET path = '' WHERE name = 'n2'",
    "path has a NUL": "UPDATE versions SET path = '/a' || char(0) || 'b' WHERE name = 'n2'",
    "place is missing": "UPDATE versions SET place = 7 WHERE name = 'n2'",
    "number beyond the last": "UPDATE versions SET number = 9 WHERE name = 'n2'",
    "pin is 2": "UPDATE versions SET is_pinned = 2 WHERE name = 'n2'",
    "time is infinite": "UPDATE versions SET loaded_time = 9e999 WHERE name = 'n2'",
    "usage is negative": "UPDATE names SET num_requests = -5 WHERE name = 'n2'",
    "an alias of itself": "UPDATE names SET alias_of = 'n2' WHERE name = 'n2'",
    "lora_int_id is 0": "UPDATE names SET lora_int_id = 0 WHERE name = 'n2'",
}
"""Damage to one name of three."""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    furnish(tmp_path / "state")
    return tmp_path / "state"


@pytest.mark.parametrize("kind", WHOLE_FILE)
def test_a_damaged_journal_is_refused_and_comes_back_from_a_copy(state: Path, kind: str) -> None:
    WHOLE_FILE[kind](state / "journal.sqlite")
    with pytest.raises(ConfigError, match="loraplex state check") as refusal:
        SqliteJournal(state, BASE)
    assert len(str(refusal.value)) < 2048
    report = check_state(state)
    assert (report.kept, report.restored, report.dropped) == ((), ("n1", "n2", "n3"), ())
    assert repair_state(state) == report
    assert names_in(state) == ["n1", "n2", "n3"]
    assert check_state(state).is_whole


@pytest.mark.parametrize("kind", ONE_NAME)
def test_a_damaged_record_is_refused_and_comes_back_from_a_copy(state: Path, kind: str) -> None:
    execute(ONE_NAME[kind])(state / "journal.sqlite")
    with pytest.raises(ConfigError, match=r"adapter 'n2'.*loraplex state check"):
        SqliteJournal(state, BASE)
    report = repair_state(state)
    assert (set(report.kept), report.restored, report.dropped) == ({"n1", "n3"}, ("n2",), ())
    with SqliteJournal(state, BASE) as journal:
        assert dict(journal.names) == {f"n{number}": a_record(number) for number in (1, 2, 3)}
        assert journal.last_adapter_id == 3


def test_without_a_copy_a_damaged_record_is_dropped_and_kept_aside(state: Path) -> None:
    for copy in (state / "copies").iterdir():
        copy.unlink()
    execute(ONE_NAME["rank is a text"])(state / "journal.sqlite")
    report = repair_state(state)
    assert (report.restored, report.dropped) == ((), ("n2",))
    assert names_in(state) == ["n1", "n3"]
    kept = next((state / "damaged").iterdir()) / "journal.sqlite"
    with closing(sqlite3.connect(kept)) as database:
        assert database.execute("SELECT max_rank FROM versions WHERE name = 'n2'").fetchall() == [("eight",)]
    with SqliteJournal(state, BASE) as journal:
        assert journal.last_adapter_id == 3  # the id of n2 is never given again


def test_without_a_copy_nothing_can_be_made_of_noise(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for copy in (state / "copies").iterdir():
        copy.unlink()
    overwrite_all(state / "journal.sqlite")
    before = (state / "journal.sqlite").read_bytes()
    assert app(["state", "check", str(state)], result_action="return_value") == 1
    assert app(["state", "repair", str(state)], result_action="return_value") == 1
    assert "nothing can be restored: move" in capsys.readouterr().out
    assert (state / "journal.sqlite").read_bytes() == before


def test_a_damaged_copy_is_passed_over(state: Path) -> None:
    newest = JournalCopies(state / "copies").files()[0]
    newest.rename(state / "copies" / "journal-20990101T000000000000Z.sqlite")
    furnish(state)  # makes a good one of today
    overwrite_all(state / "copies" / "journal-20990101T000000000000Z.sqlite")
    truncate(state / "journal.sqlite")
    assert repair_state(state).restored == ("n1", "n2", "n3")


def test_a_copy_does_not_bring_back_an_id_that_another_name_has(state: Path) -> None:
    execute(
        "DELETE FROM versions WHERE name = 'n1'",
        "UPDATE versions SET adapter_id = 1 WHERE name = 'n2'",
    )(state / "journal.sqlite")
    report = repair_state(state)
    assert (report.restored, report.dropped) == ((), ("n1",))
    assert names_in(state) == ["n2", "n3"]


def test_an_id_of_two_versions_is_damage_of_both(state: Path) -> None:
    """SQLite's own key forbids it; an index that was damaged does not."""
    execute("UPDATE about SET value = '1' WHERE key = 'last_adapter_id'")(state / "journal.sqlite")
    with pytest.raises(ConfigError, match="last adapter_id is 1, but 3 was given"):
        SqliteJournal(state, BASE)
    assert set(repair_state(state).kept) == {"n1", "n2", "n3"}
    with SqliteJournal(state, BASE) as journal:
        assert journal.last_adapter_id == 3


def test_an_error_names_a_few_of_many_damages(tmp_path: Path) -> None:
    furnish(tmp_path, num_names=300)
    execute("UPDATE versions SET max_rank = 'x'")(tmp_path / "journal.sqlite")
    with pytest.raises(ConfigError, match="and 292 more") as refusal:
        SqliteJournal(tmp_path, BASE)
    assert len(str(refusal.value)) < 2048


# ------------------------------------------------------------------------------------------------------------ the files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nothing_is_readable_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        furnish(tmp_path / "state")
        with SqliteJournal(tmp_path / "state", BASE) as journal:
            journal.record([NameChange("n9", a_record(9))]).result()
            files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
            assert {path.name for path in files} > {"lock", "journal.sqlite", "journal.sqlite-wal"}
            assert {mode(path) for path in files} == {0o600}
    finally:
        os.umask(before)
    assert mode(tmp_path / "state") == mode(tmp_path / "state" / "copies") == 0o700


def test_a_journal_that_others_could_read_is_made_private(state: Path) -> None:
    (state / "journal.sqlite").chmod(0o644)
    assert names_in(state) == ["n1", "n2", "n3"]
    assert mode(state / "journal.sqlite") == 0o600


def test_a_directory_that_others_can_write_to_is_refused(state: Path) -> None:
    state.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"can be written to by other users \(mode 777\): chmod 700 it, or give another"
    ):
        SqliteJournal(state, BASE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(state: Path) -> None:
    os.chown(state, 12345, 12345)
    with pytest.raises(ConfigError, match=r"belongs to another user \(12345\)"):
        SqliteJournal(state, BASE)


@pytest.mark.parametrize("name", ["lock", "journal.sqlite"])
@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "dangling link", "hard link"])
def test_what_is_no_plain_file_is_refused_and_left_alone(tmp_path: Path, name: str, kind: str) -> None:
    state, victim = tmp_path / "state", tmp_path / "victim"
    state.mkdir(0o700)
    victim.write_text("precious")
    trap = state / name
    match kind:
        case "directory":
            trap.mkdir()
        case "fifo":
            os.mkfifo(trap)
        case "link":
            trap.symlink_to(victim)
        case "dangling link":
            trap.symlink_to(tmp_path / "made")
        case "hard link":
            trap.hardlink_to(victim)
    with pytest.raises(ConfigError, match=f"{name} is a link, or not a plain file"):
        SqliteJournal(state, BASE)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_in_the_place_of_one_is_refused(tmp_path: Path, state: Path, name: str, kind: str) -> None:
    """By a server and by a check; nothing behind a link is touched. A start with a link to /etc emptied it."""
    outside = tmp_path / "elsewhere"
    (outside / "abc-0123abcd").mkdir(parents=True)
    shutil.rmtree(state / name, ignore_errors=True)
    if kind == "file":
        (state / name).write_text("")
    else:
        (state / name).symlink_to(outside)
    for use in (lambda: SqliteJournal(state, BASE), lambda: check_state(state), lambda: repair_state(state)):
        with pytest.raises(ConfigError, match=f"{name} is {'no folder' if kind == 'file' else 'a link'}; move it away"):
            use()
    assert (outside / "abc-0123abcd").is_dir()
    (state / name).unlink()
    with StateDirectory(state):
        pass  # the lock is free


def test_an_emptied_journal_without_copies_is_refused(state: Path) -> None:
    for copy in (state / "copies").iterdir():
        copy.unlink()
    truncate(state / "journal.sqlite")
    with pytest.raises(ConfigError, match=r"journal.sqlite is empty, and there is no copy of it; .*state check"):
        SqliteJournal(state, BASE)
    assert not check_state(state).is_whole


def test_a_start_that_was_killed_while_it_made_the_journal(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    tmp_path.joinpath("journal.new.sqlite").write_text("half of one")
    tmp_path.joinpath("journal.new.sqlite-wal").write_text("half of one")
    with SqliteJournal(tmp_path, BASE) as journal:
        assert not journal.names
    assert {file.name for file in tmp_path.iterdir()} == {"copies", "journal.sqlite", "lock"}
    assert check_state(tmp_path).is_whole


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_what_stands_in_the_place_of_files_that_are_made(state: Path, kind: str) -> None:
    """Of a new journal and of a copy: a directory is refused by its name, what can be removed or passed over is."""
    make = {"directory": Path.mkdir, "fifo": os.mkfifo, "link": lambda path: path.symlink_to("nowhere")}[kind]
    make(state / "copies" / "journal-20990101T000000000000Z.sqlite")
    make(state / "journal.new.sqlite")
    assert check_state(state).is_whole
    (state / "journal.sqlite").unlink()
    assert repair_state(state).restored == ("n1", "n2", "n3")
    for copy in (state / "copies").iterdir():
        copy.rmdir() if kind == "directory" and copy.is_dir() else copy.unlink()
    (state / "journal.sqlite").unlink()
    if kind == "directory":
        with pytest.raises(ConfigError, match=r"journal.new.sqlite cannot be removed: Is a directory"):
            SqliteJournal(state, BASE)
    else:
        assert names_in(state) == []


def test_a_check_leaves_a_journal_of_an_older_version_to_it(state: Path) -> None:
    """What was written since is in SQLite's log. The check upgraded the schema, and the older version refused it."""
    with closing(sqlite3.connect(state / "journal.sqlite")) as old:
        old.execute("ALTER TABLE names DROP COLUMN history")
        old.execute("UPDATE about SET value = '1' WHERE key = 'schema'")
        old.commit()
        files = [state / f"journal.sqlite{suffix}" for suffix in ("", "-wal")]
        before = [file.read_bytes() for file in files]
        assert before[1]
        report = check_state(state)
        assert report.kept == ("n1", "n2", "n3")
        assert "schema       1: a server of this version makes it 4" in report.describe()
        assert repair_state(state) == report
        assert [file.read_bytes() for file in files] == before
    SqliteJournal(state, BASE).close()
    assert "schema" not in check_state(state).describe()


def test_a_check_needs_a_directory_that_is_there_and_free(state: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        check_state(state / "nowhere")
    assert not (state / "nowhere").exists()
    with SqliteJournal(state, BASE), pytest.raises(ConfigError, match="in use by another server"):
        check_state(state)


@pytest.mark.parametrize("verb", [check_state, repair_state])
def test_a_directory_that_is_no_servers_is_left_as_it_is(tmp_path: Path, verb: Callable[[Path], Any]) -> None:
    """`state check /` left a file in it; a file `lock` of another program was overwritten."""
    (tmp_path / "lock").write_text("of another program")
    (tmp_path / "copies").mkdir()
    with pytest.raises(ConfigError, match="has no journal and no copy of one"):
        verb(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"copies", "lock"}
    assert (tmp_path / "lock").read_text() == "of another program"


def test_a_whole_directory_is_left_alone(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["state", "repair", str(state)], result_action="return_value") == 0
    assert app(["state", "check", str(state)], result_action="return_value") == 0
    assert "nothing is damaged" in capsys.readouterr().out
    assert not (state / "damaged").exists()


# ----------------------------------------------------------------------------------------------------------- the copies


def test_copies_of_the_last_days_are_kept(tmp_path: Path) -> None:
    copies = JournalCopies(tmp_path)
    start = datetime(2026, 11, 1, tzinfo=UTC)
    with closing(sqlite3.connect(":memory:")) as source:
        source.execute("CREATE TABLE t (x)")
        times = [start + timedelta(hours=6 * number) for number in range(48)]  # 12 days
        files = [copies.add(source, time) for time in times]
    kept = {(times[files.index(file)].day, times[files.index(file)].hour) for file in copies.files()}
    assert kept == {(12, 18), (12, 12), (12, 6), *((day, 18) for day in range(6, 12))}


def test_a_copy_is_made_soon_after_a_change(tmp_path: Path) -> None:
    with SqliteJournal(tmp_path, BASE, count_interval_s=0.01, copy_interval_s=0.0) as journal:
        first = JournalCopies(tmp_path / "copies").files()[0]
        journal.record([NameChange("n1", a_record(1))]).result()
        while (newest := JournalCopies(tmp_path / "copies").files()[0]) == first:
            pass
        with closing(sqlite3.connect(newest)) as database:
            assert database.execute("SELECT name FROM names").fetchall() == [("n1",)]


def test_a_full_disk_costs_the_copy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: JournalCopies, source: object, now: object = None) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JournalCopies, "add", fail)
    furnish(tmp_path)
    assert names_in(tmp_path) == ["n1", "n2", "n3"]


@pytest.mark.parametrize("content", ["{", "x" * (2**24 + 1), '{"digest": "0", "document": {}}', '{"digest": 1}', "[]"])
def test_a_damaged_text_is_told_and_set_aside(state: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The journal and the texts of others stay as they are."""
    text = AdapterText.of({"chat_templates": {"default": "{{ messages }}"}})
    with SqliteJournal(state, BASE) as journal:
        for name in ("n1", "n2"):
            record = journal.names[name]
            (version,) = record.versions
            journal.record([NameChange(name, None)]).result()
            journal.record([NameChange(name, replace(record, versions=(replace(version, text=text),)))]).result()
    assert check_state(state).is_whole
    (state / "texts" / "2.json").write_text(content)
    with pytest.raises(ConfigError, match=r"2.json, the text of adapter 'n2', is damaged .*state repair"):
        SqliteJournal(state, BASE)
    assert app(["state", "check", str(state)], result_action="return_value") == 1
    assert "leaves without a text of their own, until they are loaded again: 'n2'" in capsys.readouterr().out
    report = repair_state(state)
    assert (report.kept, report.dropped, report.textless) == (("n1", "n2", "n3"), (), ("n2",))
    assert [file.name for file in (state / "damaged").rglob("*") if file.is_file()] == ["2.json"]
    assert check_state(state).is_whole
    with SqliteJournal(state, BASE) as journal:
        texts = {name: record.versions[0].text for name, record in journal.names.items()}
    assert texts == {"n1": text, "n2": None, "n3": None}


def test_a_damaged_name_is_one_line_of_a_report(tmp_path: Path) -> None:
    furnish(tmp_path)
    found = damages.Damage("\x1b[2J", "its number is no number")
    report = replace(check_state(tmp_path), damages=(found,), dropped=("good", "\x1b[2J\nall is well"))
    assert "drops: 'good', '\\x1b[2J\\nall is well'" in report.describe()
    assert "\x1b" not in report.describe()
