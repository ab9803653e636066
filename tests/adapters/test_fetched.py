"""FetchedFiles: what requests had fetched is bounded in bytes, and nothing that is used or comes is removed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.remote import fetched
from loraplex.adapters.remote.fetched import Evict, FetchedFiles, MakeRoom, check_disk
from loraplex.errors import AdapterFetchError, AdapterFetchTimeoutError, AdapterNoRoomError, AdapterTooLargeError


def never(*_: object) -> bool:
    return False


class Server:
    """Names by need: the places of those that are registered, and whether they are idle."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.files = FetchedFiles(folder, max_bytes)
        self.used: dict[str, str] = {}
        self.busy: set[str] = set()
        self.evicted: list[str] = []
        self.time_s = 1000

    def path(self, name: str) -> Path:
        return self.files.folder / f"models--org--{name}" / "snapshots" / "commit"

    def fetch(self, make_room: MakeRoom, name: str, nbytes: int) -> None:
        place, path = self.path(name).parent.parent, self.path(name)
        (place.parent / ".locks" / place.name).mkdir(parents=True, exist_ok=True)  # as the hub's library, and first
        blob = place / "blobs" / "weights"
        make_room(f"adapter {name!r}", path, 0 if blob.exists() else nbytes)
        path.mkdir(parents=True, exist_ok=True)
        if not blob.exists():
            blob.parent.mkdir()
            blob.write_bytes(b"x" * nbytes)
            (path / "weights").symlink_to(blob)

    def load(self, name: str, nbytes: int, evict: Evict = never) -> None:
        with self.files.loading(self.used.values, evict) as make_room:
            self.fetch(make_room, name, nbytes)
            self.used[name] = str(self.path(name))
        self.time_s += 1
        os.utime(self.path(name).parent.parent, (self.time_s,) * 2)

    def evict(self, is_here: object, can_fit: Callable[[Iterable[str]], bool]) -> bool:
        name = next((each for each in self.used if each not in self.busy), None)
        if name is None or not can_fit(self.used[each] for each in self.busy):
            return False
        del self.used[name]
        self.evicted.append(name)
        return True

    @property
    def there(self) -> list[str]:
        return sorted(each.name.removeprefix("models--org--") for each in self.files.folder.glob("models--*"))

    @property
    def locked(self) -> list[str]:
        return sorted(each.name.removeprefix("models--org--") for each in self.files.folder.glob(".locks/*"))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "fetched", 100)


def test_what_nothing_uses_goes_the_oldest_first(server: Server) -> None:
    for name in ("a", "b", "c"):
        server.load(name, 30)
    assert server.files.num_bytes == 90
    del server.used["b"], server.used["c"]
    server.load("c", 30)
    del server.used["c"]
    server.load("d", 30)
    assert (server.there, server.files.num_bytes) == (["a", "c", "d"], 90)
    server.load("e", 11)
    assert server.there == ["a", "d", "e"]


def test_locks_go_with_what_they_lock(server: Server) -> None:
    """The hub's library leaves them: a folder for each name that was ever asked for, a thousand a minute."""
    for number in range(9):
        server.load(f"name-{number}", 30)
        server.used.clear()
        with suppress(AdapterTooLargeError):
            server.load(f"too-large-{number}", 101)
    assert server.locked == server.there == ["name-6", "name-7", "name-8"]
    (server.files.folder / ".locks" / "models--org--of-a-killed-server").mkdir()
    assert Server(server.files.folder, 100).locked == []


def test_what_is_there_takes_no_room_again(server: Server) -> None:
    server.load("a", 90)
    server.load("a", 90)
    assert (server.there, server.files.num_bytes) == (["a"], 90)


def test_idle_names_leave_where_their_files_have_to_go(server: Server) -> None:
    server.load("a", 60)
    with pytest.raises(
        AdapterNoRoomError, match=r"'b' is not fetched: .* \(100\), and all are in use; try again later"
    ):
        server.load("b", 60)
    assert (server.there, server.files.num_bytes) == (["a"], 60)
    server.load("b", 60, server.evict)
    assert (server.there, server.evicted, server.files.num_bytes) == (["b"], ["a"], 60)


def test_a_name_that_leaves_may_wait_for_a_thread_that_looks_for_files(server: Server) -> None:
    """As a turn of a shared journal does, while what another server loaded is looked for: each waited for the other."""
    server.load("a", 60)
    is_leaving, has_looked = threading.Event(), threading.Event()

    def evict(*args: Any) -> bool:
        is_leaving.set()
        assert has_looked.wait(30), "both wait"
        return server.evict(*args)

    def look() -> Path:
        assert is_leaving.wait(30)
        with server.files.loading(server.used.values, never):
            folder = server.files.folder
        has_looked.set()
        return folder

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        server.load("b", 60, evict)
        assert looking.result(30) == server.files.folder
    assert (server.there, server.evicted, server.files.num_bytes) == (["b"], ["a"], 60)


def test_a_large_load_whose_names_leave_slowly_keeps_no_other_waiting(server: Server) -> None:
    """All others waited until as many small ones had left as it needed."""
    for name in "abcdefghij":
        server.load(name, 10)
    is_leaving, may_leave = threading.Event(), threading.Event()

    def evict_slowly(*args: Any) -> bool:
        is_leaving.set()
        assert may_leave.wait(30), "others waited for it"
        return server.evict(*args)

    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.load, "large", 80, evict_slowly)
        assert is_leaving.wait(30)
        server.load("small", 10, server.evict)
        assert server.evicted == ["a"], "its own alone"
        may_leave.set()
        large.result(30)
    assert server.files.num_bytes == 100
    assert {"small", "large"} <= set(server.there)


def test_a_load_that_finds_no_more_room_gives_back_what_it_had_taken(server: Server) -> None:
    for name, nbytes in (("b", 20), ("e", 20), ("f", 20), ("own", 40)):
        server.load(name, nbytes)

    def evict_idle(*args: Any) -> bool:
        return next(iter(server.used)) != "own" and server.evict(*args)

    def evict_with_another(*args: Any) -> bool:
        if server.evicted == ["b"]:
            server.load("quick", 40, evict_idle)
        return evict_idle(*args)

    with pytest.raises(AdapterNoRoomError):
        server.load("slow", 50, evict_with_another)
    assert (server.there, server.files.num_bytes) == (["own", "quick"], 80)


def test_a_load_that_is_given_up_while_a_name_leaves_for_it_fetches_nothing(server: Server) -> None:
    server.load("a", 60)
    with ExitStack() as load:

        def evict(*args: Any) -> bool:
            load.close()
            return server.evict(*args)

        make_room = load.enter_context(server.files.loading(server.used.values, evict))
        with pytest.raises(AdapterFetchTimeoutError, match="'b': its load was given up"):
            server.fetch(make_room, "b", 60)
    server.load("c", 100, server.evict)
    assert (server.there, server.files.num_bytes) == (["c"], 100)


def test_what_can_never_fit_takes_nothing_away(server: Server) -> None:
    server.load("a", 60)
    with pytest.raises(AdapterTooLargeError, match=r"'b' has 101 bytes, and .* may have 100 \(--max-fetched-bytes\)"):
        server.load("b", 101, server.evict)
    assert (server.there, server.evicted) == (["a"], [])


def test_no_name_leaves_for_what_would_not_fit_without_all_that_may(server: Server) -> None:
    """Each such request unloaded the idle names of all tenants, and was refused then."""
    for name, nbytes in (("a", 30), ("b", 30), ("busy", 40)):
        server.load(name, nbytes)
    server.busy.add("busy")
    with pytest.raises(AdapterNoRoomError):
        server.load("c", 61, server.evict)
    with pytest.raises(AdapterNoRoomError), server.files.loading(server.used.values, server.evict) as make_room:
        make_room("another commit of a", server.path("a"), 31)
    assert (server.evicted, server.there) == ([], ["a", "b", "busy"])
    server.load("c", 60, server.evict)
    assert (server.evicted, server.there) == (["a", "b"], ["busy", "c"])


def test_loads_that_run_count_and_keep_their_files(server: Server) -> None:
    with server.files.loading(lambda: (), never) as first, server.files.loading(lambda: (), never) as second:
        server.fetch(first, "a", 60)
        with pytest.raises(AdapterNoRoomError):
            server.fetch(second, "b", 60)
        assert server.there == ["a"]
    server.load("b", 60)
    assert server.there == ["b"]


def test_a_fetch_whose_load_was_given_up_downloads_nothing_more(server: Server) -> None:
    with server.files.loading(lambda: (), never) as make_room:
        pass
    with pytest.raises(AdapterFetchTimeoutError, match="was given up"):
        server.fetch(make_room, "a", 10)
    assert server.files.num_bytes == 0


def test_what_may_still_come_of_a_load_that_failed_is_counted(server: Server) -> None:
    with suppress(TimeoutError), server.files.loading(lambda: (), never) as make_room:
        make_room("adapter 'a'", server.path("a"), 60)
        server.path("a").mkdir(parents=True)
        raise TimeoutError
    assert server.files.num_bytes == 60
    server.load("b", 60)
    assert server.there == ["b"]


def test_an_adapter_that_never_comes_whole_is_counted_once(server: Server) -> None:
    """Each try added its bytes, until all others had left for it."""
    server.load("b", 50)
    for _ in range(4):
        with suppress(TimeoutError), server.files.loading(lambda: (), server.evict) as make_room:
            make_room("adapter 'a'", server.path("a"), 40)
            server.path("a").mkdir(parents=True, exist_ok=True)
            raise TimeoutError
        assert (server.there, server.files.num_bytes) == (["a", "b"], 90)
    assert server.evicted == []


def test_a_server_that_starts_again_counts_what_is_there(server: Server) -> None:
    server.load("a", 60)
    of_a_store = server.files.folder / "objects" / "p" / "l"
    of_a_store.mkdir(parents=True)
    (of_a_store / "weights").write_bytes(b"x" * 10)
    of_a_killed_server = of_a_store.with_name(".part-killed")
    of_a_killed_server.mkdir()
    again = Server(server.files.folder, 100)
    again.used = server.used
    assert again.files.folder == server.files.folder
    assert (again.files.num_bytes, of_a_killed_server.exists()) == (70, False)
    with again.files.loading(again.used.values, never) as make_room:
        make_room("adapter 'b'", again.files.folder / "objects" / "p" / "m", 40)
    assert not of_a_store.exists()
    assert again.path("a").exists()


def test_a_temporary_folder_goes_with_its_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path / "cache"))
    files = FetchedFiles()
    assert not (tmp_path / "cache").exists()
    assert files.folder.is_relative_to(tmp_path)
    files.close()
    assert not files.folder.exists()


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(AdapterFetchError, match="has no folder for adapters that are fetched") as caught:
        _ = FetchedFiles(tmp_path).folder
    assert str(tmp_path) not in caught.value.message


def test_a_link_in_place_of_the_folder_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files behind it would be removed as what requests had fetched."""
    (tmp_path / "hub" / "models--org--a").mkdir(parents=True)
    (tmp_path / "fetched").symlink_to(tmp_path / "hub")
    with pytest.raises(AdapterFetchError, match="no folder for adapters that are fetched"):
        _ = FetchedFiles(tmp_path / "fetched", 1).folder
    assert "fetched is a link" in caplog.text
    assert (tmp_path / "hub" / "models--org--a").is_dir()


def test_the_disk_keeps_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """How much that is, is for the log: a tenant reads the error."""
    free = SimpleNamespace(free=fetched.SPARE_DISK_BYTES + 10)
    monkeypatch.setattr(fetched.shutil, "disk_usage", lambda path: free)
    check_disk("adapter 'a'", tmp_path / "no" / "folder", 10)
    with pytest.raises(AdapterFetchError, match="'a' has 11 bytes, and the disk of this server has") as caught:
        check_disk("adapter 'a'", tmp_path, 11)
    assert str(free.free) not in caught.value.message
    assert f"has {free.free} bytes left" in caplog.text
    files = FetchedFiles(tmp_path)
    with files.loading(lambda: (), never) as make_room:
        make_room("adapter 'a'", files.folder / "models--org--a", 6)
        with pytest.raises(AdapterFetchError, match="the disk of this server"):
            make_room("adapter 'b'", files.folder / "models--org--b", 5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60), st.sampled_from(["load", "unload", "hold"]))))
def test_the_bound_holds_and_nothing_in_use_is_removed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, str]]
) -> None:
    server = Server(tmp_path_factory.mktemp("fetched"), 100)
    with ExitStack() as stack:
        for name, nbytes, what in steps:
            if what == "unload":
                server.used.pop(name, None)
                continue
            try:
                if what == "load":
                    server.load(name, nbytes)
                else:
                    server.fetch(stack.enter_context(server.files.loading(server.used.values, never)), name, nbytes)
            except (AdapterNoRoomError, AdapterTooLargeError):
                pass
            assert server.files.num_bytes <= 100
            assert all(Path(path).exists() for path in server.used.values())
    sizes = [path.lstat().st_size for path in server.files.folder.rglob("blobs/*")]
    assert sum(sizes) <= server.files.num_bytes <= 100
    assert set(server.locked) <= set(server.there)
