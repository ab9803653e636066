"""The registry's verbs, one caller at a time: what each means, and the rules about names."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from loraplex.adapter_store import AddOutcome
from loraplex.adapters.registry import AdapterText, LoadStatus, LoRARegistry
from loraplex.core import Tier
from loraplex.errors import (
    AdapterConflictError,
    AdapterMemoryError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterPathNotFoundError,
    AdapterUnavailableError,
    EngineDeadError,
    InvalidRequestError,
)
from tests.adapters.fake_store import Bench, digest_of


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.forbid_calls_under_lock()
    yield bench
    bench.check_idle()


# ----------------------------------------------------------------------------------------------------------------- load


def test_a_loaded_name_resolves_and_the_store_has_its_spec(bench: Bench) -> None:
    result = bench.registry.load("sql", "/sql", lora_int_id=7)
    ref = bench.registry.resolve("sql")
    assert (result.status, result.ref, result.evicted) == (LoadStatus.LOADED, ref, ())
    assert (ref.adapter_name, ref.adapter_version, ref.adapter_digest) == ("sql", 1, digest_of("/sql"))
    assert (ref.lora_int_id, ref.max_rank, ref.lora_path) == (7, 8, "/sql")
    (spec,) = bench.registry.specs()
    assert (spec.adapter_id, spec.path, spec.nbytes) == (ref.adapter_id, "/cache/sql", 1000)
    assert bench.registry.names() == ("sql",)
    assert bench.registry.refs() == {"sql": ref}
    assert bench.registry.find("sql") == ref


def test_the_same_load_again_changes_nothing_and_says_so(bench: Bench) -> None:
    first = bench.registry.load("sql", "/sql", lora_int_id=7)
    for path in ("/sql", "/sql/"):
        again = bench.registry.load("sql", path, lora_int_id=7)
        assert (again.status, again.ref) == (LoadStatus.ALREADY_LOADED, first.ref)
    assert bench.sources.num_opened == {"/sql": 1}
    assert bench.store.count("add") == 1


@pytest.mark.parametrize("view", ["loaded_from", "specs"])
def test_versions_are_gone_over_while_requests_may_take_the_lock(
    bench: Bench, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin that changes nothing, sent again and again, kept requests of all tenants waiting."""
    registry = bench.registry
    registry.load("sql", "/sql", origin="source:dir")
    versions = registry._table.versions

    class Versions(list[Any]):
        def __iter__(self) -> Any:
            assert not registry._lock.locked()
            return super().__iter__()

    monkeypatch.setattr(registry._table, "versions", lambda: Versions(versions()))
    assert len(registry.loaded_from("source:") if view == "loaded_from" else registry.specs()) == 1


def test_a_load_that_evicts_says_whom(bench: Bench) -> None:
    bench.store.evicts_on_add = ("cold", "colder")
    result = bench.registry.load("sql", "/sql")
    assert (result.status, result.evicted) == (LoadStatus.LOADED_WITH_EVICTION, ("cold", "colder"))
    again = bench.registry.load("sql", "/sql", load_inplace=True)
    assert (again.status, again.evicted) == (LoadStatus.RELOADED, ("cold", "colder"))


def test_another_path_is_refused_without_load_inplace(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    with pytest.raises(AdapterConflictError, match=r"loaded from another source than '/other'.*load_inplace"):
        bench.registry.load("sql", "/other")
    assert "/other" not in bench.sources.num_opened
    result = bench.registry.load("sql", "/other", load_inplace=True)
    assert (result.status, result.ref.lora_path) == (LoadStatus.RELOADED, "/other")


@pytest.mark.parametrize("verb", ["open", "add", "pin"])
def test_a_failed_load_leaves_nothing_and_is_not_sticky(bench: Bench, verb: str) -> None:
    faults = bench.sources.faults if verb == "open" else bench.store.faults
    faults.errors[verb] = AdapterNoRoomError("no room")
    with pytest.raises(AdapterNoRoomError, match="no room"):
        bench.registry.load("sql", "/sql", lora_int_id=7, is_pinned=True)
    assert bench.registry.names() == ()
    assert bench.registry.lora_int_ids() == {}
    bench.check_idle()
    assert bench.registry.load("other", "/other", lora_int_id=7).status is LoadStatus.LOADED  # the number is free
    assert bench.registry.load("sql", "/sql", is_pinned=True).status is LoadStatus.LOADED


def test_a_failed_reload_leaves_the_old_version_as_it_was(bench: Bench) -> None:
    ref = bench.registry.load("sql", "/sql", is_pinned=True).ref
    for verb in ("add", "pin", "unpin"):
        bench.store.faults.errors[verb] = AdapterNoRoomError("no room")
        with pytest.raises(AdapterNoRoomError):
            bench.registry.load("sql", "/sql", load_inplace=True)
        assert bench.registry.resolve("sql") == ref
        assert bench.store.pinned() == {ref.adapter_id}
        assert bench.registry.describe("sql").is_pinned


def test_an_undo_that_fails_too_does_not_hide_the_error(bench: Bench) -> None:
    ref = bench.registry.load("sql", "/sql", is_pinned=True).ref
    seen: list[str] = []

    def fail_both_pins(method: str) -> None:
        seen.append(method)
        if method == "pin":
            raise AdapterNoRoomError(f"no room {seen.count('pin')}")

    bench.store.faults.before = fail_both_pins
    with pytest.raises(AdapterNoRoomError, match="no room 1"):
        bench.registry.load("sql", "/sql", load_inplace=True)
    bench.store.faults.before = lambda method: None
    assert bench.registry.resolve("sql") == ref
    assert not bench.registry.describe("sql").is_pinned  # the truth, rather than the wish


def test_fifty_bad_loads_do_not_touch_what_runs(bench: Bench) -> None:
    """Rule 3, as far as names go."""
    bench.registry.load("sql", "/sql")
    refs = [bench.registry.acquire("sql") for _ in range(20)]
    for number in range(50):
        bench.sources.digests[f"/bad{number}"] = "missing"
        with pytest.raises(AdapterPathNotFoundError):
            bench.registry.load(f"bad{number}", f"/bad{number}", lora_int_id=number + 1)
    assert bench.registry.resolve("sql") == refs[0]
    assert bench.registry.load("good", "/good", lora_int_id=3).status is LoadStatus.LOADED
    for ref in refs:
        bench.registry.release(ref)


# ---------------------------------------------------------------------------------------------------- names and numbers


@pytest.mark.parametrize("name", ["a", "org/model", "sql:v2", "日本語", "x" * 256, "with space", "basement"])
def test_names_that_can_be(bench: Bench, name: str) -> None:
    bench.registry.load(name, "/a")
    assert bench.registry.names() == (name,)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\x00", "\ud800", " a", "a ", "\u202eabc", None, 7])
def test_names_that_cannot_be(bench: Bench, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        bench.registry.load(name, "/a")


@pytest.mark.parametrize("name", ["base", "base:sql"])
def test_a_base_models_name_is_no_adapters(bench: Bench, name: str) -> None:
    with pytest.raises(AdapterConflictError, match="base model"):
        bench.registry.load(name, "/a")
    with pytest.raises(AdapterConflictError, match="base model"):
        bench.registry.switch(name, "other")


@pytest.mark.parametrize("number", [0, -1, True, "1", 1.0])
def test_numbers_that_cannot_be(bench: Bench, number: int) -> None:
    with pytest.raises(InvalidRequestError, match="lora_int_id"):
        bench.registry.load("sql", "/sql", lora_int_id=number)


@pytest.mark.parametrize("path", ["", "  ", None])
def test_a_path_must_be(bench: Bench, path: str) -> None:
    with pytest.raises(InvalidRequestError, match="path"):
        bench.registry.load("sql", path)


def test_a_known_number_with_another_name_or_path_is_refused(bench: Bench) -> None:
    """Rule 10."""
    bench.registry.load("sql", "/sql", lora_int_id=7)
    with pytest.raises(AdapterConflictError, match="lora_int_id 7 belongs to adapter 'sql'"):
        bench.registry.load("other", "/other", lora_int_id=7)
    with pytest.raises(AdapterConflictError, match="lora_int_id 7 belongs to adapter 'sql'"):
        bench.registry.load("other", "/other", lora_int_id=7, load_inplace=True)
    with pytest.raises(AdapterConflictError, match="loaded from another source"):
        bench.registry.load("sql", "/other", lora_int_id=7)
    with pytest.raises(AdapterConflictError, match="has lora_int_id 7, not 8"):
        bench.registry.load("sql", "/sql", lora_int_id=8)
    assert bench.registry.load("sql", "/sql", lora_int_id=7).status is LoadStatus.ALREADY_LOADED
    assert bench.registry.name_of(7) == "sql"
    assert bench.registry.lora_int_ids() == {7: "sql"}


def test_a_number_is_adopted_kept_by_a_reload_and_freed_by_unload(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    assert bench.registry.load("sql", "/sql", lora_int_id=7).ref.lora_int_id == 7
    assert bench.registry.load("sql", "/sql", load_inplace=True).ref.lora_int_id == 7
    bench.registry.unload("sql")
    with pytest.raises(AdapterNotFoundError, match="7"):
        bench.registry.name_of(7)
    assert bench.registry.load("other", "/other", lora_int_id=7).ref.lora_int_id == 7


def test_a_number_is_given_to_what_is_loaded_and_nothing_is_loaded_for_it(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    bench.registry.load("chat", "/chat", lora_int_id=8)
    for lora_int_id in (None, 7, 7, None):
        given = bench.registry.give_number("sql", lora_int_id)
        assert (given.status, given.ref) == (LoadStatus.ALREADY_LOADED, bench.registry.resolve("sql"))
    assert bench.registry.lora_int_ids() == {7: "sql", 8: "chat"}
    for name, number in (("sql", 9), ("sql", 8), ("chat", 7)):
        with pytest.raises(AdapterConflictError):
            bench.registry.give_number(name, number)
    with pytest.raises(InvalidRequestError):
        bench.registry.give_number("sql", 0)
    bench.registry.unload("sql")
    with pytest.raises(AdapterNotFoundError):
        bench.registry.give_number("sql", 9)
    assert (bench.registry.names(), bench.sources.num_opened) == (("chat",), {"/sql": 1, "/chat": 1})


def test_a_number_that_comes_with_a_failed_reload_goes_with_it(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    bench.store.faults.errors["add"] = AdapterNoRoomError("no room")
    with pytest.raises(AdapterNoRoomError):
        bench.registry.load("sql", "/sql", lora_int_id=7, load_inplace=True)
    assert bench.registry.lora_int_ids() == {}
    bench.registry.load("other", "/other", lora_int_id=7)


def test_max_loaded_loras_is_refused_with_numbers() -> None:
    bench = Bench(max_loaded_loras=2)
    bench.registry.load("a", "/a")
    bench.registry.load("b", "/b")
    with pytest.raises(AdapterMemoryError, match="2 adapters are loaded and 0 are being loaded, max_loaded_loras is 2"):
        bench.registry.load("c", "/c")
    bench.registry.load("a", "/a2", load_inplace=True)  # no new name
    bench.registry.unload("b")
    bench.registry.load("c", "/c")
    bench.check_idle()


# ------------------------------------------------------------------------------------------------ references and unload


def test_unknown_names_are_errors(bench: Bench) -> None:
    registry = bench.registry
    verbs = (registry.acquire, registry.resolve, registry.unload, registry.pin, registry.unpin, registry.evict)
    for verb in (*verbs, registry.preload, registry.describe):
        with pytest.raises(AdapterNotFoundError, match="'sql' is not loaded"):
            verb("sql")


def test_an_idle_adapter_is_dropped_by_unload_itself(bench: Bench) -> None:
    ref = bench.registry.load("sql", "/sql").ref
    result = bench.registry.unload("sql")
    assert (result.ref, result.is_drained, result.num_references, result.num_aborted) == (ref, True, 0, 0)
    assert bench.store.adapters == {}
    assert bench.jobs == []


def test_unload_stops_the_name_and_lets_requests_finish(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    refs = [bench.registry.acquire("sql"), bench.registry.acquire("sql")]
    result = bench.registry.unload("sql")
    assert (result.is_drained, result.num_references) == (False, 2)
    with pytest.raises(AdapterNotFoundError):
        bench.registry.acquire("sql")
    bench.registry.release(refs[0])
    assert bench.jobs == []
    bench.registry.release(refs[1])
    assert bench.store.count("drop") == 0  # not on the thread that released
    bench.run_jobs()
    assert bench.store.count("drop") == 1
    assert bench.store.adapters == {}


def test_force_aborts_what_the_deadline_left(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    refs = [bench.registry.acquire("sql"), bench.registry.acquire("sql")]

    def abort(adapter_id: int) -> int:
        assert adapter_id == refs[0].adapter_id
        for ref in refs:
            bench.registry.release(ref)
        bench.run_jobs()
        return len(refs)

    bench.store.abort = abort
    result = bench.registry.unload("sql", deadline_s=0, force=True)
    assert (result.is_drained, result.num_references, result.num_aborted) == (True, 0, 2)


def test_force_on_an_idle_adapter_aborts_nothing(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    assert bench.registry.unload("sql", force=True).num_aborted == 0
    assert bench.store.count("abort") == 0


def test_an_abort_that_lets_nothing_go_is_reported(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    ref = bench.registry.acquire("sql")
    bench.store.abort = lambda adapter_id: 1
    result = bench.registry.unload("sql", force=True)
    assert (result.is_drained, result.num_references, result.num_aborted) == (False, 1, 1)
    bench.registry.release(ref)


def test_unload_reaches_earlier_versions_too(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    refs = [bench.registry.acquire("sql")]
    bench.registry.load("sql", "/sql", load_inplace=True)
    refs.append(bench.registry.acquire("sql"))

    def abort(adapter_id: int) -> int:
        (ref,) = (ref for ref in refs if ref.adapter_id == adapter_id)
        bench.registry.release(ref)
        bench.run_jobs()
        return 1

    bench.store.abort = abort
    result = bench.registry.unload("sql", force=True)
    assert (result.ref, result.is_drained, result.num_aborted) == (refs[1], True, 2)


@pytest.mark.parametrize("deadline_s", [-1, float("nan"), float("inf")])
def test_deadlines_that_cannot_be(bench: Bench, deadline_s: float) -> None:
    bench.registry.load("sql", "/sql")
    with pytest.raises(InvalidRequestError, match="deadline_s"):
        bench.registry.unload("sql", deadline_s=deadline_s)
    assert bench.registry.names() == ("sql",)


def test_a_store_that_fails_to_drop_is_reported_to_who_unloads(bench: Bench) -> None:
    ref = bench.registry.load("sql", "/sql").ref
    bench.store.faults.errors["drop"] = AdapterUnavailableError("engine is down")
    with pytest.raises(AdapterUnavailableError, match="engine is down"):
        bench.registry.unload("sql")
    assert bench.registry.names() == ()
    bench.store.drop_adapter(ref.adapter_id)


def test_a_reference_is_released_once(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    ref = bench.registry.acquire("sql")
    bench.registry.release(ref)
    with pytest.raises(AssertionError, match="once too often"):
        bench.registry.release(ref)
    bench.registry.unload("sql")
    with pytest.raises(AssertionError, match="once too often"):
        bench.registry.release(ref)


# --------------------------------------------------------------------------------------------------------------- reload


def test_a_reload_is_a_new_version_and_old_requests_keep_theirs(bench: Bench) -> None:
    """Rule 7, as far as names go."""
    bench.registry.load("sql", "/sql")
    old = bench.registry.acquire("sql")
    bench.sources.digests["/sql"] = "new content"
    new = bench.registry.load("sql", "/sql", load_inplace=True).ref
    assert (old.adapter_version, new.adapter_version) == (1, 2)
    assert new.adapter_id > old.adapter_id
    assert new.adapter_digest == "new content"
    assert bench.registry.acquire("sql") == new
    assert old.adapter_id in bench.store.adapters
    assert bench.registry.describe("sql").num_draining == 1
    bench.registry.release(old)
    bench.run_jobs()
    assert set(bench.store.adapters) == {new.adapter_id}
    bench.registry.release(new)
    assert set(bench.store.adapters) == {new.adapter_id}


def test_a_reload_of_the_same_content_is_a_version_too(bench: Bench) -> None:
    old = bench.registry.load("sql", "/sql").ref
    new = bench.registry.load("sql", "/sql", load_inplace=True).ref
    assert new.adapter_digest == old.adapter_digest
    assert new.adapter_id != old.adapter_id


def test_load_inplace_of_an_unknown_name_is_a_load(bench: Bench) -> None:
    assert bench.registry.load("sql", "/sql", load_inplace=True).status is LoadStatus.LOADED


def test_a_reload_inherits_the_pin_and_never_holds_two(bench: Bench) -> None:
    old = bench.registry.load("sql", "/sql", is_pinned=True).ref
    held = bench.registry.acquire("sql")
    new = bench.registry.load("sql", "/sql", load_inplace=True).ref
    assert bench.store.pinned() == {new.adapter_id}
    assert bench.store.calls.index(("unpin", old.adapter_id)) < bench.store.calls.index(("pin", new.adapter_id))
    assert bench.registry.describe("sql").is_pinned
    bench.registry.release(held)


def test_version_numbers_are_not_used_twice_while_any_is_there(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    held = bench.registry.acquire("sql")
    bench.registry.unload("sql")
    assert bench.registry.load("sql", "/sql").ref.adapter_version == 2
    bench.registry.release(held)


def test_two_names_of_one_content_are_two_adapters(bench: Bench) -> None:
    """Rule 6: the store may share them by digest; dropping one does not drop the other."""
    bench.sources.digests |= {"/a": "same", "/b": "same"}
    first, second = bench.registry.load("a", "/a").ref, bench.registry.load("b", "/b").ref
    assert first.adapter_digest == second.adapter_digest
    assert first.adapter_id != second.adapter_id
    bench.registry.unload("a")
    assert set(bench.store.adapters) == {second.adapter_id}


# --------------------------------------------------------------------------------------------------------------- switch


def test_a_switch_promotes_redirects_and_evicts(bench: Bench) -> None:
    bench.registry.load("old", "/old")
    bench.registry.load("new", "/new")
    bench.registry.preload("old")
    old, new = bench.registry.resolve("old"), bench.registry.resolve("new")
    result = bench.registry.switch("old", "new")
    assert (result.old, result.ref, result.is_old_active, result.evicted) == ("old", new, True, ("old",))
    assert result.evict_s is not None
    assert min(result.load_s, result.promote_s, result.evict_s) >= 0
    assert bench.store.on_device() == {new.adapter_id}
    assert bench.registry.refs() == {"old": new, "new": new}
    assert bench.registry.describe("old").alias_of == "new"
    assert bench.registry.describe("old").ref == old
    assert bench.registry.describe("new").aliases == ("old",)


def test_a_switch_beyond_the_names_that_may_go_to_an_adapter_moves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each switch of it writes them all, under the lock that requests take; their number had no bound."""
    monkeypatch.setattr("loraplex.adapters.registry.aliases.MAX_ALIASES", 2)
    for name in ("a", "b", "c", "new", "other"):
        bench.registry.load(name, f"/{name}")
    for name in ("a", "b"):
        bench.registry.switch(name, "new")
    bench.registry.preload("c")
    before = bench.store.on_device(), bench.registry.refs()
    with pytest.raises(AdapterConflictError, match="3 names would go to that adapter, at most 2 may"):
        bench.registry.switch("c", "new")
    with pytest.raises(AdapterConflictError, match="3 names"):
        bench.registry.switch("new", "other")
    assert (bench.store.on_device(), bench.registry.refs()) == before
    assert bench.registry.describe("new").aliases == ("a", "b")
    bench.registry.switch("a", "new")
    assert sorted(bench.registry.describe("new").aliases) == ["a", "b"]
    bench.registry.unload("b")
    bench.registry.switch("c", "new")


def test_requests_that_run_on_the_old_adapter_finish_on_it(bench: Bench) -> None:
    bench.registry.load("old", "/old")
    bench.registry.load("new", "/new")
    held = bench.registry.acquire("old")
    bench.registry.preload("old")
    result = bench.registry.switch("old", "new")
    assert (result.is_old_active, result.evict_s, result.num_references, result.evicted) == (True, None, 1, ())
    redirected = bench.registry.acquire("old")
    assert redirected.adapter_name == "new"
    assert held.adapter_id in bench.store.on_device()
    bench.registry.release(held)
    bench.run_jobs()
    assert held.adapter_id not in bench.store.on_device()
    assert held.adapter_id in bench.store.adapters  # evicted, not dropped
    bench.registry.release(redirected)


def test_a_switch_loads_what_is_unknown(bench: Bench) -> None:
    bench.registry.load("old", "/old")
    with pytest.raises(AdapterNotFoundError, match="'new' is not loaded"):
        bench.registry.switch("old", "new")
    assert bench.registry.resolve("old").adapter_name == "old"
    result = bench.registry.switch("old", "new", new_path="/new")
    assert result.ref.lora_path == "/new"
    assert (result.is_old_active, result.evicted) == (False, ())  # it was on the host only
    with pytest.raises(AdapterConflictError, match="loaded from another source"):
        bench.registry.switch("old", "new", new_path="/other")


def test_an_unknown_old_is_said_and_becomes_no_alias(bench: Bench) -> None:
    bench.registry.load("new", "/new")
    result = bench.registry.switch("old", "new")
    assert (result.is_old_active, result.evicted) == (False, ())
    assert bench.registry.names() == ("new",)


def test_a_switch_to_itself_is_refused(bench: Bench) -> None:
    bench.registry.load("a", "/a")
    with pytest.raises(InvalidRequestError, match="itself"):
        bench.registry.switch("a", "a")


def test_a_failed_promotion_leaves_the_old_adapter_answering(bench: Bench) -> None:
    bench.registry.load("old", "/old")
    bench.registry.load("new", "/new")
    bench.store.faults.errors["promote"] = AdapterNoRoomError("no room")
    with pytest.raises(AdapterNoRoomError):
        bench.registry.switch("old", "new")
    assert bench.registry.resolve("old").adapter_name == "old"


def test_a_switch_keeps_the_old_weights_on_the_host(bench: Bench) -> None:
    """Evicting what is not on the device would send it to disk, and the way back would be slow."""
    for name in ("old", "new", "third"):
        bench.registry.load(name, f"/{name}")
    for new in ("new", "third"):
        result = bench.registry.switch("old", new)
        assert (result.is_old_active, result.evicted) == (False, ())
        assert bench.registry.describe("old").tier is Tier.HOST


def test_an_idle_old_makes_room_for_the_new(bench: Bench) -> None:
    bench.store.device_room = 1
    old = bench.registry.load("old", "/old", is_pinned=True).ref
    new = bench.registry.load("new", "/new").ref
    held = bench.registry.acquire("old")
    with pytest.raises(AdapterNoRoomError, match="no room"):
        bench.registry.switch("old", "new")
    bench.registry.release(held)
    assert bench.store.pinned() == {old.adapter_id}
    with pytest.raises(AdapterNoRoomError, match="no room"):
        bench.registry.switch("unknown", "new")
    result = bench.registry.switch("old", "new")
    assert (result.is_old_active, result.evicted) == (True, ("old",))
    assert bench.store.on_device() == {new.adapter_id}
    assert not bench.registry.describe("old").is_pinned


def test_an_old_that_made_room_in_vain_gets_its_pin_back(bench: Bench) -> None:
    old = bench.registry.load("old", "/old", is_pinned=True).ref
    bench.registry.load("new", "/new")
    bench.store.device_room = 0
    with pytest.raises(AdapterNoRoomError):
        bench.registry.switch("old", "new")
    assert bench.store.pinned() == bench.store.on_device() == {old.adapter_id}
    assert bench.registry.describe("old").is_pinned
    assert bench.registry.resolve("old") == old


def test_a_switch_to_the_same_content_evicts_nothing(bench: Bench) -> None:
    """Two ids of one content share memory: what the old one leaves, the new one needs."""
    bench.sources.digests |= {"/old": "same", "/new": "same"}
    bench.registry.load("old", "/old", is_pinned=True)
    bench.registry.load("new", "/new")
    result = bench.registry.switch("old", "new")
    assert (result.is_old_active, result.evicted, result.evict_s is None) == (True, (), False)
    assert bench.store.count("evict") == 0
    assert bench.store.pinned() == set()


def test_a_switch_back_restores_the_old_adapter(bench: Bench) -> None:
    old = bench.registry.load("a", "/a").ref
    bench.registry.load("b", "/b")
    bench.registry.switch("a", "b")
    bench.registry.switch("b", "a")
    assert bench.registry.refs() == {"a": old, "b": old}
    assert bench.store.on_device() == {old.adapter_id}


def test_a_switch_back_calls_the_eviction_off(bench: Bench) -> None:
    bench.registry.load("a", "/a")
    bench.registry.load("b", "/b")
    held = bench.registry.acquire("a")
    bench.registry.switch("a", "b")
    bench.registry.switch("b", "a")
    bench.registry.release(held)
    bench.run_jobs()
    assert bench.store.on_device() == {held.adapter_id}


def test_a_late_eviction_does_not_undo_a_switch_back(bench: Bench) -> None:
    """The last release queued it, and the switch back came before it ran."""
    bench.registry.load("a", "/a")
    bench.registry.load("b", "/b")
    held = bench.registry.acquire("a")
    bench.registry.switch("a", "b")
    bench.registry.release(held)
    bench.registry.switch("b", "a")
    bench.run_jobs()
    assert bench.store.on_device() == {held.adapter_id}


def test_one_name_is_found_as_among_all(bench: Bench) -> None:
    for name in "abc":
        bench.registry.load(name, f"/{name}")
    bench.registry.load("c", "/c2", load_inplace=True)
    bench.registry.switch("a", "b")
    bench.registry.switch("b", "c")
    bench.registry.unload("c")
    refs = bench.registry.refs()
    for name in ("a", "b", "c", "c@1", "unknown"):
        assert bench.registry.find(name) == refs.get(name)


def test_aliases_follow_a_second_switch(bench: Bench) -> None:
    for name in "abc":
        bench.registry.load(name, f"/{name}")
    bench.registry.switch("a", "b")
    bench.registry.switch("b", "c")
    assert {name: ref.adapter_name for name, ref in bench.registry.refs().items()} == dict.fromkeys("abc", "c")
    bench.registry.unload("b")
    assert bench.registry.resolve("a").adapter_name == "c"
    assert bench.registry.describe("c").aliases == ("a",)


def test_a_load_as_an_alias_answers_with_another_from_the_first_moment_on(bench: Bench) -> None:
    new = bench.registry.load("b", "/b").ref
    for status in (LoadStatus.LOADED, LoadStatus.ALREADY_LOADED):
        loaded = bench.registry.load("a", "/a", load_inplace=True, keeps_equal=True, alias_of="b")
        assert (loaded.status, loaded.ref) == (status, new)
        assert bench.registry.resolve("a") == new
        assert bench.registry.describe("a").alias_of == "b"
    assert bench.store.count("add") == 2
    assert bench.registry.move("a").ref.lora_path == "/a", "its own weights are there"
    bench.registry.load("a", "/a", load_inplace=True, keeps_equal=True, alias_of="b")
    assert bench.registry.resolve("a") == new


def test_a_load_as_an_alias_of_what_is_not_there_loads_nothing(bench: Bench) -> None:
    def unload(nbytes: int) -> None:
        bench.registry.unload("b")

    for alias_of, error in (("b", AdapterNotFoundError), ("a", InvalidRequestError)):
        with pytest.raises(error):
            bench.registry.load("a", "/a", load_inplace=True, alias_of=alias_of)
    bench.registry.load("b", "/b")
    with pytest.raises(AdapterNotFoundError):
        bench.registry.load("a", "/a", load_inplace=True, alias_of="b", check_size=unload)
    assert bench.registry.names() == ()
    assert not bench.store.adapters


def test_unload_of_an_alias_frees_name_and_weights(bench: Bench) -> None:
    old = bench.registry.load("a", "/a").ref
    new = bench.registry.load("b", "/b").ref
    bench.registry.switch("a", "b")
    assert bench.registry.unload("a").ref == old
    assert bench.registry.names() == ("b",)
    assert set(bench.store.adapters) == {new.adapter_id}
    assert bench.registry.load("a", "/other").ref.lora_path == "/other"
    assert bench.registry.resolve("a").adapter_name == "a"


def test_unload_of_what_answers_leaves_its_aliases_unanswered(bench: Bench) -> None:
    bench.registry.load("a", "/a")
    bench.registry.load("b", "/b")
    bench.registry.switch("a", "b")
    bench.registry.unload("b")
    assert bench.registry.names() == ()
    with pytest.raises(AdapterNotFoundError, match="'a' was switched to 'b', which is unloaded"):
        bench.registry.acquire("a")
    assert bench.registry.describe("a").alias_of == "b"
    assert bench.registry.load("a", "/a", load_inplace=True).status is LoadStatus.RELOADED
    assert bench.registry.resolve("a").adapter_name == "a"


def test_a_plain_load_of_an_alias_changes_nothing_and_a_reload_ends_it(bench: Bench) -> None:
    """`LLM.generate(lora_request=old)` loads what it names: that must not undo the switch."""
    bench.registry.load("a", "/a", lora_int_id=1)
    bench.registry.load("b", "/b", lora_int_id=2)
    bench.registry.switch("a", "b")
    again = bench.registry.load("a", "/a", lora_int_id=1)
    assert (again.status, again.ref.adapter_name) == (LoadStatus.ALREADY_LOADED, "b")
    bench.registry.load("a", "/a", load_inplace=True)
    assert bench.registry.resolve("a").adapter_name == "a"
    assert bench.registry.lora_int_ids() == {1: "a", 2: "b"}


def test_a_switch_lifts_the_old_pin_and_forces_as_unload_does(bench: Bench) -> None:
    bench.registry.load("a", "/a", is_pinned=True)
    bench.registry.load("b", "/b")
    held = bench.registry.acquire("a")

    def abort(adapter_id: int) -> int:
        bench.registry.release(held)
        bench.run_jobs()
        return 1

    bench.store.abort = abort
    result = bench.registry.switch("a", "b", deadline_s=0, force=True)
    assert (result.num_aborted, result.num_references, result.evicted) == (1, 0, ("a",))
    assert bench.store.pinned() == set()
    assert not bench.registry.describe("a").is_pinned


def test_a_switched_adapter_that_is_unloaded_in_use_is_dropped_not_evicted(bench: Bench) -> None:
    bench.registry.load("a", "/a")
    bench.registry.load("b", "/b")
    held = bench.registry.acquire("a")
    bench.registry.switch("a", "b")
    bench.registry.unload("a")
    bench.registry.release(held)
    bench.run_jobs()
    assert held.adapter_id not in bench.store.adapters
    assert bench.store.count("evict") == 0


# -------------------------------------------------------------------------------------------- pins, tiers and the views


def test_only_what_is_idle_is_unloaded_for_another(bench: Bench) -> None:
    registry = bench.registry
    registry.load("sql", "/sql", origin="source:dir")
    registry.load("own", "/own", origin="client")
    registry.load("new", "/new", origin="client")
    assert [each.name for each in registry.loaded_from("source:")] == ["sql"]
    registry.pin("sql")
    assert not registry.unload_idle("sql", "source:", math.inf)
    registry.unpin("sql")
    ref = registry.hold("sql")
    assert not registry.unload_idle("sql", "source:", math.inf)
    registry.release(ref)
    assert not registry.unload_idle("sql", "source:", registry.describe("sql").last_used_time)
    registry.switch("own", "sql")
    assert not registry.unload_idle("sql", "source:", math.inf)
    assert not registry.unload_idle("own", "", math.inf)
    registry.unload("own")
    for name, origin in (("new", "source:"), ("none", "")):
        assert not registry.unload_idle(name, origin, math.inf)
    assert registry.unload_idle("sql", "source:", math.inf)
    assert registry.names() == ("new",)


def test_pin_unpin_evict_and_preload(bench: Bench) -> None:
    ref = bench.registry.load("sql", "/sql").ref
    assert bench.registry.pin("sql")
    assert not bench.registry.pin("sql")
    assert bench.store.pinned() == bench.store.on_device() == {ref.adapter_id}
    assert bench.registry.unpin("sql")
    assert not bench.registry.unpin("sql")
    assert bench.registry.pin("sql")
    assert bench.registry.evict("sql")  # as deactivate: the pin is lifted
    assert not bench.registry.describe("sql").is_pinned
    assert bench.registry.describe("sql").tier is Tier.HOST
    assert bench.registry.evict("sql")
    assert not bench.registry.evict("sql")  # nothing is left above its source
    assert bench.registry.preload("sql") == AddOutcome(True)
    assert bench.registry.resolve("sql") == ref


def test_evicting_what_is_pinned_and_in_use_lifts_the_pin_at_least(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.registry.load("sql", "/sql", is_pinned=True)
    monkeypatch.setattr(bench.store, "evict_adapter", lambda adapter_id: False)  # a request runs on it
    assert bench.registry.evict("sql")
    assert bench.store.pinned() == set()
    assert not bench.registry.evict("sql")


def test_a_refused_pin_is_not_remembered(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    bench.store.faults.errors["pin"] = AdapterNoRoomError("no room")
    with pytest.raises(AdapterNoRoomError):
        bench.registry.pin("sql")
    assert not bench.registry.describe("sql").is_pinned


def test_a_pinned_load_of_a_loaded_adapter_pins_it(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    assert bench.registry.load("sql", "/sql", is_pinned=True).status is LoadStatus.ALREADY_LOADED
    assert bench.registry.describe("sql").is_pinned


def test_pinning_an_alias_pins_what_answers(bench: Bench) -> None:
    bench.registry.load("a", "/a")
    new = bench.registry.load("b", "/b").ref
    bench.registry.switch("a", "b")
    bench.registry.pin("a")
    assert bench.store.pinned() == {new.adapter_id}
    assert bench.registry.describe("b").is_pinned


def test_describe_and_list(bench: Bench) -> None:
    bench.registry.load("sql", "/sql", origin="cli")
    bench.registry.load("chat", "/chat")
    bench.now = 200.0
    ref = bench.registry.acquire("sql")
    info = bench.registry.describe("sql")
    assert (info.ref, info.origin, info.tier, info.nbytes) == (ref, "cli", Tier.HOST, 1000)
    assert (info.num_references, info.num_draining, info.loaded_time, info.last_used_time) == (1, 0, 100.0, 200.0)
    assert (info.alias_of, info.aliases, info.lora_slot, info.is_loading, info.error) == (None, (), None, False, None)
    bench.registry.preload("sql")
    listed = {each.ref.adapter_name: each for each in bench.registry.list_adapters()}
    assert listed.keys() == {"sql", "chat"}
    assert (listed["sql"].tier, listed["sql"].lora_slot) == (Tier.DEVICE, ref.adapter_id)
    bench.registry.release(ref)


# ------------------------------------------------------------------------------------------------------------- restart


def test_a_restarted_engine_gets_its_adapters_at_once_and_its_pins_later(bench: Bench) -> None:
    pinned = bench.registry.load("a", "/a", is_pinned=True).ref
    other = bench.registry.load("b", "/b").ref
    bench.store.start_again()
    assert bench.registry.describe("a").tier is Tier.SOURCE
    bench.registry.restore()
    assert set(bench.store.adapters) == {pinned.adapter_id, other.adapter_id}
    assert {where.tier for where in bench.store.adapters.values()} == {Tier.SOURCE}
    assert bench.store.count("add") == 2  # of the loads: nothing is read again
    bench.run_jobs()
    assert bench.store.pinned() == {pinned.adapter_id}


def test_a_pin_that_cannot_be_restored_is_lifted(bench: Bench) -> None:
    bench.registry.load("a", "/a", is_pinned=True)
    kept = bench.registry.load("b", "/b", is_pinned=True).ref
    bench.store.start_again()
    bench.registry.restore()
    bench.store.faults.errors["pin"] = AdapterNoRoomError("no room")
    bench.run_jobs()
    assert not bench.registry.describe("a").is_pinned
    assert bench.store.pinned() == {kept.adapter_id}
    bench.registry.release(bench.registry.acquire("a"))


def test_a_pin_is_not_lifted_by_the_next_death_of_the_engine(bench: Bench) -> None:
    pinned = bench.registry.load("a", "/a", is_pinned=True).ref
    bench.store.start_again()
    bench.registry.restore()
    bench.store.faults.errors["pin"] = EngineDeadError("again")
    bench.run_jobs()
    assert bench.registry.describe("a").is_pinned
    bench.store.start_again()
    bench.registry.restore()
    bench.run_jobs()
    assert bench.store.pinned() == {pinned.adapter_id}


def test_a_pin_that_was_unloaded_meanwhile_is_no_error(bench: Bench) -> None:
    bench.registry.load("a", "/a", is_pinned=True)
    bench.store.start_again()
    bench.registry.restore()
    bench.registry.unload("a")
    bench.run_jobs()
    assert bench.store.adapters == {}


def test_a_version_that_died_with_the_engine_is_forgotten(bench: Bench) -> None:
    bench.registry.load("a", "/a")
    held = bench.registry.acquire("a")
    bench.registry.unload("a")
    bench.store.start_again()
    bench.registry.restore()
    bench.registry.release(held)
    bench.run_jobs()
    assert bench.registry.specs() == ()


# ----------------------------------------------------------------------------------------------------------- the module


def test_it_imports_neither_torch_nor_anything_of_the_server() -> None:
    code = (
        "import sys, loraplex.adapters.registry; print([m for m in ('torch', 'numpy', 'msgspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_by_default_a_drain_completes_on_its_own_thread() -> None:
    bench = Bench()
    registry = LoRARegistry(bench.store, bench.sources.open)
    registry.load("sql", "/sql")
    ref = registry.acquire("sql")
    registry.unload("sql")
    (drain,) = registry._table.pending_drains("sql")
    registry.release(ref)
    assert drain.done.result(60)
    assert bench.store.adapters == {}


# --------------------------------------------------------------------------------------------------------------- clone


def test_a_clone_reads_nothing_and_lives_by_itself(bench: Bench) -> None:
    original = bench.registry.load("sql", "/sql", lora_int_id=1).ref
    copy = bench.registry.clone("sql", "copy", lora_int_id=2, is_pinned=True)
    assert copy.status is LoadStatus.LOADED
    assert (copy.ref.adapter_digest, copy.ref.lora_path) == (original.adapter_digest, "/sql")
    assert (copy.ref.adapter_name, copy.ref.adapter_version, copy.ref.lora_int_id) == ("copy", 1, 2)
    assert copy.ref.adapter_id != original.adapter_id
    assert bench.sources.num_opened == {"/sql": 1}
    assert bench.store.pinned() == {copy.ref.adapter_id}
    bench.registry.unload("sql")
    assert bench.registry.resolve("copy") == copy.ref
    assert bench.store.specs.keys() == {copy.ref.adapter_id}
    bench.registry.unload("copy")


def test_a_clone_has_the_text_of_its_original(bench: Bench) -> None:
    """Its tokenizer, its chat template, and what activates an aLoRA."""
    text = AdapterText.activated(AdapterText.of({"chat_templates": {"default": "x"}}), (5, 6))
    bench.sources.texts["/sql"] = text
    bench.registry.load("sql", "/sql")
    copy = bench.registry.clone("sql", "copy").ref
    assert copy.text == text
    assert copy.invocation_tokens == (5, 6)


def test_a_clone_of_what_is_there_already_says_so_or_is_refused(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    bench.registry.load("chat", "/chat")
    first = bench.registry.clone("sql", "copy")
    again = bench.registry.clone("sql", "copy", is_pinned=True)
    assert (again.status, again.ref) == (LoadStatus.ALREADY_LOADED, first.ref)
    assert bench.store.pinned() == {first.ref.adapter_id}
    for name in ("chat", "copy"):
        source = "sql" if name == "chat" else "chat"
        with pytest.raises(AdapterConflictError, match="choose another name") as caught:
            bench.registry.clone(source, name)
        assert caught.value.param == "name"
    with pytest.raises(AdapterNotFoundError):
        bench.registry.clone("nothing", "other")
    assert set(bench.registry.names()) == {"sql", "chat", "copy"}


def test_a_clone_says_nothing_of_where_its_original_is(bench: Bench) -> None:
    """A tenant may clone what came from an operator's source, and none of its answers names the place."""
    bench.sources.digests = {"/place/of/the/operator/sql": "same", "/own/copy": "same"}
    bench.registry.load("sql", "/place/of/the/operator/sql")
    bench.registry.load("copy", "/own/copy")
    with pytest.raises(AdapterConflictError) as caught:
        bench.registry.clone("sql", "copy")
    assert "operator" not in caught.value.message


def test_a_clone_that_the_store_refuses_leaves_no_name(bench: Bench) -> None:
    bench.registry.load("sql", "/sql")
    bench.store.faults.errors["add"] = AdapterUnavailableError("gone")
    with pytest.raises(AdapterUnavailableError):
        bench.registry.clone("sql", "copy", lora_int_id=3)
    assert bench.registry.names() == ("sql",)
    assert bench.registry.lora_int_ids() == {}
    assert bench.registry.clone("sql", "copy", lora_int_id=3).status is LoadStatus.LOADED


@pytest.mark.parametrize("is_verb", [False, True])
def test_a_release_raises_nothing_where_the_system_has_no_thread(
    monkeypatch: pytest.MonkeyPatch, is_verb: bool
) -> None:
    """The end of a request raised "can't start new thread", and the other adapters of its mix stayed held."""
    refused, start = list[str](), threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "loraplex-drain" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    bench = Bench()
    registry = LoRARegistry(bench.store, bench.sources.open)
    for name in ("sql", "chat"):
        registry.load(name, f"/{name}")
    refs = [registry.acquire(name) for name in ("sql", "chat")]
    registry.unload("sql")
    (drain,) = registry._table.pending_drains("sql")
    registry.release(refs[0])
    assert refused
    assert not drain.done.done()
    if is_verb:
        registry.unload("chat")
    registry.release(refs[1])
    assert drain.done.result(60)
