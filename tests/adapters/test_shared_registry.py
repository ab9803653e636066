"""One registry of several servers in a real PostgreSQL: what one does the others know, or they refuse the name."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import random
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from loraplex.adapters.registry import (
    AdapterText,
    DatabaseState,
    LoadStatus,
    LoadTurn,
    LoRARegistry,
    NameRecord,
    VersionRecord,
)
from loraplex.core import Tier
from loraplex.errors import (
    AdapterConflictError,
    AdapterMemoryError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    AdapterUnloadedError,
    ConfigError,
    DatabaseUnavailableError,
    LoraplexError,
)
from loraplex.events import EventKind
from tests import postgres
from tests.adapters.fake_store import Bench, FakeStore, Gate

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed (pip install loraplex[postgres])")

from loraplex.adapters.journal import postgres_journal, postgres_tables  # noqa: E402
from loraplex.adapters.journal.postgres_journal import MAX_TURNS_OF_A_CLIENT, PostgresJournal  # noqa: E402
from loraplex.processes.fair_turns import working_for  # noqa: E402

BASE = "/models/base"
WAIT_S = 30.0
NEWS_S = 1.0
"""Rule 16."""


class SharedStore(FakeStore):
    """As the engine's: what is pinned is not evicted. Pins of other servers come and go beside this one's verbs."""

    def evict_adapter(self, adapter_id: int) -> bool:
        with self._lock:
            is_pinned = self.find(adapter_id).is_pinned
        return not is_pinned and super().evict_adapter(adapter_id)


class SharingBench(Bench):
    """Jobs run in threads, as a server's do."""

    def run_jobs(self) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while any(thread.name == "job" for thread in threading.enumerate()) and time.monotonic() < deadline_s:
            time.sleep(0.005)


class Server:
    """A registry over fakes that shares its names."""

    def __init__(self, url: str, patience_s: float = 1.5, count_interval_s: float = 1e6, **settings: int) -> None:
        self.journal = PostgresJournal(url, BASE, patience_s, count_interval_s)
        self.bench = SharingBench(**{"max_versions_kept": 2, **settings}, journal=self.journal)  # type: ignore[arg-type]
        self.bench.jobs, self.bench.store = _Threads(), SharedStore()
        self.bench.__post_init__()
        self.registry = self.bench.registry
        self.registry.resume(self.journal.names, self.journal.last_adapter_id)

    def picture(self) -> dict[str, NameRecord | None]:
        """All that is remembered, but for counters, and times that servers count apart."""
        table = self.registry._table
        with self.registry._lock:
            records = {name: table.change_of(name).record for name in sorted(table.current)}
        return {
            name: record and replace(record, usage=replace(record.usage, num_requests=0, last_used_time=0.0))
            for name, record in records.items()
        }

    def sees(self, name: str, path: str | None) -> bool:
        try:
            ref = self.registry.hold(name)
        except LoraplexError:
            return path is None
        self.registry.release(ref)
        return ref.lora_path == path


class _Threads(list[Callable[[], None]]):
    def append(self, job: Callable[[], None]) -> None:
        threading.Thread(target=job, name="job", daemon=True).start()


@pytest.fixture
def cluster(postgres_cluster: postgres.Cluster) -> postgres.Cluster:
    return postgres_cluster


@pytest.fixture
def url(cluster: postgres.Cluster) -> str:
    return cluster.new_schema()


@pytest.fixture
def begin(url: str) -> Iterator[Callable[..., Server]]:
    begun: list[Server] = []

    def one(**settings: float) -> Server:
        begun.append(Server(url, **settings))  # type: ignore[arg-type]
        return begun[-1]

    yield one
    for server in begun:
        server.journal.close()


def until(is_so: Callable[[], bool], within_s: float = WAIT_S) -> float:
    """Seconds until then."""
    began_s = time.monotonic()
    while not _is(is_so):
        assert time.monotonic() - began_s < within_s, "it did not come to be in time"
        time.sleep(0.002)
    return time.monotonic() - began_s


def _is(is_so: Callable[[], bool]) -> bool:
    try:
        return is_so()
    except LoraplexError:
        return False


def agree(*servers: Server) -> dict[str, NameRecord | None]:
    until(lambda: all(each.picture() == servers[0].picture() for each in servers[1:]))
    return servers[0].picture()


# ----------------------------------------------------------------------------------------------- one knows of the other


def test_each_verb_is_known_to_all_in_under_a_second(begin: Callable[..., Server]) -> None:
    one, other = begin(), begin()
    verbs: list[tuple[Callable[[], object], Callable[[LoRARegistry], bool]]] = [
        (lambda: one.registry.load("a", "/a", lora_int_id=7), lambda there: there.resolve("a").lora_path == "/a"),
        (lambda: other.registry.load("b", "/b"), lambda there: "b" in there.names()),
        (lambda: one.registry.load("a", "/a2", load_inplace=True), lambda there: there.resolve("a").lora_path == "/a2"),
        (lambda: other.registry.pin("a"), lambda there: there.describe("a").is_pinned),
        (lambda: one.registry.unpin("a"), lambda there: not there.describe("a").is_pinned),
        (lambda: other.registry.switch("a", "b"), lambda there: there.resolve("a").lora_path == "/b"),
        (lambda: one.registry.move("a"), lambda there: there.resolve("a").lora_path == "/a2"),
        (lambda: other.registry.move("a", 1), lambda there: there.resolve("a").lora_path == "/a"),
        (lambda: one.registry.clone("b", "c"), lambda there: there.resolve("c").lora_path == "/b"),
        (lambda: other.registry.load("d", "/d", alias_of="b"), lambda there: there.resolve("d").lora_path == "/b"),
        (lambda: one.registry.unload("a"), lambda there: "a" not in there.names()),
    ]
    for verb, is_known in verbs:
        began_s = time.monotonic()
        verb()
        assert time.monotonic() - began_s < NEWS_S
        assert is_known(one.registry), "it was acknowledged"
        assert is_known(other.registry), "it was acknowledged"
    agree(one, other)
    one.bench.check_idle()
    other.bench.check_idle()


def test_verbs_of_one_tenant_at_two_servers_hold_up_no_other(begin: Callable[..., Server]) -> None:
    """All that wait for one session, 32 threads of one tenant took turns before another's, and asked for answers."""
    servers = begin(), begin()
    names = [f"acme/{index}" for index in range(40)]
    for name in ("beta/a", *names):
        servers[0].registry.load(name, f"/{name}")
    stop, num_turns = threading.Event(), Counter[str]()

    def flood(server: Server, name: str) -> None:
        with working_for("acme"):
            while not stop.is_set():
                (server.registry.unpin if server.registry.describe(name).is_pinned else server.registry.pin)(name)
                num_turns["acme"] += 1

    half = len(names) // 2
    threads = [threading.Thread(target=flood, args=(servers[at // half], name)) for at, name in enumerate(names)]
    passed = []
    try:
        for thread in threads:
            thread.start()
        until(lambda: num_turns["acme"] > len(names))
        with working_for("beta"):
            for verb in (servers[0].registry.pin, servers[0].registry.unpin) * 4:
                before = num_turns["acme"]
                verb("beta/a")
                passed.append(num_turns["acme"] - before)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert sorted(passed)[len(passed) // 2] <= 6 * MAX_TURNS_OF_A_CLIENT, "those that had begun, at both servers"


def test_all_of_a_name_is_shared(begin: Callable[..., Server]) -> None:
    """Number, text, versions, history, alias and ids; a server that starts later has them, too."""
    one, other = begin(), begin()
    one.bench.sources.texts["/t"] = AdapterText.of({"chat_templates": {"default": "ü" * 5000}})
    one.registry.load("a", "/a", lora_int_id=2**62, origin="flag")
    one.registry.load("a", "/t", load_inplace=True)
    other.registry.load("b", "/b", is_pinned=True)
    one.registry.switch("b", "a")
    picture = agree(one, other, begin())
    assert picture["a"] is not None
    assert picture["a"].versions[0].text == one.bench.sources.texts["/t"]
    assert other.registry.name_of(2**62) == "a"
    ids = [version.adapter_id for record in picture.values() if record is not None for version in record.versions]
    assert len(set(ids)) == 3
    one.registry.unload("a")
    one.registry.unload("b")
    assert agree(one, other) == {}
    other.bench.check_idle()


def test_a_load_of_another_server_reads_nothing_and_its_pin_promotes(begin: Callable[..., Server]) -> None:
    one, other = begin(), begin()
    one.registry.load("a", "/a", is_pinned=True)
    until(lambda: len(other.bench.store.pinned()) == 1)
    assert other.bench.sources.num_opened == {}
    assert other.bench.store.count("add") == 0
    one.registry.load("a", "/a2", load_inplace=True)
    new = one.registry.resolve("a").adapter_id
    until(lambda: other.bench.store.pinned() == {new})
    one.registry.unload("a")
    until(lambda: not other.bench.store.adapters)
    assert [(kind, name) for kind, name, _ in other.bench.told] == [(EventKind.UNLOAD, "a")]


def test_running_requests_end_on_the_version_they_began_with(begin: Callable[..., Server]) -> None:
    one, other = begin(), begin()
    one.registry.load("a", "/a")
    until(lambda: other.sees("a", "/a"))
    held = other.registry.acquire("a")
    one.registry.unload("a")
    until(lambda: other.sees("a", None))
    assert held.adapter_id in other.bench.store.adapters
    other.registry.release(held)
    until(lambda: held.adapter_id not in other.bench.store.adapters)
    other.bench.check_idle()


def test_an_engine_that_is_starting_again_learns_of_a_load(
    begin: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.adapters.registry.following.RETRY_S", 0.05)
    one, other = begin(), begin()
    other.bench.store.faults.errors["attach"] = LoraplexError("the engine starts again")
    one.registry.load("a", "/a")
    until(lambda: other.sees("a", "/a"))
    held = other.registry.acquire("a")
    assert held.adapter_id in other.bench.store.adapters
    other.registry.release(held)
    other.bench.check_idle()


def test_what_has_to_be_fetched_is_refused_until_it_is_here(
    begin: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, gate, other = begin(), Gate(), begin()

    def locate(record: VersionRecord, may_fetch: bool) -> str | None:
        if may_fetch:
            gate.pass_through()
        return "/here" if may_fetch else None

    monkeypatch.setattr(other.registry._following, "_locate", locate)
    one.registry.load("a", "/a", is_pinned=True)
    assert gate.arrived.wait(WAIT_S)
    until(lambda: "a" in other.registry.names())
    with pytest.raises(AdapterUnavailableError, match="'a' was loaded at another server, and its files are not at"):
        other.registry.acquire("a")
    with pytest.raises(AdapterUnavailableError, match="try again"):
        other.registry.pin("a")
    gate.opened.set()
    until(lambda: other.sees("a", "/a"))
    until(lambda: bool(other.bench.store.pinned()))
    (spec,) = other.bench.store.specs.values()
    assert spec.path == "/here"
    other.bench.check_idle()


@pytest.mark.parametrize("hangs", [False, True], ids=["it is fetched", "the file system hangs"])
def test_verbs_go_on_while_files_of_a_load_at_another_server_are_waited_for(
    begin: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """The mutex of all verbs was held meanwhile, half a second for each load."""
    monkeypatch.setattr(postgres_journal, "FETCH_PATIENCE_S", WAIT_S)
    one, gate, other = begin(), Gate(), begin()

    def locate(record: VersionRecord, may_fetch: bool) -> str | None:
        if may_fetch or hangs:
            gate.pass_through()
        return "/here" if may_fetch else None

    monkeypatch.setattr(other.registry._following, "_locate", locate)
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(one.registry.load, "a", "/a")]
        try:
            assert gate.arrived.wait(WAIT_S)
            loads.append(pool.submit(other.registry.load, "b", "/b"))
            until(lambda: other.sees("b", "/b"), WAIT_S / 2)
        finally:
            gate.opened.set()
        assert [each.result(WAIT_S).status for each in loads] == [LoadStatus.LOADED] * 2
    until(lambda: other.sees("a", "/a"))
    until(lambda: one.sees("b", "/b"))
    other.bench.check_idle()


# -------------------------------------------------------------------------------------------------------- two at a time


def test_a_verb_that_learns_of_a_load_waits_for_no_file_system(
    begin: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn looked at the directory under the mutex and the database's row: no verb of any server went on."""
    one, gate, other = begin(), Gate(), begin()
    other.registry.load("beta/b", "/b")

    def locate(record: VersionRecord, may_fetch: bool) -> str | None:
        if record.path == "/cache/a":
            gate.pass_through()
        return record.path

    monkeypatch.setattr(other.registry._following, "_locate", locate)
    monkeypatch.setattr(other.journal, "_learn", lambda connection, at_least: None)  # the turn is before it
    with ThreadPoolExecutor(2) as pool:
        load = pool.submit(one.registry.load, "acme/a", "/a")
        try:
            until(lambda: one.journal._applied > other.journal._applied)
            for verb in (other.registry.pin, other.registry.unpin):
                assert pool.submit(verb, "beta/b").result(WAIT_S / 2)
            assert gate.arrived.is_set()
            with pytest.raises(AdapterUnavailableError, match="its files are not at"):
                other.registry.acquire("acme/a")
            assert load.result(WAIT_S).status is LoadStatus.LOADED
        finally:
            gate.opened.set()
    until(lambda: other.sees("acme/a", "/a"))
    other.bench.check_idle()


def test_equal_loads_at_two_servers_are_one_load(begin: Callable[..., Server]) -> None:
    one, other = begin(), begin()
    gate = one.bench.sources.faults.gates["open"] = Gate()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one.registry.load, "a", "/a")
        assert gate.arrived.wait(WAIT_S)
        second = pool.submit(other.registry.load, "a", "/a")
        time.sleep(0.2)
        assert not second.done()
        gate.opened.set()
        assert first.result(WAIT_S).status is LoadStatus.LOADED
        assert second.result(WAIT_S).status is LoadStatus.ALREADY_LOADED
    assert other.bench.sources.num_opened == {}
    agree(one, other)


def test_servers_with_lists_in_other_orders_start_together(begin: Callable[..., Server]) -> None:
    """A load of a list that waits for those before it must not keep its name from another server's."""
    lists = [(begin(), ("a", "b")), (begin(), ("b", "a"))]
    with ThreadPoolExecutor(4) as pool:
        loads, first = [], []
        for server, (before, after) in lists:
            turn = LoadTurn()
            first.append((server, before, turn))
            loads.append(pool.submit(server.registry.load, after, f"/{after}", turn=LoadTurn(turn)))
            time.sleep(0.2)
        try:
            for server, name, turn in first:
                loads.append(pool.submit(server.registry.load, name, f"/{name}", turn=turn))
            assert [load.result(5.0).ref.adapter_name for load in loads] == ["b", "a", "a", "b"]
        finally:
            for _, _, turn in first:
                turn.end()
    assert agree(*(server for server, _ in lists)).keys() == {"a", "b"}


def test_the_second_of_two_verbs_on_a_name_sees_the_first(begin: Callable[..., Server]) -> None:
    one, other = begin(), begin()
    gate = one.bench.sources.faults.gates["open"] = Gate()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(one.registry.load, "a", "/a")
        assert gate.arrived.wait(WAIT_S)
        conflicting = pool.submit(other.registry.load, "a", "/other")
        again = pool.submit(other.registry.load, "a", "/third", load_inplace=True)
        gate.opened.set()
        first.result(WAIT_S)
        assert again.result(WAIT_S).previous_version == 1
        with pytest.raises(AdapterConflictError, match="'a' is loaded from another source than '/other'"):
            conflicting.result(WAIT_S)
    assert agree(one, other)["a"].versions[0].lora_path == "/third"  # type: ignore[union-attr]


def test_an_unload_calls_off_a_reload_at_another_server(begin: Callable[..., Server]) -> None:
    one, other = begin(), begin()
    one.registry.load("a", "/a", is_pinned=True)
    until(lambda: other.sees("a", "/a"))
    gate = one.bench.sources.faults.gates["open"] = Gate()
    with ThreadPoolExecutor(1) as pool:
        reload = pool.submit(one.registry.load, "a", "/a2", load_inplace=True)
        assert gate.arrived.wait(WAIT_S)
        other.registry.unload("a")
        gate.opened.set()
        with pytest.raises(AdapterUnloadedError, match="'a' was unloaded while it was being loaded"):
            reload.result(WAIT_S)
    assert agree(one, other) == {}
    one.bench.check_idle()
    other.bench.check_idle()


def test_a_number_and_the_last_room_belong_to_the_first(begin: Callable[..., Server]) -> None:
    one, other = begin(max_loaded_loras=2), begin(max_loaded_loras=2)
    gate = one.bench.sources.faults.gates["open"] = Gate()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(one.registry.load, "late", "/late", lora_int_id=5)
        assert gate.arrived.wait(WAIT_S)
        other.registry.load("a", "/a", lora_int_id=5)
        gate.opened.set()
        with pytest.raises(AdapterConflictError, match="lora_int_id 5 belongs to adapter 'a', not to 'late'"):
            late.result(WAIT_S)
        gate = one.bench.sources.faults.gates["open"] = Gate()
        late = pool.submit(one.registry.load, "late", "/late")
        assert gate.arrived.wait(WAIT_S)
        other.registry.load("b", "/b")
        gate.opened.set()
        with pytest.raises(AdapterMemoryError, match="another server has loaded one meanwhile, and max_loaded_loras"):
            late.result(WAIT_S)
    agree(one, other)
    one.bench.check_idle()


def test_a_server_that_dies_in_a_verb_leaves_its_name_free(begin: Callable[..., Server], url: str) -> None:
    """Its session ends with it, and so does its lock."""
    one = begin()
    with psycopg.connect(url, autocommit=True) as dying:
        query = f"SELECT pg_advisory_lock({postgres_tables._KEY.format('%s')})"
        dying.execute(query, ("a",))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(one.registry.load, "a", "/a")
            time.sleep(0.2)
            assert not waiting.done()
            dying.close()
            assert waiting.result(WAIT_S).status is LoadStatus.LOADED


def test_verbs_that_wait_for_another_server_ask_for_their_name_one_at_a_time(
    begin: Callable[..., Server], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them asked 20 times a second, in the one session, with a thread for each question."""
    one, num_threads = begin(), 12
    asked: list[int] = []
    lock_verb = postgres_tables.lock_verb

    def counted(connection: Any, name: str) -> bool:
        asked.append(threading.get_ident())
        return lock_verb(connection, name)

    monkeypatch.setattr(postgres_tables, "lock_verb", counted)
    monkeypatch.setattr(postgres_journal, "VERB_POLL_S", (0.005, 0.02))
    with ThreadPoolExecutor(num_threads) as pool, psycopg.connect(url, autocommit=True) as other:
        other.execute(f"SELECT pg_advisory_lock({postgres_tables._KEY.format('%s')})", ("a",))
        with monkeypatch.context() as no_timers:
            no_timers.delattr(threading, "Timer")
            verbs = [pool.submit(one.journal._lock_verb, "a") for _ in range(num_threads)]
            until(lambda: len(asked) > 2 * num_threads)
            assert len(set(asked)) == 1
            until(lambda: one.journal._lock_verb("b") > 0)
        other.close()
        assert len({each.result(WAIT_S) for each in verbs}) == 1
    assert not one.journal._names_asked


@pytest.mark.parametrize(
    ("seen", "beats", "error"),
    [(0, False, None), (10**9, True, None), (0, True, DatabaseUnavailableError)],
    ids=["it was killed", "it has read the change and refuses the name", "it hangs and does not know it"],
)
def test_a_verb_waits_for_a_server_that_does_not_follow_as_long_as_that_may_serve(
    begin: Callable[..., Server],
    cluster: postgres.Cluster,
    url: str,
    seen: int,
    beats: bool,
    error: type[Exception] | None,
) -> None:
    patience_s = 0.6
    one = begin(patience_s=patience_s)
    one.registry.load("before", "/a")
    time.sleep(patience_s + postgres_journal.MARGIN_S)
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.1):
            cluster.sql("UPDATE servers SET at = clock_timestamp() WHERE id = 'other'", url)

    cluster.sql(f"INSERT INTO servers VALUES ('other', {seen}, 0, clock_timestamp())", url)
    beating = threading.Thread(target=beat if beats else lambda: None)
    beating.start()
    try:
        began_s = time.monotonic()
        if error is None:
            one.registry.load("a", "/a")
            assert patience_s < time.monotonic() - began_s < 4 * patience_s
        else:
            with pytest.raises(error, match="it is done, and another server may not know it yet"):
                one.registry.load("a", "/a")
        assert one.sees("a", "/a")
        if not beats:
            began_s = time.monotonic()
            one.registry.unload("a")
            assert time.monotonic() - began_s < patience_s, "it is not waited for twice"
    finally:
        is_over.set()
        beating.join()


def test_random_verbs_of_three_servers_end_the_same_everywhere(begin: Callable[..., Server]) -> None:
    """And what each answered can be put in one order: versions of a name are numbered without a gap or a double."""
    servers = [begin() for _ in range(3)]
    numbers: list[tuple[str, int]] = []
    lock = threading.Lock()

    def client(seed: int) -> None:
        chance, server = random.Random(seed), servers[seed % 3]
        for step in range(25):
            name, other = chance.choice("abc"), chance.choice("abcd")
            verb = chance.randrange(8)
            with contextlib.suppress(AdapterNotFoundError, AdapterConflictError, AdapterUnavailableError):
                if verb <= 2:
                    result = server.registry.load(name, f"/{name}{seed}-{step}", load_inplace=True)
                    with lock:
                        numbers.append((f"{name}{result.ref.adapter_id}", result.ref.adapter_version))
                elif verb == 3:
                    server.registry.unload(name)
                elif verb == 4 and name != other:
                    server.registry.switch(name, other)
                elif verb == 5:
                    server.registry.move(name)
                elif verb == 6:
                    server.registry.pin(name)
                else:
                    held = server.registry.acquire(name)
                    time.sleep(0.001)
                    server.registry.release(held)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(client, seed) for seed in range(6)]:
            done.result(120)
    picture = agree(*servers, begin())
    assert len(set(numbers)) == len(numbers)
    for server in servers:
        until(lambda: set(server.registry.specs()) == set(server.bench.store.specs.values()))  # noqa: B023
        server.bench.check_idle()
        pinned = {
            record.versions[0].adapter_id for record in picture.values() if record and record.versions[0].is_pinned
        }
        until(lambda: server.bench.store.pinned() == pinned)  # noqa: B023


# ---------------------------------------------------------------------------------------------------- the database away


def test_a_database_that_is_down_refuses_verbs_and_no_requests(
    begin: Callable[..., Server], cluster: postgres.Cluster
) -> None:
    one, other = begin(), begin()
    one.registry.load("a", "/a", is_pinned=True)
    one.registry.load("b", "/b")
    until(lambda: other.sees("b", "/b"))
    before = agree(one, other)
    cluster.stop()
    try:
        until(lambda: one.journal.health().state is DatabaseState.DOWN)
        until(lambda: other.journal.health().state is DatabaseState.DOWN)
        verbs: list[Callable[[], object]] = [
            lambda: one.registry.load("new", "/new"),
            lambda: one.registry.load("a", "/a2", load_inplace=True),
            lambda: one.registry.unload("a", force=True),
            lambda: one.registry.switch("a", "b"),
            lambda: one.registry.pin("b"),
            lambda: one.registry.unpin("a"),
            lambda: one.registry.evict("a"),
            lambda: one.registry.clone("a", "copy"),
        ]
        for verb in verbs:
            with pytest.raises(DatabaseUnavailableError, match=r"has not answered for .* nothing was changed"):
                verb()
        deadline_s = time.monotonic() + 3
        while time.monotonic() < deadline_s:  # three times as long as a silent one would have
            for server in (one, other):
                server.registry.release(server.registry.acquire("a"))
            time.sleep(0.02)
        assert one.registry.load("a", "/a").status is LoadStatus.ALREADY_LOADED  # what a request brings is there
        assert one.registry.preload("b").is_new
        assert one.bench.store.pinned() == {one.registry.resolve("a").adapter_id}
        assert one.picture() == before
    finally:
        cluster.start()
    until(lambda: one.journal.health().state is DatabaseState.CONNECTED)
    assert one.registry.load("new", "/new").status is LoadStatus.LOADED
    until(lambda: other.sees("new", "/new"))
    agree(one, other)
    one.bench.check_idle()


def test_a_database_that_stands_still_refuses_names_after_the_patience(
    begin: Callable[..., Server], cluster: postgres.Cluster
) -> None:
    """It may be well for another server: what a name means there is not known."""
    one = begin(patience_s=0.6)
    one.registry.load("a", "/a")
    processes = [cluster.pid, *_children(cluster.pid)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: one.journal.health().state is DatabaseState.SILENT, 5)
        with pytest.raises(AdapterUnavailableError, match=r"may have been changed at another server.*has not answered"):
            one.registry.acquire("a")
        with pytest.raises(DatabaseUnavailableError, match="nothing was changed"):
            one.registry.load("b", "/b")
        assert one.registry.names() == ("a",)
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
    until(lambda: one.journal.health().state is DatabaseState.CONNECTED)
    one.registry.release(one.registry.acquire("a"))


class Wire:
    """A connection between server and database that can be cut: a port that passes bytes on, or loses them.

    last_words: the session that says them next is ended, and has no answer to them.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.is_losing = False
        self.last_words: bytes | None = None
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._target))
                self._sockets += ends
                is_ended = threading.Event()
                for source, sink, is_asking in ((*ends, True), (*ends[::-1], False)):
                    self._threads.append(
                        threading.Thread(target=self._pass_on, args=(source, sink, is_asking, is_ended))
                    )
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_asking: bool, is_ended: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_asking and self.last_words is not None and self.last_words in data:
                    self.last_words = None
                    is_ended.set()
                    sink.sendall(data)
                    time.sleep(0.2)  # it is done there
                    break
                if not self.is_losing and not is_ended.is_set():
                    sink.sendall(data)
        _shut(source, sink)

    def close(self) -> None:
        _shut(*self._sockets)
        for thread in self._threads:
            thread.join(WAIT_S)
        for each in self._sockets:
            each.close()


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wire(cluster: postgres.Cluster) -> Iterator[Wire]:
    made = Wire(cluster.port)
    yield made
    made.close()


def test_a_server_that_is_cut_off_refuses_what_another_one_changes(
    begin: Callable[..., Server],
    url: str,
    cluster: postgres.Cluster,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 16: once the change is acknowledged it either has it or refuses the name; then it catches up."""
    monkeypatch.setattr(postgres_journal, "STATEMENT_S", 3.0)
    one = begin()
    cut = Server(url.replace(str(cluster.port), str(wire.port)))
    try:
        one.registry.load("a", "/a")
        one.registry.load("b", "/b")
        until(lambda: cut.sees("b", "/b"))
        wire.is_losing = True
        switched = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            switching = pool.submit(one.registry.switch, "a", "b")
            switching.add_done_callback(lambda done: switched.set())
            num_served = 0
            while not switched.is_set():
                with contextlib.suppress(AdapterUnavailableError):
                    cut.registry.release(cut.registry.acquire("a"))
                    num_served += 1
                time.sleep(0.01)
            assert switching.result().is_old_loaded
            assert num_served > 10, "requests go on until the patience is over"
            deadline_s = time.monotonic() + 1.5
            while time.monotonic() < deadline_s:
                with pytest.raises(AdapterUnavailableError, match="may have been changed"):
                    cut.registry.acquire("a")
                time.sleep(0.01)
        assert cut.journal.health().state is DatabaseState.SILENT
        one.registry.unload("b")
        one.registry.load("c", "/c")
        wire.is_losing = False
        until(lambda: cut.journal.health().state is DatabaseState.CONNECTED)
        agree(one, cut)
        cut.bench.check_idle()
    finally:
        cut.journal.close()


def test_a_server_that_was_cut_off_before_the_database_went_down_knows_of_nothing(
    begin: Callable[..., Server], url: str, cluster: postgres.Cluster, wire: Wire
) -> None:
    """Refused connections say that no name changes now, not that none has changed since the last answer."""
    one = begin()
    one.registry.load("a", "/a")
    cut = Server(url.replace(str(cluster.port), str(wire.port)), patience_s=0.6)
    try:
        wire.is_losing = True
        until(lambda: cut.journal.health().state is DatabaseState.SILENT)
        one.registry.load("a", "/a2", load_inplace=True)
        wire.close()  # from now on connections are refused
        deadline_s = time.monotonic() + 1.5
        while time.monotonic() < deadline_s:
            assert cut.journal.health().state is DatabaseState.SILENT
            with pytest.raises(AdapterUnavailableError, match="may have been changed"):
                cut.registry.acquire("a")
            time.sleep(0.02)
    finally:
        cut.journal.close()


@pytest.mark.parametrize("is_taken", [True, False], ids=["the commit arrived", "the commit was lost"])
def test_a_commit_without_an_answer_is_found_out(
    begin: Callable[..., Server], url: str, cluster: postgres.Cluster, wire: Wire, is_taken: bool
) -> None:
    """The caller hears that it is not known; the name is refused until it is, and then all servers agree."""
    one = begin()
    cut = Server(url.replace(str(cluster.port), str(wire.port)))
    try:
        one.registry.load("a", "/a", is_pinned=True)
        until(lambda: cut.sees("a", "/a"))
        write = postgres_tables.write_turn

        def and_break(*arguments: object) -> None:
            write(*arguments)  # type: ignore[arg-type]
            if is_taken:
                wire.last_words = b"COMMIT"
            else:
                postgres_journal._cut(cut.journal._writer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(postgres_journal.tables, "write_turn", and_break)
            with pytest.raises(DatabaseUnavailableError, match="look at the adapter, and try again"):
                cut.registry.load("a", "/a2", load_inplace=True)
        expected = "/a2" if is_taken else "/a"
        until(lambda: cut.sees("a", expected))
        picture = agree(one, cut)
        assert picture["a"] is not None
        assert [version.lora_path for version in picture["a"].versions] == (["/a2", "/a"] if is_taken else ["/a"])
        cut.registry.release(cut.registry.acquire("a"))
        until(lambda: cut.bench.store.pinned() == {cut.registry.resolve("a").adapter_id})
        for server in (one, cut):
            until(lambda: set(server.registry.specs()) == set(server.bench.store.specs.values()))  # noqa: B023
    finally:
        cut.journal.close()


def test_a_verb_whose_session_ended_changes_nothing(begin: Callable[..., Server]) -> None:
    """Another server may have begun one on the name since."""
    one = begin()
    one.registry.load("a", "/a", is_pinned=True)
    before = one.picture()
    gate = one.bench.sources.faults.gates["open"] = Gate()
    with ThreadPoolExecutor(1) as pool:
        reload = pool.submit(one.registry.load, "a", "/a2", load_inplace=True)
        assert gate.arrived.wait(WAIT_S)
        postgres_journal._cut(one.journal._writer)
        gate.opened.set()
        with pytest.raises(DatabaseUnavailableError):
            reload.result(WAIT_S)
    assert one.picture() == before
    one.bench.check_idle()
    assert one.bench.store.pinned() == {one.registry.resolve("a").adapter_id}
    assert one.registry.load("a", "/a2", load_inplace=True).status is LoadStatus.RELOADED


def test_a_server_that_was_away_for_long_reads_everything(
    begin: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, cluster: postgres.Cluster, url: str
) -> None:
    monkeypatch.setattr(postgres_tables, "KEPT_TURNS", 3)
    one = begin()
    one.registry.load("gone", "/gone")
    other = begin()
    other.journal._seen = other.journal._applied = -1_000_000  # as if it had slept
    for number in range(6):
        one.registry.load(f"a{number}", "/a")
    one.registry.unload("gone")
    agree(one, other)
    assert cluster.sql("SELECT count(DISTINCT sequence) FROM changes", url) == [(3,)]


def test_a_database_that_was_restored_is_read_again(
    begin: Callable[..., Server], cluster: postgres.Cluster, url: str
) -> None:
    one = begin()
    one.registry.load("a", "/a")
    one.registry.load("b", "/b")
    cluster.sql(
        "BEGIN; LOCK TABLE servers; DELETE FROM versions WHERE name = 'b'; DELETE FROM names WHERE name = 'b'; "
        "DELETE FROM changes; "
        "UPDATE about SET value = '1' WHERE key = 'sequence'; COMMIT",
        url,
    )
    until(lambda: one.sees("b", None))
    assert one.sees("a", "/a")
    one.registry.load("c", "/c")
    agree(one, begin())
    one.bench.check_idle()


@pytest.mark.parametrize("by", ["one that knew", "one that did not"])
def test_ids_of_a_restored_database_come_no_second_time(
    begin: Callable[..., Server], cluster: postgres.Cluster, url: str, by: str
) -> None:
    """What still runs has its id: another adapter of the same id was answered with its weights."""
    one, other = begin(), begin()
    one.registry.load("a", "/a")
    one.registry.load("secret", "/secret")
    held = other.registry.acquire("secret")
    cluster.sql(
        "BEGIN; LOCK TABLE servers; DELETE FROM versions WHERE name = 'secret'; "
        "DELETE FROM names WHERE name = 'secret'; "
        "DELETE FROM changes; UPDATE about SET value = '1' WHERE key IN ('sequence', 'last_adapter_id'); "
        "UPDATE servers SET at = at - interval '1 hour'; COMMIT",
        url,
    )
    if by == "one that did not":
        until(lambda: other.sees("secret", None))
        until(lambda: cluster.sql("SELECT value FROM about WHERE key = 'last_adapter_id'", url) == [("2",)])
        one = begin()
    one.registry.load("mine", "/mine")
    until(lambda: other.sees("mine", "/mine"))
    assert other.sees("secret", None)
    mine = other.registry.resolve("mine")
    assert mine.adapter_id > held.adapter_id
    other.registry.release(held)
    assert other.registry.resolve("mine") == mine
    agree(one, other)
    other.bench.check_idle()


def test_a_restore_is_read_though_the_first_look_at_it_fails(
    begin: Callable[..., Server], cluster: postgres.Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look before it has made the server's row a new one; the number of turns is that of before."""
    one = begin()
    one.registry.load("a", "/a")
    one.registry.load("b", "/b")
    learn, num_looks = PostgresJournal._learn, itertools.count()

    def fail_once(journal: PostgresJournal, connection: Any, at_least: float) -> None:
        if at_least == math.inf and next(num_looks) == 0:  # one for the loads before may come later
            raise OSError("the session ended")
        learn(journal, connection, at_least)

    monkeypatch.setattr(PostgresJournal, "_learn", fail_once)
    cluster.sql(
        "BEGIN; LOCK TABLE servers; DELETE FROM versions WHERE name = 'b'; DELETE FROM names WHERE name = 'b'; "
        "DELETE FROM changes; "
        "UPDATE servers SET at = at - interval '1 hour'; COMMIT",
        url,
    )
    until(lambda: one.sees("b", None))
    assert next(num_looks) == 2


def test_a_name_whose_id_is_anothers_here_means_nothing(
    begin: Callable[..., Server], cluster: postgres.Cluster, url: str
) -> None:
    """Whatever wrote it there."""
    one = begin()
    one.registry.load("a", "/a")
    one.registry.load("b", "/b")
    held = one.registry.acquire("a")
    one.registry.unload("a")
    cluster.sql(
        "BEGIN; UPDATE versions SET adapter_id = 1 WHERE name = 'b'; "
        "INSERT INTO changes SELECT value::bigint + 1, 'b' FROM about WHERE key = 'sequence'; "
        "UPDATE about SET value = (value::bigint + 1)::text WHERE key = 'sequence'; COMMIT",
        url,
    )
    until(lambda: "b" in one.journal._damaged)
    with pytest.raises(LoraplexError):
        one.registry.acquire("b")
    one.registry.release(held)
    one.registry.load("b", "/b")
    assert one.sees("b", "/b")
    one.bench.check_idle()


# --------------------------------------------------------------------------------------------------- starts and secrets


def test_counters_of_all_servers_add_up(begin: Callable[..., Server], url: str) -> None:
    one, other = begin(), begin()
    one.registry.load("a", "/a")
    until(lambda: other.sees("a", "/a"))
    for server, count in ((one, 3), (other, 4)):
        for _ in range(count):
            server.registry.release(server.registry.acquire("a"))
        server.journal.close()
    assert begin().registry.describe("a").num_requests == 7


def test_counters_are_written_in_one_order(begin: Callable[..., Server]) -> None:
    """Two servers that had loaded the same names in two orders waited for each other, and one lost its session."""
    server, written = begin(), list[str]()

    def note(connection: object, cursor: object, statement: str, rows: Any, *others: object) -> None:
        written.extend(row["used_name"] for row in rows if "used_name" in row)

    for name in "cab":
        server.registry.load(name, f"/{name}")
        server.registry.release(server.registry.acquire(name))
    assert server.journal._writer is not None
    sa.event.listen(server.journal._writer, "before_cursor_execute", note)
    server.journal.close()
    assert written == ["a", "b", "c"]


def test_servers_of_one_model_start_together_on_an_empty_database(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        servers = list(pool.map(lambda _: Server(url), range(6)))
    servers[0].registry.load("a", "/a")
    assert all(server.sees("a", "/a") for server in servers), "a load is acknowledged when all have it"
    for server in servers:
        server.journal.close()


def test_another_model_another_version_and_another_schema_are_refused(
    begin: Callable[..., Server], url: str, cluster: postgres.Cluster
) -> None:
    begin()
    with pytest.raises(ConfigError, match="has the adapters of base model '/models/base', this one is '/other'"):
        PostgresJournal(url, "/other")
    PostgresJournal(cluster.new_schema(), "/other").close()
    cluster.sql("UPDATE about SET value = '99' WHERE key = 'schema'", url)
    with pytest.raises(ConfigError, match="was written by another version of Loraplex \\(schema 99, this one has"):
        PostgresJournal(url, BASE)


def test_a_damaged_name_refuses_the_start_and_is_refused_while_servers_run(
    begin: Callable[..., Server], cluster: postgres.Cluster, url: str
) -> None:
    one = begin()
    one.registry.load("a", "/a")
    one.registry.load("b", "/b")
    cluster.sql(
        "BEGIN; UPDATE versions SET digest = 'x' WHERE name = 'a'; "
        "INSERT INTO changes SELECT value::bigint + 1, 'a' FROM about WHERE key = 'sequence'; "
        "UPDATE about SET value = (value::bigint + 1)::text WHERE key = 'sequence'; COMMIT",
        url,
    )
    until(lambda: "a" in one.journal._damaged)
    with pytest.raises(AdapterUnavailableError, match="'a' is damaged in the registry's database; load it again"):
        one.registry.acquire("a")
    one.registry.release(one.registry.acquire("b"))
    with pytest.raises(ConfigError, match=r"is damaged: adapter 'a': .*digest"):
        PostgresJournal(url, BASE)
    one.registry.load("a", "/a", load_inplace=True)
    one.registry.release(one.registry.acquire("a"))


def test_a_name_of_the_base_model_here_is_not_served_here(begin: Callable[..., Server]) -> None:
    one, other = begin(), begin()
    other.registry._following._base_names = frozenset({"mine"})
    one.registry.load("mine", "/a")
    one.registry.load("b", "/b")
    until(lambda: other.sees("b", "/b"))
    with pytest.raises(AdapterNotFoundError):
        other.registry.acquire("mine")


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql://loraplex:SECRET@127.0.0.1:1/x",
        "postgresql://loraplex:SECRET@[::1/x",
        "postgresql://loraplex@127.0.0.1:1/x?password=SECRET",
        "postgresql://loraplex:SECRET@127.0.0.1:PORT/x",
        "mysql://loraplex:SECRET@127.0.0.1/x",
        "postgresql://loraplex:SECRET@127.0.0.1:1/x?nonsense=SECRET",
        "postgresql://loraplex:a/SECRET@127.0.0.1:1/x",
        "postgresql://loraplex:SECRET/a@127.0.0.1:1/x",
        "postgresql://loraplex:1/SECRET@127.0.0.1:1/x",
        "postgresql://loraplex:a@SECRET@127.0.0.1:1/x",
        "postgresql://loraplex:a?SECRET@127.0.0.1:1/x",
        "postgresql://loraplex:a@SECRET/b@127.0.0.1:1/x",
    ],
)
def test_a_password_is_in_no_error(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PostgresJournal(bad, BASE)
    error: BaseException | None = caught.value
    while error is not None:
        assert "SECRET" not in str(error)
        error = error.__cause__ if error.__suppress_context__ else error.__context__


def test_a_session_of_many_notices_is_replaced(
    begin: Callable[..., Server], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every role of the database may notify, and a session keeps the memory of what it has not read."""
    monkeypatch.setattr(postgres_journal, "MAX_NOTICES", 20)
    one, other = begin(), begin()
    one.registry.load("a", "/a")
    until(lambda: other.sees("a", "/a"))
    readers, connected_s = {id(other.journal._reader)}, other.journal._connected_s
    kept = [other.journal._reader]
    with postgres_journal.Database(url).connect() as stranger:
        for _ in range(200):
            stranger.exec_driver_sql(f"SELECT pg_notify('{postgres_journal.CHANNEL}', 'x')")
            if id(other.journal._reader) not in readers:
                break
            time.sleep(0.05)
    assert other.journal._reader is not kept[0]
    until(lambda: kept[0].closed)
    one.registry.load("b", "/b")
    until(lambda: other.sees("b", "/b"))
    assert other.journal._connected_s == connected_s, "the database was never away"


def test_a_password_is_in_no_log_line(cluster: postgres.Cluster, caplog: pytest.LogCaptureFixture, url: str) -> None:
    caplog.set_level(logging.DEBUG)
    server = Server(url.replace("loraplex@", "loraplex:SECRET@"))
    try:
        server.registry.load("a", "/a")
        cluster.stop()
        try:
            until(lambda: "is away" in caplog.text)
            with pytest.raises(DatabaseUnavailableError):
                server.registry.unload("a")
        finally:
            cluster.start()
        until(lambda: "is back" in caplog.text)
        postgres_journal._cut(server.journal._writer)
        with contextlib.suppress(DatabaseUnavailableError):
            server.registry.unload("a")
    finally:
        server.journal.close()
    assert "SECRET" not in caplog.text
    assert "SECRET" not in repr(server.journal)


def test_a_text_that_the_database_cannot_keep_refuses_the_verb(begin: Callable[..., Server]) -> None:
    one = begin()
    with pytest.raises(LoraplexError, match="the registry's database cannot keep it"):
        one.registry.load("a", "/a\0")
    until(lambda: one.sees("a", None))
    assert one.registry.load("a", "/a").status is LoadStatus.LOADED
    assert one.bench.store.find(one.registry.resolve("a").adapter_id).tier is Tier.HOST


def test_news_of_a_name_in_doubt_that_a_verb_overtook_are_not_applied(begin: Callable[..., Server]) -> None:
    """A load was acknowledged, and the look at what became of the verb before it took the name away at this server."""
    one, gate, taken = begin(patience_s=WAIT_S), Gate(), threading.Event()

    class Slow(deque[Any]):
        def append(self, news: Any) -> None:
            gate.pass_through()
            super().append(news)

        def popleft(self) -> Any:
            taken.set()
            return super().popleft()

    one.journal._news = Slow()
    with pytest.raises(LoraplexError, match="the registry's database cannot keep it"):
        one.registry.load("a", "/a\0")
    try:
        assert gate.arrived.wait(WAIT_S)
        assert one.registry.load("a", "/a").status is LoadStatus.LOADED
    finally:
        gate.opened.set()
    assert taken.wait(WAIT_S)
    with one.journal._mutex:
        assert one.sees("a", "/a")


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
