"""Versions of a name: which of them `name@N` addresses, what is kept, and the way back to one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from loraplex.adapters.registry import LoadStatus, VersionState
from loraplex.adapters.registry.name_table import MAX_OTHERS
from loraplex.core import Tier
from loraplex.errors import (
    AdapterContentChangedError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    InvalidRequestError,
    JournalError,
)
from loraplex.events import EventKind
from tests.adapters.fake_store import Bench, Gate, MemoryJournal, digest_of


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(max_versions_kept=2, journal=MemoryJournal())
    bench.forbid_calls_under_lock()
    yield bench
    bench.check_idle()


def reload(bench: Bench, content: str, name: str = "sql") -> None:
    bench.sources.digests["/sql"] = content
    bench.registry.load(name, "/sql", load_inplace=True)


def states(bench: Bench, name: str = "sql") -> dict[int, VersionState]:
    return {each.ref.adapter_version: each.state for each in bench.registry.describe(name).versions}


def digest(bench: Bench, name: str) -> str:
    return bench.registry.resolve(name).adapter_digest


def test_the_version_before_is_kept_and_addressed(bench: Bench) -> None:
    for content in ("one", "two", "three"):
        reload(bench, content)
    assert (digest(bench, "sql"), digest(bench, "sql@3"), digest(bench, "sql@2")) == ("three", "three", "two")
    assert states(bench) == {3: VersionState.CURRENT, 2: VersionState.KEPT}
    for name in ("sql@1", "sql@4", "sql@0", "other@1", "@1", "sql@"):
        with pytest.raises(AdapterNotFoundError):
            bench.registry.acquire(name)


def test_a_clone_is_of_the_version_that_answers_or_is_named_and_stays_when_the_name_moves(bench: Bench) -> None:
    for content in ("one", "two"):
        reload(bench, content)
    assert bench.registry.clone("sql", "new").ref.adapter_digest == "two"
    assert bench.registry.clone("sql@1", "old").ref.adapter_digest == "one"
    bench.registry.move("sql")
    assert (digest(bench, "sql"), digest(bench, "new"), digest(bench, "old")) == ("one", "two", "one")
    assert bench.sources.num_opened == {"/sql": 2}


def test_a_kept_version_is_out_of_memory_when_its_last_request_ends(bench: Bench) -> None:
    reload(bench, "one")
    held = bench.registry.acquire("sql")
    bench.registry.preload("sql")
    reload(bench, "two")
    assert bench.store.find(held.adapter_id).tier is Tier.DEVICE
    assert bench.registry.describe("sql").num_draining == 1
    bench.registry.release(held)
    bench.run_jobs()
    assert bench.store.find(held.adapter_id).tier is Tier.SOURCE


def test_a_kept_version_leaves_the_memory_that_another_name_needs(bench: Bench) -> None:
    reload(bench, "one")
    bench.registry.preload("sql")
    kept = bench.registry.resolve("sql")
    reload(bench, "one", "twin")
    reload(bench, "two")
    assert bench.store.find(kept.adapter_id).tier is Tier.DEVICE


def test_what_runs_is_addressed_until_it_ends_though_too_many_are_kept(bench: Bench) -> None:
    reload(bench, "one")
    held = bench.registry.acquire("sql")
    reload(bench, "two")
    reload(bench, "three")
    assert states(bench)[1] is VersionState.DRAINING
    bench.registry.release(bench.registry.acquire("sql@1"))
    bench.registry.release(held)
    bench.run_jobs()
    assert states(bench) == {3: VersionState.CURRENT, 2: VersionState.KEPT}
    with pytest.raises(AdapterNotFoundError):
        bench.registry.acquire("sql@1")


def test_an_unload_ends_every_version_at_once(bench: Bench) -> None:
    reload(bench, "one")
    held = bench.registry.acquire("sql")
    reload(bench, "two")
    bench.registry.unload("sql")
    reload(bench, "three")
    assert bench.registry.resolve("sql").adapter_version == 2  # version 1 still runs: its number is not used again
    with pytest.raises(AdapterNotFoundError):
        bench.registry.acquire("sql@1")
    bench.registry.release(held)
    bench.run_jobs()


def test_rollback_goes_back_and_forth(bench: Bench) -> None:
    reload(bench, "one")
    reload(bench, "two")
    result = bench.registry.move("sql")
    assert (result.status, result.ref.adapter_version, result.previous_version) == (LoadStatus.MOVED, 1, 2)
    assert (digest(bench, "sql"), digest(bench, "sql@2")) == ("one", "two")
    assert bench.store.find(result.ref.adapter_id).tier is Tier.DEVICE
    assert bench.registry.move("sql").ref.adapter_version == 2
    assert bench.registry.move("sql", 2).status is LoadStatus.ALREADY_LOADED
    assert bench.told == [
        (EventKind.SWITCH, "sql", "adapter 'sql' was moved to its version 1"),
        (EventKind.SWITCH, "sql", "adapter 'sql' was moved to its version 2"),
    ]


def test_after_a_rollback_numbers_go_on_and_the_one_that_did_not_answer_goes_first(bench: Bench) -> None:
    reload(bench, "one")
    reload(bench, "two")
    bench.registry.move("sql")
    reload(bench, "three")
    assert states(bench) == {3: VersionState.CURRENT, 1: VersionState.KEPT}


def test_requests_finish_on_the_version_that_they_began_with(bench: Bench) -> None:
    reload(bench, "one")
    reload(bench, "two")
    held = bench.registry.acquire("sql")
    bench.registry.move("sql")
    assert bench.store.find(held.adapter_id).tier is not Tier.SOURCE
    bench.registry.release(held)
    bench.run_jobs()
    assert bench.store.find(held.adapter_id).tier is Tier.SOURCE


def test_a_rollback_inherits_the_pin(bench: Bench) -> None:
    bench.registry.load("sql", "/sql", is_pinned=True)
    reload(bench, "two")
    current = bench.registry.resolve("sql")
    assert bench.store.pinned() == {current.adapter_id}
    back = bench.registry.move("sql").ref
    assert bench.store.pinned() == {back.adapter_id}
    assert bench.registry.describe("sql").is_pinned
    bench.store.faults.errors["pin"] = AdapterNoRoomError("no room")
    with pytest.raises(AdapterNoRoomError):
        bench.registry.move("sql")
    assert bench.store.pinned() == {back.adapter_id}
    assert bench.registry.resolve("sql") == back


def test_a_rollback_to_what_cannot_be_read_any_more_changes_nothing(bench: Bench) -> None:
    reload(bench, "one")
    reload(bench, "two")
    bench.store.faults.errors["promote"] = AdapterContentChangedError("reload it")
    with pytest.raises(AdapterContentChangedError):
        bench.registry.move("sql")
    assert digest(bench, "sql") == "two"
    bench.registry.move("sql")
    assert digest(bench, "sql") == "one"


def test_a_rollback_does_not_wait_for_room(bench: Bench) -> None:
    reload(bench, "one")
    reload(bench, "two")
    bench.registry.preload("sql")
    held = bench.registry.acquire("sql")
    bench.store.device_room = 1
    bench.registry.move("sql")
    assert digest(bench, "sql") == "one"
    bench.registry.release(held)
    bench.run_jobs()


def test_what_is_not_kept_is_named(bench: Bench) -> None:
    reload(bench, "one")
    with pytest.raises(
        AdapterNotFoundError, match=r"has not kept an earlier version; it has 1 \(max_versions_kept is 2\)"
    ):
        bench.registry.move("sql")
    with pytest.raises(AdapterNotFoundError, match="has not kept version 7"):
        bench.registry.move("sql", 7)
    with pytest.raises(AdapterNotFoundError, match="not loaded"):
        bench.registry.move("nope")


def test_an_alias_that_is_moved_answers_for_itself(bench: Bench) -> None:
    reload(bench, "one")
    bench.registry.load("chat", "/chat")
    bench.registry.switch("sql", "chat")
    assert digest(bench, "sql") == digest_of("/chat")
    assert digest(bench, "sql@1") == "one"
    assert bench.registry.move("sql", 1).status is LoadStatus.MOVED
    assert digest(bench, "sql") == "one"


def switched(bench: Bench, *names: str) -> None:
    """`sql` with a version 2 that was rolled back, then switched to each of `names`."""
    reload(bench, "one")
    reload(bench, "two")
    bench.registry.move("sql")
    for name in names:
        bench.registry.load(name, f"/{name}")
        bench.registry.switch("sql", name)


def test_a_rollback_after_a_switch_undoes_the_switch_and_nothing_else(bench: Bench) -> None:
    switched(bench, "chat")
    result = bench.registry.move("sql")
    assert (result.status, result.ref.adapter_version, result.previous_version) == (LoadStatus.MOVED, 1, None)
    assert digest(bench, "sql") == "one"
    assert bench.registry.describe("sql").alias_of is None
    again = bench.registry.move("sql")
    assert (again.ref.adapter_name, again.previous_version) == ("chat", 1)
    assert digest(bench, "sql") == digest_of("/chat")
    assert bench.registry.describe("sql").alias_of == "chat"
    assert bench.told[-1] == (EventKind.SWITCH, "sql", "adapter 'sql' was switched back to 'chat'")
    assert bench.registry.move("sql").ref.adapter_version == 1
    assert bench.registry.move("sql", 2).previous_version == 1


def test_a_rollback_after_two_switches_goes_to_the_first(bench: Bench) -> None:
    switched(bench, "green", "blue")
    assert [bench.registry.move("sql").ref.adapter_name for _ in range(3)] == ["green", "blue", "green"]
    bench.registry.unload("blue")
    assert bench.registry.move("sql").ref.adapter_version == 1
    assert bench.registry.move("sql").ref.adapter_name == "green"
    bench.registry.unload("green")
    assert bench.registry.move("sql").ref.adapter_version == 1


def test_a_rollback_after_a_reload_goes_back_to_the_switch(bench: Bench) -> None:
    switched(bench, "chat")
    reload(bench, "three")
    assert bench.registry.move("sql").ref.adapter_name == "chat"
    assert bench.registry.move("sql").ref.adapter_version == 3
    bench.registry.unload("chat")
    assert bench.registry.move("sql").ref.adapter_version == 1


def test_a_rollback_after_a_switch_and_its_way_back(bench: Bench) -> None:
    """`switch(new, old)`: `chat` answers with `sql` now, and a rollback of either undoes that."""
    switched(bench, "chat")
    bench.registry.switch("chat", "sql")
    assert bench.registry.move("sql").ref.adapter_name == "chat"
    assert (digest(bench, "sql"), digest(bench, "chat")) == (digest_of("/chat"), digest_of("/chat"))
    bench.registry.switch("chat", "sql")
    assert bench.registry.move("chat").ref.adapter_name == "chat"
    assert (digest(bench, "sql"), digest(bench, "chat")) == ("one", digest_of("/chat"))


def test_a_rollback_of_a_name_that_followed_another(bench: Bench) -> None:
    """What it was switched to is switched on: that is another name's verb, and its own is undone."""
    bench.registry.load("front", "/front")
    switched(bench)
    bench.registry.switch("front", "sql")
    bench.registry.load("chat", "/chat")
    bench.registry.switch("sql", "chat")
    assert digest(bench, "front") == digest_of("/chat")
    assert bench.registry.move("front").ref.adapter_name == "front"
    assert bench.registry.move("front").ref.adapter_name == "chat"


def test_a_rollback_to_an_adapter_leaves_a_pin_where_it_is(bench: Bench) -> None:
    switched(bench, "chat")
    bench.registry.move("sql")
    bench.registry.pin("sql")
    assert bench.registry.move("sql").ref.adapter_name == "chat"
    assert bench.store.pinned() == set()
    assert not bench.registry.describe("sql").is_pinned
    assert not bench.registry.describe("chat").is_pinned


def test_only_so_many_switches_are_remembered(bench: Bench) -> None:
    names = [f"n{number}" for number in range(MAX_OTHERS + 3)]
    switched(bench, *names)
    for name in reversed(names[2:]):
        bench.registry.unload(name)
        if name != names[2]:
            bench.registry.move("sql")
    assert bench.registry.move("sql").ref.adapter_version == 1


def test_a_switch_that_comes_while_a_rollback_promotes(bench: Bench) -> None:
    """The rollback is of what answers when it takes effect, and the pin that it had passed on is lifted."""
    switched(bench)
    bench.registry.load("chat", "/chat")
    bench.registry.pin("sql")
    gate = bench.store.faults.gates["pin"] = Gate()
    with ThreadPoolExecutor() as pool:
        moved = pool.submit(bench.registry.move, "sql")
        assert gate.arrived.wait(60)
        bench.registry.switch("sql", "chat")
        gate.opened.set()
        assert moved.result().ref.adapter_version == 1
    assert digest(bench, "sql") == "one"
    assert bench.store.pinned() == set()


def test_pins_are_of_what_answers(bench: Bench) -> None:
    reload(bench, "one")
    reload(bench, "two")
    assert bench.registry.pin("sql@2")
    assert bench.registry.unpin("sql@2")
    with pytest.raises(
        InvalidRequestError, match="'sql@1' is not the version that answers for 'sql', and only that is pinned"
    ):
        bench.registry.pin("sql@1")
    assert not bench.registry.unpin("sql@1")
    assert bench.registry.preload("sql@1").is_new
    assert bench.registry.evict("sql@1")
    assert bench.registry.describe("sql@2").tier == "device"


def test_an_evicted_kept_version_leaves_a_pin_of_the_same_content_alone(bench: Bench) -> None:
    reload(bench, "one")
    bench.registry.pin("sql")
    reload(bench, "one")
    assert bench.registry.resolve("sql").adapter_version == 2
    bench.registry.evict("sql@1")
    assert bench.registry.describe("sql").is_pinned
    bench.registry.check_integrity()


@pytest.mark.parametrize("name", ["sql@1", "a@b@22", "org/x@007"])
def test_a_name_cannot_look_like_a_version(bench: Bench, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="would address a version"):
        bench.registry.load(name, "/sql")


@pytest.mark.parametrize("name", ["sql@", "sql@main", "@1", "sql@1b"])
def test_names_that_only_nearly_look_like_one(bench: Bench, name: str) -> None:
    bench.registry.load(name, "/sql")
    assert bench.registry.resolve(name).adapter_name == name
    assert bench.registry.resolve(f"{name}@1").adapter_name == name


def test_a_load_that_keeps_what_is_equal(bench: Bench) -> None:
    """Sent twice, it must not push the version before out of what is kept."""
    reload(bench, "one")
    reload(bench, "two")
    again = bench.registry.load("sql", "/sql", lora_int_id=7, load_inplace=True, keeps_equal=True)
    assert (again.status, again.ref.adapter_version, again.ref.lora_int_id) == (LoadStatus.ALREADY_LOADED, 2, 7)
    assert bench.registry.name_of(7) == "sql"
    assert states(bench)[1] is VersionState.KEPT
    bench.sources.digests["/sql"] = "three"
    changed = bench.registry.load("sql", "/sql", load_inplace=True, keeps_equal=True)
    assert (changed.status, changed.previous_version) == (LoadStatus.RELOADED, 2)
    elsewhere = bench.registry.load("sql", "/twin", load_inplace=True, keeps_equal=True)
    assert elsewhere.status is LoadStatus.RELOADED


def test_what_cannot_be_written_is_done_and_said(bench: Bench) -> None:
    """The verb has its effect, its caller hears of the disk, and nothing leaks."""
    assert isinstance(bench.journal, MemoryJournal)
    reload(bench, "one")
    bench.journal.error = JournalError("the disk is full")
    with pytest.raises(JournalError):
        reload(bench, "two")
    assert digest(bench, "sql") == "two"
    with pytest.raises(JournalError):
        bench.registry.move("sql")
    assert digest(bench, "sql") == "one"
    with pytest.raises(JournalError):
        bench.registry.pin("sql")
    assert bench.registry.describe("sql").is_pinned
    with pytest.raises(JournalError):
        bench.registry.unload("sql")
    assert bench.registry.names() == ()
    assert bench.store.adapters == {}
    bench.journal.error = None


def test_a_request_that_is_not_sent_yet_when_its_adapter_is_forced_out(bench: Bench) -> None:
    """The engine aborts what it knows; a request that is not sent yet asks before sending."""
    reload(bench, "one")
    ref = bench.registry.acquire("sql")
    assert not bench.registry.is_forced_out(ref.adapter_id)
    bench.registry.unload("sql", force=True)
    assert bench.registry.is_forced_out(ref.adapter_id)
    bench.registry.release(ref)
    bench.run_jobs()


def test_an_adapter_that_was_forced_out_by_a_switch_serves_again(bench: Bench) -> None:
    """After a switch back at once, and after its last request."""
    reload(bench, "one")
    bench.registry.load("chat", "/chat")
    held = bench.registry.acquire("sql")
    bench.registry.switch("sql", "chat", force=True)
    assert bench.registry.is_forced_out(held.adapter_id)
    bench.registry.switch("chat", "sql")
    assert not bench.registry.is_forced_out(held.adapter_id)
    bench.registry.switch("sql", "chat", force=True)
    bench.registry.release(held)
    bench.run_jobs()
    again = bench.registry.acquire("sql@1")
    assert not bench.registry.is_forced_out(again.adapter_id)
    bench.registry.release(again)


def test_usage_is_counted_by_name(bench: Bench) -> None:
    reload(bench, "one")
    reload(bench, "two")
    bench.now = 250.0
    for name in ("sql", "sql", "sql@1"):
        bench.registry.release(bench.registry.acquire(name))
    info = bench.registry.describe("sql")
    assert (info.num_loads, info.num_requests) == (2, 3)
    (usage,) = bench.registry.take_usage()
    assert (usage.name, usage.num_loads, usage.num_requests, usage.last_used_time) == ("sql", 2, 3, 250.0)
    assert bench.registry.take_usage() == []
    bench.run_jobs()


def test_verbs_tell_what_they_did(bench: Bench) -> None:
    reload(bench, "one")
    bench.registry.load("chat", "/chat")
    bench.registry.switch("sql", "chat")
    bench.registry.unload("chat")
    assert bench.told == [
        (EventKind.SWITCH, "sql", "adapter 'sql' was switched to 'chat'"),
        (EventKind.UNLOAD, "chat", "adapter 'chat' was unloaded"),
    ]


def test_a_switch_of_a_name_that_is_not_loaded_tells_no_switch(bench: Bench) -> None:
    bench.registry.load("chat", "/chat")
    result = bench.registry.switch("sql", "chat")
    assert (result.is_old_loaded, result.ref.adapter_name) == (False, "chat")
    assert bench.told == []
    bench.registry.load("sql", "/sql")
    assert bench.registry.switch("sql", "chat").is_old_loaded
    assert [kind for kind, _, _ in bench.told] == [EventKind.SWITCH]


def test_files_stay_until_the_journal_knows_that_nothing_has_them(bench: Bench) -> None:
    """A disk was full: an uploaded adapter's files were gone, and the next process had its name."""
    journal = bench.journal
    assert isinstance(journal, MemoryJournal)
    for name in ("one", "two", "three"):
        bench.sources.digests[f"/{name}"] = name
        bench.registry.load(name, f"/{name}")
    journal.error = JournalError("the disk is full")
    with pytest.raises(JournalError):
        bench.registry.unload("one")
    bench.sources.digests["/new"] = "new"
    for _ in range(bench.max_versions_kept):
        with pytest.raises(JournalError):
            bench.registry.load("two", "/new", load_inplace=True)
        bench.sources.digests["/new"] += "er"
    assert bench.unused == []
    journal.error = None
    bench.registry.unload("three")
    assert sorted(bench.unused) == ["/cache/one", "/cache/three", "/cache/two"]
