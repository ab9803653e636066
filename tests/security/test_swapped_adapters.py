"""A user who can write into a root swaps what was checked for a link to elsewhere, just before it is opened.

The seam is `os.open`: whatever looks at a path before it is a check, and a swap there wins each race.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import load_file

from loraplex import LLM, AsyncEngine, LoRAConfig, LoRARequest
from loraplex.adapters import source, source_reader
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.registry import OpenedAdapter
from loraplex.adapters.remote import hub
from loraplex.adapters.source import AdapterSource, narrowed_to
from loraplex.adapters.source_reader import REFUSED_S, SourceReader, read_spec
from loraplex.adapters.sources.opener import AdapterOpener
from loraplex.adapters.weights import CheckedReader
from loraplex.core import AdapterSpec
from loraplex.demo.tasks import TASKS, adapter_path
from loraplex.errors import (
    AdapterBusyError,
    AdapterContentChangedError,
    AdapterLoadError,
    AdapterPathForbiddenError,
    AdapterTooLargeError,
    AdapterUnavailableError,
)
from loraplex.testing.fake_engine import FakeReceivedOpener
from tests.frontend.processes import Client, demo_config, within
from tests.security.demo_reader import demo_opener, demo_reader
from tests.security.tenancy import tenancy
from tests.server.conftest import client_of

ADAPTER = adapter_path(TASKS[0].name)
CONFIG, WEIGHTS, BIN = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
INDEX, SHARD = "adapter_model.safetensors.index.json", "adapter_model-1.safetensors"


def to_shards(path: Path) -> None:
    os.rename(path / WEIGHTS, path / SHARD)
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(path / SHARD), SHARD)}))


def to_bin(path: Path) -> None:
    torch.save(load_file(path / WEIGHTS), path / BIN)
    (path / WEIGHTS).unlink()


OPENINGS: dict[str, tuple[Callable[[Path], Any], str, int]] = {
    "configuration": (lambda path: None, CONFIG, 1),
    "header": (lambda path: None, WEIGHTS, 1),
    "tensors": (lambda path: None, WEIGHTS, 2),
    "index": (to_shards, INDEX, 1),
    "header of a shard": (to_shards, SHARD, 1),
    "tensors of a shard": (to_shards, SHARD, 2),
    "pickle": (to_bin, BIN, 1),
}
"""What is opened -> how the adapter is stored, the file's name, and which opening of it."""


class Swapper:
    """Does `swap` before one opening of a file; `read` has the files of which bytes were read, by (device, inode)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: set[tuple[int, int]] = set()
        self._name, self._number, self._swap = "", 0, lambda: None
        really_open, preadv = os.open, os.preadv

        def opened(path: Any, *arguments: Any, **options: Any) -> int:
            if Path(os.fsdecode(path)).name == self._name:
                self._number -= 1
                if self._number == 0:
                    self._swap()
            return really_open(path, *arguments, **options)

        def recorded(fd: int, *arguments: Any) -> int:
            self.read.add(_inode(os.fstat(fd)))
            return preadv(fd, *arguments)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "preadv", recorded)

    def before(self, name: str, number: int, swap: Callable[[], Any]) -> None:
        self._name, self._number, self._swap = name, number, swap


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@pytest.fixture
def swapper(monkeypatch: pytest.MonkeyPatch) -> Swapper:
    return Swapper(monkeypatch)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """root/of-a-user/a, beside never-sent/a, whose configuration has a secret."""
    return Path(shutil.copytree(ADAPTER, tmp_path / "root" / "of-a-user" / "a"))


def put_outside(adapter: Path) -> Path:
    outside = Path(shutil.copytree(adapter, adapter.parents[2] / "never-sent" / "a"))
    config = json.loads((outside / CONFIG).read_text())
    (outside / CONFIG).write_text(json.dumps({**config, "hunter2": "hunter2", "r": "hunter2"}))
    return outside


def swap(path: Path, target: Path) -> None:
    """A directory or a file becomes a link to another."""
    path.rename(path.with_name("before"))
    path.symlink_to(target)


def opener_of(*roots: Path) -> AdapterOpener:
    return demo_opener(AdapterSource(roots))


def check_refused(error: AdapterLoadError, swapper: Swapper, outside: Path) -> None:
    assert "outside the directories that adapters may be loaded from" in error.message
    for hidden in ("hunter2", "never-sent", str(outside.parents[1])):
        assert hidden not in error.message
    assert swapper.read.isdisjoint(_inode(file.stat()) for file in outside.iterdir())


@pytest.mark.parametrize("what", ["file", "directory", "directory above"])
@pytest.mark.parametrize("opening", OPENINGS)
def test_what_becomes_a_link_after_its_check_is_not_read(
    adapter: Path, swapper: Swapper, opening: str, what: str
) -> None:
    store, name, number = OPENINGS[opening]
    store(adapter)
    outside = put_outside(adapter)
    paths = {"file": (adapter / name, outside / name), "directory": (adapter, outside)}
    path, target = paths.get(what, (adapter.parent, outside.parent))
    swapper.before(name, number, lambda: swap(path, target))
    with pytest.raises(AdapterPathForbiddenError) as caught:
        opener_of(adapter.parents[1]).open(str(adapter))
    check_refused(caught.value, swapper, outside)


@pytest.mark.parametrize("what", ["file", "directory", "directory above"])
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_tenant_reads_nothing_of_anothers_root(adapter: Path, swapper: Swapper, opening: str, what: str) -> None:
    """Both lie in the server's. A tenant's were looked at before its load waited: it got another's weights."""
    store, name, number = OPENINGS[opening]
    store(adapter)
    root = adapter.parents[1]
    others = Path(shutil.copytree(adapter, root / "of-another-user" / "a"))
    paths = {"file": (adapter / name, others / name), "directory": (adapter, others)}
    path, target = paths.get(what, (adapter.parent, others.parent))
    swapper.before(name, number, lambda: swap(path, target))
    opener = opener_of(root)
    with narrowed_to((adapter.parent,)), pytest.raises(AdapterPathForbiddenError):
        opener.open(str(adapter))
    assert swapper.read.isdisjoint(_inode(file.stat()) for file in others.iterdir())


def test_a_tenants_directory_that_has_become_a_link_is_not_fetched(adapter: Path) -> None:
    root = adapter.parents[1]
    others = Path(shutil.copytree(adapter, root / "of-another-user" / "a"))
    swap(adapter, others)
    with narrowed_to((adapter.parent,)), pytest.raises(AdapterPathForbiddenError):
        opener_of(root).open(str(adapter))
    opener_of(root).open(str(adapter))  # the operator may


def test_a_configuration_that_is_read_again_is_no_tenants_other(adapter: Path) -> None:
    """PUT of tensors takes that of the version before: a link gave any JSON file below the server's roots."""
    root = adapter.parents[1]
    others = Path(shutil.copytree(adapter, root / "of-another-user" / "a"))
    spec = AdapterSpec(7, "acme/a", 1, "", str(adapter), 0, 8)
    opener = opener_of(root)
    with narrowed_to((adapter.parent,)):
        assert opener.config_of(spec) == (others / CONFIG).read_bytes()
        swap(adapter / CONFIG, others / CONFIG)
        with pytest.raises(AdapterPathForbiddenError):
            opener.config_of(spec)


async def test_tensors_of_a_tenant_are_taken_within_its_roots(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And within the directories of its own sources."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(FakeReceivedOpener, "config_of", lambda opener, spec: repr(inside.get()()).encode())
    inside, found = source._narrower, set[str]()
    made = tmp_path / "state"
    made.mkdir()
    with tenancy(made, {"acme/sql": "/srv/acme/sql"}, adapter_sources=(f"acme/own={adapter.parent}",)) as server:
        open_received = FakeReceivedOpener.open_received

        def noting(opener: FakeReceivedOpener, directory: str, *rest: Any) -> OpenedAdapter:
            found.add(Path(directory, CONFIG).read_text())
            return open_received(opener, directory, *rest)

        monkeypatch.setattr(FakeReceivedOpener, "open_received", noting)
        async with client_of(server.app) as client:
            body = save({"lora_A": np.ones(4, np.float32)})
            headers = server.headers("acme")
            answer = await client.put("/v1/adapters/sql/tensors", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
    assert found == {repr((Path("/srv/acme"), adapter.parent))}


async def test_a_load_by_need_reads_nothing_of_another_source(adapter: Path, swapper: Swapper, tmp_path: Path) -> None:
    """Its directory was looked at before its load waited for its turn: it got another tenant's weights."""
    others = Path(shutil.copytree(adapter, adapter.parents[1] / "of-another-user" / "a"))
    opener = opener_of(adapter.parent, others.parent)

    def open_adapter(path: str) -> OpenedAdapter:
        swap(adapter, others)
        return opener.open(path)

    sources = f"acme/own={adapter.parent}", f"beta/own={others.parent}"
    with tenancy(tmp_path, {}, open_adapter=open_adapter, adapter_sources=sources) as server:
        async with client_of(server.app) as client:
            body = {"model": "own/a", "prompt": "x", "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body, headers=server.headers("acme"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_path_forbidden")
    assert swapper.read.isdisjoint(_inode(file.stat()) for file in others.iterdir())


async def test_whatever_a_tenant_loads_is_opened_within_its_roots(tmp_path: Path) -> None:
    seen: list[tuple[Path, ...] | None] = []

    def open_adapter(path: str) -> OpenedAdapter:
        seen.append(source._narrower.get()())
        return OpenedAdapter(path, f"{len(seen):064x}", 1, 1, None)

    with tenancy(tmp_path, {}, open_adapter=open_adapter) as server:
        async with client_of(server.app) as client:
            client.headers.update(server.headers("acme"))
            old = {"name": "old", "path": "/srv/acme/old"}
            new = {"old": "old", "new": "new", "new_path": "/srv/acme/new"}
            vllm = {"lora_name": "third", "lora_path": "/srv/acme/third"}
            for path, body in (("adapters", old), ("adapters/switch", new), ("load_lora_adapter", vllm)):
                assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
            put = await client.put("/v1/adapters/old", json={"path": "/srv/acme/fourth"})
            assert put.status_code == 200, put.text
            client.headers.update(server.headers("admin"))
            body = {"name": "own", "path": "/srv/beta/own"}
            assert (await client.post("/v1/adapters", json=body)).status_code == 200
    assert seen == [(Path("/srv/acme"),)] * 4 + [None]


def test_a_directory_that_is_renamed_out_of_the_roots_is_not_read(adapter: Path, swapper: Swapper) -> None:
    """What was inside is outside now, and the path leads to it still."""
    outside = adapter.parents[2] / "never-sent"

    def move() -> None:
        adapter.rename(outside)
        adapter.symlink_to(outside)

    swapper.before(CONFIG, 1, move)
    with pytest.raises(AdapterPathForbiddenError):
        opener_of(adapter.parents[1]).open(str(adapter))


def test_a_root_that_becomes_a_link_leads_nowhere_else(adapter: Path, swapper: Swapper) -> None:
    """A root is what it was at the start: an adapter of --lora-modules is one, in a folder that others may write to."""
    outside, opener = put_outside(adapter), opener_of(adapter)
    swapper.before(CONFIG, 1, lambda: swap(adapter, outside))
    for _ in range(2):
        with pytest.raises(AdapterPathForbiddenError) as caught:
            opener.open(str(adapter))
        check_refused(caught.value, swapper, outside)


def test_what_stays_inside_is_read(adapter: Path, swapper: Swapper) -> None:
    """Links within the roots and between them, and hard links: each name of a file is as good as the others."""
    other = Path(shutil.copytree(adapter, adapter.parents[2] / "other root" / "a"))
    swapper.before(WEIGHTS, 1, lambda: swap(adapter, other))
    opened = opener_of(adapter.parents[1], other.parent).open(str(adapter))
    assert opened.path == str(adapter)
    (adapter.parent / "before" / CONFIG).unlink()
    os.link(other / CONFIG, adapter.parent / "before" / CONFIG)
    assert opener_of(adapter.parent).open(str(adapter.parent / "before")).adapter_digest == opened.adapter_digest


def test_without_roots_links_are_followed_as_ever(adapter: Path, swapper: Swapper) -> None:
    other = Path(shutil.copytree(adapter, adapter.parents[2] / "other"))
    swapper.before(CONFIG, 1, lambda: swap(adapter, other))
    assert demo_opener(AdapterSource()).open(str(adapter)).path == str(adapter)


def test_a_system_without_proc_asks_the_path_again(
    adapter: Path, swapper: Swapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    readlink = os.readlink

    def without_proc(path: Any, *arguments: Any, **options: Any) -> Any:
        if os.fsdecode(path).startswith("/proc/"):
            raise FileNotFoundError(path)
        return readlink(path, *arguments, **options)

    monkeypatch.setattr(os, "readlink", without_proc)
    opener_of(adapter.parents[1]).open(str(adapter))
    outside = put_outside(adapter)
    swapper.before(CONFIG, 1, lambda: swap(adapter, outside))
    with pytest.raises(AdapterPathForbiddenError) as caught:
        opener_of(adapter.parents[1]).open(str(adapter))
    check_refused(caught.value, swapper, outside)


def test_a_link_that_is_swapped_back_after_it_was_opened_is_noticed_without_proc(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, really_open = put_outside(adapter), os.open

    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        return really_open(outside / Path(path).name, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "readlink", lambda path, **options: (_ for _ in ()).throw(FileNotFoundError(path)))
    with pytest.raises(AdapterLoadError, match="changed while it was opened") as caught:
        opener_of(adapter.parents[1]).open(str(adapter))
    assert "hunter2" not in caught.value.message


def test_the_log_says_where_it_led(adapter: Path, swapper: Swapper, caplog: pytest.LogCaptureFixture) -> None:
    outside = put_outside(adapter)
    swapper.before(CONFIG, 1, lambda: swap(adapter, outside))
    with caplog.at_level(logging.WARNING), pytest.raises(AdapterPathForbiddenError):
        opener_of(adapter.parents[1]).open(str(adapter))
    assert str(outside / CONFIG) in caplog.text


# --------------------------------------------------------------------------------------------------- read again by path


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_engine_reads_a_known_version_only_where_it_was(adapter: Path, swapper: Swapper, is_moved: bool) -> None:
    """After an eviction or a restart: by the path, of a version whose roots may be others now."""
    roots = (adapter.parents[2] / "other",) if is_moved else (adapter.parents[1],)
    spec = AdapterSpec(1, "sql", 1, "digest", str(adapter), 1, 8)
    assert read_spec(spec, AdapterSource(roots), demo_reader()).adapter_id == 1
    outside = put_outside(adapter)
    swap(adapter, outside)
    with pytest.raises(AdapterPathForbiddenError) as caught:
        read_spec(spec, AdapterSource(roots), demo_reader())
    check_refused(caught.value, swapper, outside)


def test_what_is_too_large_by_now_shows_no_size(adapter: Path) -> None:
    """It may be a link to another tenant's files by now."""
    reader = demo_reader()
    reader.lora_config = replace(reader.lora_config, host_memory_bytes=1)
    spec = AdapterSpec(1, "sql", 1, "digest", str(adapter), 1, 8)
    with pytest.raises(AdapterTooLargeError) as caught:
        read_spec(spec, AdapterSource((adapter.parent,)), reader)
    assert not any(map(str.isdigit, caught.value.message))


class CountingReader:
    """Of the demo's base; `num_reads` of all files."""

    def __init__(self) -> None:
        self.num_reads = 0
        self._reader = demo_reader()

    def read(self, *args: Any) -> Any:
        self.num_reads += 1
        return self._reader.read(*args)


def damage(adapter: Path) -> None:
    (adapter / CONFIG).write_text("{}")


def exchange(adapter: Path) -> None:
    """For another sound adapter."""
    for name in (CONFIG, WEIGHTS):
        shutil.copy(adapter_path(TASKS[1].name) / name, adapter / name)


@pytest.mark.parametrize("spoil", [damage, exchange])
def test_what_was_refused_is_not_read_again_while_it_is_the_same(
    adapter: Path, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    """Each request for a swapped adapter read its files, in the engine's loader, for up to 0.6 s."""
    counting, now = CountingReader(), [0.0]
    reader = SourceReader(AdapterSource(), cast(CheckedReader, counting), lambda: now[0])
    digest = demo_reader().read(adapter, PEFTHelper.from_local_dir(adapter)).adapter_digest
    spec = AdapterSpec(1, "sql", 1, digest, str(adapter), 1, 8)
    before = shutil.copytree(adapter, tmp_path / "before")
    for _ in range(2):
        assert reader.read(spec).adapter_id == 1
    assert counting.num_reads == 2
    spoil(adapter)
    refusals = []
    for _ in range(5):
        with pytest.raises((AdapterLoadError, AdapterContentChangedError)) as caught:
            reader.read(spec)
        refusals.append((type(caught.value), caught.value.message))
    assert len(set(refusals)) == 1
    assert counting.num_reads == 3
    with pytest.raises((AdapterLoadError, AdapterContentChangedError)):
        reader.read(replace(spec, adapter_id=2, adapter_digest="0" * 64))
    assert counting.num_reads == 4, "another version is judged for itself"
    now[0] = REFUSED_S
    with pytest.raises((AdapterLoadError, AdapterContentChangedError)):
        reader.read(spec)
    assert counting.num_reads == 5
    for name in (CONFIG, WEIGHTS):
        shutil.copy2(before / name, adapter / name)
    assert reader.read(spec).adapter_digest == digest
    assert counting.num_reads == 6


def test_files_whose_time_was_set_back_are_read_again(adapter: Path) -> None:
    reader = SourceReader(AdapterSource(), demo_reader())
    model = demo_reader().read(adapter, PEFTHelper.from_local_dir(adapter))
    spec = AdapterSpec(1, "sql", 1, model.adapter_digest, str(adapter), 1, 8)
    config, status = (adapter / CONFIG).read_text(), (adapter / CONFIG).stat()
    (adapter / CONFIG).write_text(config.replace('"r": ', '"s": '))
    with pytest.raises(AdapterContentChangedError):
        reader.read(spec)
    (adapter / CONFIG).write_text(config)
    os.utime(adapter / CONFIG, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert reader.read(spec).adapter_digest == spec.adapter_digest


def test_a_source_that_could_not_be_read_is_tried_again(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = demo_reader().read(adapter, PEFTHelper.from_local_dir(adapter))
    spec = AdapterSpec(1, "sql", 1, model.adapter_digest, str(adapter), 1, 8)
    reader = SourceReader(AdapterSource(), demo_reader())
    with monkeypatch.context() as patch:
        patch.setattr(CheckedReader, "read", lambda *args: (_ for _ in ()).throw(AdapterBusyError("come again")))
        with pytest.raises(AdapterBusyError):
            reader.read(spec)
    assert reader.read(spec).adapter_digest == spec.adapter_digest


def test_the_refusals_that_are_known_are_bounded(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_reader, "MAX_REFUSED", 4)
    counting = CountingReader()
    reader = SourceReader(AdapterSource(), cast(CheckedReader, counting))
    for number in (*range(6), 5, 0):
        with pytest.raises(AdapterContentChangedError):
            reader.read(AdapterSpec(number, "sql", 1, "0" * 64, str(adapter), 1, 8))
    assert counting.num_reads == 7, "the last is known, the first no longer"


@pytest.fixture
def llm(adapter: Path) -> Iterator[LLM]:
    (adapter.parents[2] / "link").symlink_to(adapter.parents[1])
    with LLM.from_config(demo_config(adapter_roots=(str(adapter.parents[2] / "link"),))) as llm:
        yield llm


def test_both_readers_of_an_engine_have_its_roots(llm: LLM, adapter: Path) -> None:
    """A root may be given as a link. The front reads when an adapter is added, the engine when it is promoted."""
    with pytest.raises(AdapterPathForbiddenError):
        llm.add_lora(LoRARequest("elsewhere", 1, str(ADAPTER)))
    assert llm.add_lora(LoRARequest("here", 2, str(adapter)))
    adapters = llm.engine.adapters
    assert adapters is not None
    swap(adapter, put_outside(adapter))
    adapters.attach_adapters([AdapterSpec(9, "here", 1, "0" * 64, str(adapter), 1, 8)])
    with pytest.raises(AdapterUnavailableError, match="outside the directories that adapters may be loaded from"):
        adapters.promote_adapter(9)
    adapters.drop_adapter(9)


async def test_a_version_of_the_state_directory_is_read_only_where_it_was(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(adapter.parents[1])
    lora = LoRAConfig(adapter_memory_bytes=1 << 26, host_memory_bytes=1 << 26, disk_memory_bytes=0)
    config = demo_config(lora, adapter_roots=(str(tmp_path / "link"),))
    engine = await within(AsyncEngine.start(config, state_dir=tmp_path / "state"))
    try:
        await within(engine.load_adapter("sql", str(adapter)))
        assert await Client(engine).ask("banana=", "sql")
    finally:
        await within(engine.shutdown())
    outside = put_outside(adapter)
    swap(adapter, outside)
    engine = await within(AsyncEngine.start(config, state_dir=tmp_path / "state"))
    try:
        with pytest.raises(AdapterUnavailableError, match="outside the directories that adapters") as caught:
            await Client(engine).ask("banana=", "sql")
        assert "hunter2" not in caught.value.message
        assert "never-sent" not in caught.value.message
    finally:
        await within(engine.shutdown())


# ------------------------------------------------------------------------------------------------------ the hub's cache


@pytest.mark.parametrize("what", ["link of the snapshot", "blobs", "snapshot", "repository"])
@pytest.mark.parametrize("target", ["never-sent", "models--other--secret"])
def test_a_snapshot_that_leaves_its_part_of_the_cache_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapper: Swapper, what: str, target: str
) -> None:
    cache = tmp_path / "cache"
    repository = cache / "models--org--name"
    snapshot, blobs = repository / "snapshots" / ("a" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(ADAPTER, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    listed = {"adapter_config.json": 1, "adapter_model.safetensors": 1}
    monkeypatch.setattr(hub, "_listed", lambda adapter: ("a" * 40, listed))
    monkeypatch.setattr(hub, "_download", lambda *asked: None)
    opener = demo_opener(AdapterSource((tmp_path / "root",), hub_cache=cache))
    assert opener.open("hf://org/name").path == str(snapshot)

    outside = (tmp_path if target == "never-sent" else cache) / target
    shutil.copytree(repository, outside, symlinks=True)
    path = {"link of the snapshot": snapshot / CONFIG, "blobs": blobs, "snapshot": snapshot}.get(what, repository)
    swapper.before(CONFIG, 1, lambda: swap(path, outside / path.relative_to(repository)))
    with pytest.raises(AdapterPathForbiddenError) as caught:
        opener.open("hf://org/name")
    check_refused(caught.value, swapper, outside / "blobs")
