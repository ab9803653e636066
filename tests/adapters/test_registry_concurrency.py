"""The registry under threads. Gates and barriers make the order; nothing sleeps and nothing is timed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

from loraplex.adapters.registry import LoadResult, LoadStatus, LoRARef, LoRARegistry, UnloadResult
from loraplex.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterMemoryError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterUnloadedError,
)
from tests.adapters.fake_store import Bench, FakeSources, FakeStore, Gate, MemoryJournal, digest_of

NUM_CLIENTS = 10
WAIT_S = 60


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(abort_grace_s=WAIT_S)
    yield bench
    bench.check_idle()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(NUM_CLIENTS + 2) as pool:
        yield pool


def watch(bench: Bench, method: str, num_calls: int) -> threading.Event:
    """Set when the table's `method` was called `num_calls` times.

    The caller is under the lock then, and what it does there is done before any other thread goes on.
    """
    original, happened, calls = getattr(bench.registry._table, method), threading.Event(), Counter[str]()

    def watched(*args: object) -> object:
        calls[method] += 1
        if calls[method] == num_calls:
            happened.set()
        return original(*args)

    setattr(bench.registry._table, method, watched)
    return happened


def stop_at(bench: Bench, method: str) -> Gate:
    faults = bench.sources.faults if method == "open" else bench.store.faults
    gate = faults.gates[method] = Gate()
    return gate


def outcome(future: Future[LoadResult]) -> LoadResult | Exception:
    error = future.exception(WAIT_S)
    assert error is None or isinstance(error, Exception)
    return future.result() if error is None else error


# ----------------------------------------------------------------------------------------------------- one load for all


def all_load_at_once(
    bench: Bench, pool: ThreadPoolExecutor, load: Callable[[], LoadResult]
) -> list[LoadResult | Exception]:
    """Let one load begin, wait until all others wait for it, let it go on."""
    gate = stop_at(bench, "open")
    all_asked = watch(bench, "loaded", NUM_CLIENTS)
    futures = [pool.submit(load) for _ in range(NUM_CLIENTS)]
    assert gate.arrived.wait(WAIT_S)
    assert all_asked.wait(WAIT_S)
    gate.opened.set()
    return [outcome(future) for future in futures]


def test_ten_clients_cause_one_fetch(bench: Bench, pool: ThreadPoolExecutor) -> None:
    """Rule 2."""
    results = all_load_at_once(bench, pool, lambda: bench.registry.load("sql", "/sql", lora_int_id=7))
    assert all(isinstance(result, LoadResult) for result in results)
    statuses = Counter(result.status for result in results if isinstance(result, LoadResult))
    assert statuses == {LoadStatus.LOADED: 1, LoadStatus.ALREADY_LOADED: NUM_CLIENTS - 1}
    assert {result.ref for result in results if isinstance(result, LoadResult)} == {bench.registry.resolve("sql")}
    assert bench.sources.num_opened == {"/sql": 1}
    assert bench.store.count("add") == 1


def test_ten_clients_share_one_failure_and_the_next_try_is_fresh(bench: Bench, pool: ThreadPoolExecutor) -> None:
    """Rule 2."""
    bench.store.faults.errors["add"] = AdapterNoRoomError("no room")
    results = all_load_at_once(bench, pool, lambda: bench.registry.load("sql", "/sql"))
    assert [str(result) for result in results] == ["no room"] * NUM_CLIENTS
    assert bench.sources.num_opened == {"/sql": 1}
    assert bench.registry.load("sql", "/sql").status is LoadStatus.LOADED


def test_ten_reloads_are_two_and_none_gets_content_older_than_its_call(bench: Bench, pool: ThreadPoolExecutor) -> None:
    bench.registry.load("sql", "/sql")
    gate = stop_at(bench, "open")
    early = pool.submit(bench.registry.load, "sql", "/sql", load_inplace=True)
    assert gate.arrived.wait(WAIT_S)  # it has read the old content
    bench.sources.digests["/sql"] = "new content"
    all_asked = watch(bench, "loaded", NUM_CLIENTS)
    late = [pool.submit(bench.registry.load, "sql", "/sql", load_inplace=True) for _ in range(NUM_CLIENTS)]
    assert all_asked.wait(WAIT_S)
    gate.opened.set()
    assert early.result(WAIT_S).ref.adapter_digest == digest_of("/sql")
    results = [future.result(WAIT_S) for future in late]
    assert {result.status for result in results} == {LoadStatus.RELOADED}
    assert {result.ref.adapter_digest for result in results} == {"new content"}
    assert bench.registry.resolve("sql") in {result.ref for result in results}


def test_a_load_of_another_path_waits_and_is_judged_by_what_came_of_the_first(
    bench: Bench, pool: ThreadPoolExecutor
) -> None:
    for error, expected in ((None, "loaded from '/first'"), (AdapterNoRoomError("no room"), None)):
        gate = stop_at(bench, "open")
        bench.store.faults.errors |= {} if error is None else {"add": error}
        first = pool.submit(bench.registry.load, "sql", "/first")
        assert gate.arrived.wait(WAIT_S)
        asked = watch(bench, "loaded", 1)
        second = pool.submit(bench.registry.load, "sql", "/second")
        assert asked.wait(WAIT_S)
        gate.opened.set()
        assert outcome(first) is error if error is not None else isinstance(outcome(first), LoadResult)
        got = outcome(second)
        assert isinstance(got, LoadResult) if expected is None else isinstance(got, AdapterConflictError)
        bench.registry.unload("sql")


def test_loads_of_different_names_do_not_wait_for_each_other(bench: Bench, pool: ThreadPoolExecutor) -> None:
    gate = stop_at(bench, "open")
    slow = pool.submit(bench.registry.load, "slow", "/slow")
    assert gate.arrived.wait(WAIT_S)
    bench.registry.load("quick", "/quick")
    bench.registry.load("twin", "/slow")
    bench.registry.unload("quick")
    gate.opened.set()
    assert slow.result(WAIT_S).status is LoadStatus.LOADED


def test_a_load_under_way_holds_its_number_and_its_room(pool: ThreadPoolExecutor) -> None:
    bench = Bench(max_loaded_loras=1)
    gate = stop_at(bench, "open")
    slow = pool.submit(bench.registry.load, "slow", "/slow", lora_int_id=7)
    assert gate.arrived.wait(WAIT_S)
    with pytest.raises(AdapterMemoryError, match="0 adapters are loaded and 1 are being loaded"):
        bench.registry.load("other", "/other")
    with pytest.raises(AdapterConflictError, match="lora_int_id 7 belongs to adapter 'slow'"):
        bench.registry.load("other", "/other", lora_int_id=7)
    with pytest.raises(AdapterNotFoundError, match="still being loaded"):
        bench.registry.acquire("slow")
    assert bench.registry.lora_int_ids() == {}
    gate.opened.set()
    slow.result(WAIT_S)
    assert bench.registry.lora_int_ids() == {7: "slow"}


def test_a_number_that_a_caller_was_granted_outlives_the_reload_that_brought_it(
    bench: Bench, pool: ThreadPoolExecutor
) -> None:
    bench.registry.load("sql", "/sql")
    gate = stop_at(bench, "add")
    bench.store.faults.errors["add"] = AdapterNoRoomError("no room")
    reload = pool.submit(bench.registry.load, "sql", "/sql", lora_int_id=7, load_inplace=True)
    assert gate.arrived.wait(WAIT_S)
    assert bench.registry.load("sql", "/sql", lora_int_id=7).ref.lora_int_id == 7
    gate.opened.set()
    assert isinstance(outcome(reload), AdapterNoRoomError)
    assert bench.registry.name_of(7) == "sql"


# ---------------------------------------------------------------------------------------- requests never wait for verbs


VERBS: dict[str, Callable[[LoRARegistry], object]] = {
    "open": lambda registry: registry.load("sql", "/sql", load_inplace=True),
    "add": lambda registry: registry.load("sql", "/sql", load_inplace=True),
    "pin": lambda registry: registry.pin("sql"),
    "unpin": lambda registry: registry.unpin("sql"),
    "promote": lambda registry: registry.switch("other", "sql"),
    "evict": lambda registry: registry.evict("sql"),
    "list": lambda registry: registry.list_adapters(),
    "drop": lambda registry: registry.unload("other"),
    "abort": lambda registry: registry.unload("busy", force=True),
}


@pytest.mark.parametrize("method", VERBS)
def test_requests_go_on_while_a_verb_is_stuck(bench: Bench, pool: ThreadPoolExecutor, method: str) -> None:
    for name in ("sql", "other", "busy"):
        bench.registry.load(name, f"/{name}")
    held = bench.registry.acquire("busy")
    gate = stop_at(bench, method)
    verb = pool.submit(VERBS[method], bench.registry)
    assert gate.arrived.wait(WAIT_S)
    refs = [bench.registry.acquire("sql") for _ in range(3)]
    assert bench.registry.names()
    assert bench.registry.load("sql", "/sql").status is LoadStatus.ALREADY_LOADED
    for ref in refs:
        bench.registry.release(ref)
    bench.registry.release(held)
    bench.run_jobs()
    gate.opened.set()
    verb.result(WAIT_S)


# ------------------------------------------------------------------------------------------------ verbs meet each other


@pytest.mark.parametrize("method", ["open", "add", "pin"])
def test_unload_calls_a_first_load_off(bench: Bench, pool: ThreadPoolExecutor, method: str) -> None:
    gate = stop_at(bench, method)
    load = pool.submit(bench.registry.load, "sql", "/sql", lora_int_id=7, is_pinned=True)
    assert gate.arrived.wait(WAIT_S)
    result = bench.registry.unload("sql")
    assert (result.ref, result.is_drained) == (None, True)
    with pytest.raises(AdapterNotFoundError, match="not loaded"):
        bench.registry.unload("sql")
    again = bench.registry.load("sql", "/other", lora_int_id=7)  # name and number are free at once
    gate.opened.set()
    with pytest.raises(AdapterUnloadedError, match="unloaded while it was being loaded"):
        load.result(WAIT_S)
    assert bench.registry.refs() == {"sql": again.ref}


def test_unload_calls_a_reload_off(bench: Bench, pool: ThreadPoolExecutor) -> None:
    bench.registry.load("sql", "/sql")
    held = bench.registry.acquire("sql")
    gate = stop_at(bench, "add")
    load = pool.submit(bench.registry.load, "sql", "/sql", load_inplace=True)
    assert gate.arrived.wait(WAIT_S)
    assert bench.registry.unload("sql").num_references == 1
    gate.opened.set()
    with pytest.raises(AdapterUnloadedError, match="unloaded while it was being loaded"):
        load.result(WAIT_S)
    assert bench.registry.names() == ()
    bench.registry.release(held)


def test_a_pin_during_a_reload_is_on_the_new_version(bench: Bench, pool: ThreadPoolExecutor) -> None:
    bench.registry.load("sql", "/sql")
    gate = stop_at(bench, "add")
    load = pool.submit(bench.registry.load, "sql", "/sql", load_inplace=True)
    assert gate.arrived.wait(WAIT_S)
    asked = watch(bench, "answering", 1)
    pin = pool.submit(bench.registry.pin, "sql")
    assert asked.wait(WAIT_S)
    gate.opened.set()
    new = load.result(WAIT_S).ref
    assert pin.result(WAIT_S)
    assert bench.store.pinned() == {new.adapter_id}


def test_a_switch_waits_for_the_load_of_the_new_adapter(bench: Bench, pool: ThreadPoolExecutor) -> None:
    bench.registry.load("old", "/old")
    gate = stop_at(bench, "open")
    load = pool.submit(bench.registry.load, "new", "/new")
    assert gate.arrived.wait(WAIT_S)
    switch = pool.submit(bench.registry.switch, "old", "new")
    gate.opened.set()
    assert switch.result(WAIT_S).ref == load.result(WAIT_S).ref
    assert bench.registry.resolve("old").adapter_name == "new"


def test_a_switch_to_what_is_unloaded_meanwhile_leaves_the_old_adapter(bench: Bench, pool: ThreadPoolExecutor) -> None:
    bench.registry.load("old", "/old")
    bench.registry.load("new", "/new")
    held = bench.registry.acquire("new")
    gate = stop_at(bench, "promote")
    switch = pool.submit(bench.registry.switch, "old", "new")
    assert gate.arrived.wait(WAIT_S)
    assert bench.registry.acquire("old").adapter_name == "old"  # until `new` is resident
    bench.registry.unload("new")
    gate.opened.set()
    with pytest.raises(AdapterNotFoundError, match="unloaded while 'old' was being switched"):
        switch.result(WAIT_S)
    bench.registry.release(held)
    bench.registry.release(bench.registry.resolve("old"))


def reload(registry: LoRARegistry) -> object:
    return registry.load("sql", "/sql", load_inplace=True)


def switch(registry: LoRARegistry) -> object:
    return registry.switch("sql", "new")


@pytest.mark.parametrize(("verb", "fails_at"), [(reload, "pin"), (switch, "promote")])
def test_a_failed_verb_has_nothing_to_undo_on_what_a_forced_unload_has_dropped(
    bench: Bench,
    pool: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    verb: Callable[[LoRARegistry], object],
    fails_at: str,
) -> None:
    """The old version had a pin, which the verb has lifted, and the new one finds no room."""
    registry, store = bench.registry, bench.store
    registry.load("new", "/new")
    registry.load("sql", "/sql", is_pinned=True)
    store.device_room = 1
    gate = Gate()

    def meet(method: str) -> None:
        """Once the old version has no pin and is off the device."""
        if method == fails_at and not store.pinned() and (verb is reload or not store.on_device()):
            store.faults.before = lambda method: None
            gate.pass_through()
            raise AdapterNoRoomError("no room for the new one")

    store.faults.before = meet
    future = pool.submit(verb, registry)
    assert gate.arrived.wait(WAIT_S)
    assert registry.unload("sql", force=True).is_drained
    gate.opened.set()
    assert isinstance(future.exception(WAIT_S), AdapterNoRoomError)
    assert [record.message for record in caplog.records] == []
    assert registry.names() == ("new",)
    assert store.pinned() == set()
    assert len(store.adapters) == 1


def test_unload_waits_until_its_deadline_for_the_last_request(bench: Bench, pool: ThreadPoolExecutor) -> None:
    bench.registry.load("sql", "/sql")
    held = bench.registry.acquire("sql")
    is_unnamed = watch(bench, "pending_drains", 1)
    unload: Future[UnloadResult] = pool.submit(bench.registry.unload, "sql", deadline_s=WAIT_S)
    assert is_unnamed.wait(WAIT_S)
    assert bench.registry.names() == ()
    assert not unload.done()
    bench.registry.release(held)
    bench.run_jobs()
    result = unload.result(WAIT_S)
    assert (result.is_drained, result.num_references) == (True, 0)
    assert bench.store.adapters == {}


def test_a_waiting_unload_hears_that_the_store_failed_to_drop(bench: Bench, pool: ThreadPoolExecutor) -> None:
    held = bench.registry.load("sql", "/sql").ref
    bench.registry.acquire("sql")
    is_unnamed = watch(bench, "pending_drains", 1)
    unload = pool.submit(bench.registry.unload, "sql", deadline_s=WAIT_S)
    assert is_unnamed.wait(WAIT_S)
    bench.store.faults.errors["drop"] = AdapterNoRoomError("the engine is odd")
    bench.registry.release(held)
    bench.run_jobs()  # the releaser hears nothing of it
    with pytest.raises(AdapterNoRoomError, match="odd"):
        unload.result(WAIT_S)
    bench.store.drop_adapter(held.adapter_id)


# --------------------------------------------------------------------------------------------------------------- stress


class CarefulStore(FakeStore):
    """Knows what requests hold: dropping a version in use, or twice, fails."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Counter[int] = Counter()

    def drop_adapter(self, adapter_id: int) -> None:
        assert self.held[adapter_id] == 0, "an adapter in use is dropped"
        super().drop_adapter(adapter_id)

    def evict_adapter(self, adapter_id: int) -> bool:
        """As the engine's: another verb may pin it after its pin was lifted, and what is pinned stays."""
        with self._lock:
            is_pinned = self.find(adapter_id).is_pinned
        return not is_pinned and super().evict_adapter(adapter_id)


class Client:
    """One thread's worth of random verbs and requests, seeded."""

    def __init__(self, registry: LoRARegistry, store: CarefulStore, seed: int) -> None:
        self.registry, self.store = registry, store
        self.random = random.Random(seed)
        self.refs: list[LoRARef] = []

    def run(self, start: threading.Barrier, num_verbs: int) -> None:
        start.wait(WAIT_S)
        verbs = (self.load, self.reload, self.unload, self.switch, self.move, self.pin, self.evict)
        requests = (self.acquire, self.release)
        for _ in range(num_verbs):
            with suppress(AdapterError):
                self.random.choice(verbs)()
            for _ in range(4):
                with suppress(AdapterError):
                    self.random.choice(requests)()
        while self.refs:
            self.release()

    def name(self) -> str:
        return self.random.choice("abcde")

    def load(self) -> None:
        self.registry.load(
            self.name(), self.random.choice(("/x", "/y")), lora_int_id=self.random.choice((None, 1, 2, 3))
        )

    def reload(self) -> None:
        self.registry.load(self.name(), "/x", load_inplace=True, is_pinned=self.random.random() < 0.3)

    def unload(self) -> None:
        self.registry.unload(self.name(), force=self.random.random() < 0.3)

    def switch(self) -> None:
        old, new = self.random.sample("abcde", 2)
        self.registry.switch(old, new)

    def move(self) -> None:
        self.registry.move(self.name(), self.random.choice((None, None, 1, 2)))

    def pin(self) -> None:
        self.random.choice((self.registry.pin, self.registry.unpin))(self.name())

    def evict(self) -> None:
        self.random.choice((self.registry.evict, self.registry.preload))(self.name())

    def acquire(self) -> None:
        ref = self.registry.acquire(self.name() + self.random.choice(("", "", "@1", "@2")))
        self.store.held[ref.adapter_id] += 1
        self.refs.append(ref)

    def release(self) -> None:
        if self.refs:
            ref = self.refs.pop(self.random.randrange(len(self.refs)))
            self.store.held[ref.adapter_id] -= 1
            self.registry.release(ref)


class TellingStore(CarefulStore):
    """Fails every 13th change with an error that the registry must survive."""

    def __init__(self) -> None:
        super().__init__()
        self._num_calls = 0
        self.faults.before = self._fail_sometimes

    def _fail_sometimes(self, method: str) -> None:
        self._num_calls += 1
        if method in ("add", "promote", "pin") and self._num_calls % 13 == 0:
            raise AdapterNoRoomError("no room this time")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("store_class", [CarefulStore, TellingStore])
def test_many_threads_leave_nothing_behind(store_class: type[CarefulStore], seed: int) -> None:
    """Rules 1, 2 and 11: no version is dropped in use or twice, and every byte and reference returns."""
    store, num_threads = store_class(), 8
    with ThreadPoolExecutor(2) as later, ThreadPoolExecutor(num_threads) as pool:
        journal = MemoryJournal()
        registry = LoRARegistry(
            store, FakeSources().open, 4, run_later=later.submit, abort_grace_s=0.0, journal=journal
        )
        start = threading.Barrier(num_threads)
        clients = [Client(registry, store, 100 * seed + number) for number in range(num_threads)]
        for future in [pool.submit(client.run, start, 60) for client in clients]:
            future.result(WAIT_S)
        registry.check_integrity()
    registry.check_integrity()
    assert registry.num_references == 0
    assert set(registry.specs()) == set(store.specs.values())
    assert store.pinned() == {info.ref.adapter_id for info in registry.list_adapters() if info.is_pinned}
    told = {name: (record.versions, record.lora_int_id, record.alias_of) for name, record in journal.names.items()}
    records = {name: registry._table.change_of(name).record for name in registry._table.current}
    assert told == {
        name: (record.versions, record.lora_int_id, record.alias_of) for name, record in records.items() if record
    }
    for info in registry.list_adapters():
        registry.unload(info.ref.adapter_name)
    assert store.adapters == {}
    assert store.count("add") == store.count("drop")


# ------------------------------------------------------------------------------------------------------------- restart


@pytest.mark.parametrize("verb", ["reload", "unload"])
def test_a_verb_that_ends_during_a_restore_leaves_nothing_behind(
    bench: Bench, pool: ThreadPoolExecutor, verb: str
) -> None:
    """It began before the engine died; the version that it retires is on its way into the new engine."""
    bench.registry.load("a", "/a")
    bench.store.start_again()
    gate = stop_at(bench, "attach")
    restoring = pool.submit(bench.registry.restore)
    assert gate.arrived.wait(WAIT_S)
    if verb == "reload":
        bench.registry.load("a", "/a", load_inplace=True)
    else:
        bench.registry.unload("a")
    gate.opened.set()
    restoring.result(WAIT_S)
    assert set(bench.store.specs.values()) == set(bench.registry.specs())
