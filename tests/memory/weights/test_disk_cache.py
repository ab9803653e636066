"""The disk tier: what was written comes back bit for bit, or not at all; a shared folder keeps its budget."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.kernels.checksum import checksum
from loraplex.kernels.ops import get_backend
from loraplex.kernels.slices import ABSENT, DTYPE_CODES, SliceLayout
from loraplex.memory.weights import disk_cache, disk_file
from loraplex.memory.weights.disk_cache import DiskCache, DiskRead, StoredLayout
from loraplex.memory.weights.disk_file import DamagedFileError, parse_layout
from loraplex.memory.weights.packing import PackedBlock, PackedLayout, Packer
from tests.kernels.cases import BACKENDS
from tests.memory.gains import make_dora, make_ia3
from tests.memory.rig import BASE, BASE_BIAS, BASE_WEIGHTS, CPU, TARGETS, FakeBase, FakeClock, Rig, make_model

FORM = "reference rows.1 float32 0123abcd"
DIGEST = "ab12" * 16
ROOM = 1 << 30
ROOT = Path(__file__).resolve().parents[2]
NUM_PAGES = 3
"""Pages of the files that `fill` writes: a header and two of weights."""

Adapter = tuple[PackedLayout, list[torch.Tensor], list[int]]


def any_layout(layout: PackedLayout) -> None:
    """A model that has every layout."""


def cache_in(folder: Path, max_bytes: int = ROOM, form: str = FORM, clock: FakeClock | None = None) -> DiskCache:
    return DiskCache(folder / "cache", max_bytes, form, any_layout, clock or FakeClock())


@contextmanager
def temporary() -> Iterator[Path]:
    """A folder per example of hypothesis."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def adapter_of(sizes: Sequence[int], seed: int = 0, blocks: Sequence[PackedBlock] = ()) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    views = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    return PackedLayout(tuple(sizes), tuple(blocks)), views, [checksum(view) for view in views]


@functools.cache
def real_adapter(rank: int = 5) -> tuple[Packer, Adapter]:
    packer = Packer(TARGETS, get_backend("reference", CPU), torch.float32, BASE)
    model = make_model("content", rank)
    layout = packer.lay_out(model)
    views = [torch.empty(size, dtype=torch.uint8) for size in layout.sizes]
    packer.write(model, layout, views)
    return packer, (layout, views, [checksum(view) for view in views])


def empty(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.full_like(view, 0xFF) for view in views]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def file_of(cache: DiskCache, digest: str = DIGEST) -> Path:
    return cache._own_folder / f"{digest}.lora"


def digests_in(folder: Path) -> set[str]:
    return {file.stem for file in (folder / "cache").glob("*/*.lora")}


def fill(cache: DiskCache, digests: str, age_s: int = 1000) -> None:
    """One file of NUM_PAGES per letter, the first the oldest."""
    for digest in digests:
        assert cache.write(digest, *adapter_of([2 * 4096], ord(digest)))
        age_s -= 1
        then = time.time() - age_s
        os.utime(file_of(cache, digest), (then, then))
    cache._rescan()  # the books hold the time of writing


# ----------------------------------------------------------------------------------------------------------- round trip

SIZES = st.lists(st.integers(1, 200).map(lambda lines: 64 * lines), max_size=6)


@st.composite
def layouts(draw: st.DrawFn) -> PackedLayout:
    """Any that a file may hold."""
    sizes = draw(SIZES)
    blocks = []
    for extent, size in enumerate(sizes):
        offset = 64 * draw(st.integers(0, size // 64 - 1))
        lines = st.just(ABSENT) | st.integers(0, (size - offset) // 64 - 1).map(lambda line: 64 * line)
        part = st.builds(
            SliceLayout,
            lines,
            lines,
            lines,
            st.integers(0, 512),
            st.floats(allow_nan=False, allow_infinity=False),
            st.sampled_from(sorted(DTYPE_CODES, key=str)),
            lines,
            lines,
        )
        name = draw(st.text(max_size=20))
        blocks.append(PackedBlock(name, extent, offset, tuple(draw(st.lists(st.none() | part, max_size=3)))))
    return PackedLayout(tuple(sizes), tuple(blocks))


@settings(deadline=None)
@given(layout=layouts(), seed=st.integers(0, 100))
def test_what_is_written_comes_back(layout: PackedLayout, seed: int) -> None:
    with temporary() as folder:
        cache = cache_in(folder)
        _, views, checksums = adapter_of(layout.sizes, seed)
        assert cache.write(DIGEST, layout, views, checksums)
        again = cache_in(folder)  # of a later process
        assert again.read_layout(DIGEST) == StoredLayout(layout, tuple(checksums))
        found = empty(views)
        assert again.read_into(DIGEST, found) is DiskRead.DONE
        assert same(found, views)
        again.check_integrity()
        stats = again.stats()
        assert (stats.num_hits, stats.num_misses, stats.num_damaged, stats.num_files) == (1, 0, 0, 1)


def test_a_real_adapter_comes_back(tmp_path: Path) -> None:
    packer, (layout, views, checksums) = real_adapter()
    cache = DiskCache(tmp_path, ROOM, FORM, packer.check_layout)
    assert cache.write(DIGEST, layout, views, checksums)
    assert cache.read_layout(DIGEST) == StoredLayout(layout, tuple(checksums))
    found = empty(views)
    assert cache.read_into(DIGEST, found) is DiskRead.DONE
    assert same(found, views)


def test_extents_begin_at_a_page(tmp_path: Path) -> None:
    cache, (layout, views, checksums) = cache_in(tmp_path), adapter_of([640, 64])
    cache.write(DIGEST, layout, views, checksums)
    data = file_of(cache).read_bytes()
    assert data[4096:] == b"".join(bytes(view.tolist()) for view in views)
    assert os.stat(file_of(cache)).st_mode & 0o777 == 0o600


def test_more_extents_than_one_call_takes(tmp_path: Path) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64] * 1500)
    assert cache.write(DIGEST, *adapter)
    found = empty(adapter[1])
    assert cache.read_into(DIGEST, found) is DiskRead.DONE
    assert same(found, adapter[1])


@pytest.mark.parametrize("most", [1, 100, 4097])
def test_calls_that_move_less_than_asked_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    def few(pieces: Sequence[memoryview]) -> list[memoryview]:
        return [pieces[0][:most]]

    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, at: write(fd, few(pieces), at))
    monkeypatch.setattr(os, "preadv", lambda fd, pieces, at: read(fd, few(pieces), at))
    cache, adapter = cache_in(tmp_path), adapter_of([64, 4096, 128])
    assert cache.write(DIGEST, *adapter)
    found = empty(adapter[1])
    assert cache.read_into(DIGEST, found) is DiskRead.DONE
    assert same(found, adapter[1])


def test_a_file_there_is_not_written_again(tmp_path: Path) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64])
    assert not cache.has(DIGEST)
    assert cache.write(DIGEST, *adapter)
    inode = file_of(cache).stat().st_ino
    assert cache.has(DIGEST)
    assert cache.write(DIGEST, *adapter)
    assert file_of(cache).stat().st_ino == inode
    assert cache.stats().num_writes == 1


def test_forms_are_not_mixed(tmp_path: Path) -> None:
    one, other = cache_in(tmp_path), cache_in(tmp_path, form="native panels64.1")
    one.write(DIGEST, *adapter_of([64]))
    assert other.read_layout(DIGEST) is None
    assert other.write(DIGEST, *adapter_of([128], 1))
    assert one.read_layout(DIGEST) != other.read_layout(DIGEST)


def test_a_file_under_anothers_name_is_not_taken_for_it(tmp_path: Path) -> None:
    """Not for another digest, and not for the same one of another model."""
    one, other = cache_in(tmp_path), cache_in(tmp_path, form="another base")
    for cache in (one, other):
        cache.write("aa", *adapter_of([64]))
    data = file_of(one, "aa").read_bytes()
    file_of(one, "aa").with_stem("bb").write_bytes(data)
    file_of(other, "aa").write_bytes(data)
    assert one.read_into("bb", empty(adapter_of([64])[1])) is DiskRead.DAMAGED
    assert other.read_layout("aa") is None
    assert one.read_layout("aa") is not None


def test_drop_and_misses(tmp_path: Path) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64])
    assert cache.read_into(DIGEST, empty(adapter[1])) is DiskRead.MISSING
    assert not cache.drop(DIGEST)
    cache.write(DIGEST, *adapter)
    assert cache.drop(DIGEST)
    assert cache.read_layout(DIGEST) is None
    cache.check_integrity()
    assert not cache.lists(DIGEST)
    assert (cache.stats().used_bytes, cache.stats().num_files, cache.stats().num_misses) == (0, 0, 2)


def test_a_list_of_adapters_looks_at_no_file_that_is_in_the_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine makes it between two steps, of many."""
    packer = Packer(TARGETS, BACKENDS[0], torch.float32, BASE)
    cache, rig = DiskCache(tmp_path, ROOM, FORM, packer.check_layout), Rig(num_device=4, num_host=4)
    rig.manager._tiers.disk = cache
    rig.manager.attach_adapters([rig.spec(adapter_id) for adapter_id in (1, 2, 3)])
    for adapter_id in (1, 2):
        rig.acquire(adapter_id)
        rig.manager.release(adapter_id)
    for _ in range(2):
        rig.manager.evict_adapter(2)
    looks: list[str] = []
    monkeypatch.setattr(DiskCache, "_is_file", lambda cache, name: bool(looks.append(name)))
    tiers = [each.tier for each in rig.manager.list_adapters([1, 2])]
    assert (tiers, looks) == (["device", "disk"], [])
    assert [each.tier for each in rig.manager.list_adapters([3])] == ["source"]
    assert looks, "another process may have written it"


@pytest.mark.parametrize("digest", ["", "..", "../x", "AB", "a/b", "a" * 129, "d1\n", "size"])
def test_a_digest_is_a_hexadecimal_number(tmp_path: Path, digest: str) -> None:
    cache = cache_in(tmp_path)
    for verb in (cache.has, cache.read_layout, cache.drop, cache.touch):
        with pytest.raises(ValueError, match="hexadecimal"):
            verb(digest)
    with pytest.raises(ValueError, match="hexadecimal"):
        cache.write(digest, *adapter_of([64]))


# --------------------------------------------------------------------------------------------------------------- damage


def damage(cache: DiskCache, adapter: Adapter, data: bytes) -> tuple[StoredLayout | None, DiskRead]:
    """What reading gives when the file holds `data`; a good file is there again afterwards."""
    layout, views, checksums = adapter
    file = file_of(cache)
    good = file.read_bytes()
    file.write_bytes(data)
    stored = cache.read_layout(DIGEST)
    found = empty(views)
    outcome = cache.read_into(DIGEST, found)
    if outcome is DiskRead.DONE:
        assert same(found, views)
        assert stored == StoredLayout(layout, tuple(checksums))
    file.write_bytes(good)
    return stored, outcome


def test_a_file_cut_off_anywhere_is_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packer, adapter = real_adapter()
    cache = cache_in(tmp_path)
    cache._check_layout = packer.check_layout
    cache.write(DIGEST, *adapter)
    data = file_of(cache).read_bytes()
    lengths = [
        0,
        1,
        8,
        15,
        16,
        47,
        48,
        49,
        63,
        64,
        100,
        4095,
        4096,
        4097,
        len(data) - 4096,
        len(data) - 64,
        len(data) - 1,
    ]
    for length in lengths:
        assert damage(cache, adapter, data[:length]) == (None, DiskRead.MISSING), length
    assert damage(cache, adapter, data + b"x") == (None, DiskRead.MISSING)
    assert cache.stats().num_damaged == len(lengths) + 1
    assert "is damaged and is deleted" in caplog.text
    assert damage(cache, adapter, data)[1] is DiskRead.DONE


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    with temporary() as folder:
        packer, adapter = real_adapter()
        cache = cache_in(folder)
        cache._check_layout = packer.check_layout
        cache.write(DIGEST, *adapter)
        content = bytearray(file_of(cache).read_bytes())
        place = data.draw(st.integers(0, 63) | st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        stored, outcome = damage(cache, adapter, bytes(content))
        if place < 4096:
            assert (stored, outcome) == (None, DiskRead.MISSING)
        else:  # the header is good, the extents are not
            assert stored == StoredLayout(adapter[0], tuple(adapter[2]))
            assert outcome is DiskRead.DAMAGED


def test_damaged_files_are_deleted(tmp_path: Path) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64, 64])
    cache.write(DIGEST, *adapter)
    content = bytearray(file_of(cache).read_bytes())
    content[-1] ^= 1
    file_of(cache).write_bytes(content)
    assert cache.read_into(DIGEST, empty(adapter[1])) is DiskRead.DAMAGED
    assert not cache.has(DIGEST)
    assert cache.read_into(DIGEST, empty(adapter[1])) is DiskRead.MISSING
    cache.check_integrity()
    assert cache.write(DIGEST, *adapter)


def test_an_unreadable_sector_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64])
    cache.write(DIGEST, *adapter)

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert cache.read_into(DIGEST, empty(adapter[1])) is DiskRead.DAMAGED
    assert not cache.has(DIGEST)


def test_extents_of_other_sizes_are_damage(tmp_path: Path) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64, 128])
    cache.write(DIGEST, *adapter)
    assert cache.read_into(DIGEST, empty(adapter_of([128, 64])[1])) is DiskRead.DAMAGED


def forged(cache: DiskCache, text: bytes, num_extents: int, body: bytes) -> bytes:
    """A file whose checksums are right, whatever it says."""
    checksums = b"\0" * 8 * num_extents
    rest = disk_file._REST.pack(num_extents, len(text), len(body), cache._identity(DIGEST)) + checksums + text
    rest += bytes(-(16 + len(rest)) % 4096)
    return struct.pack("<8sII", b"loraplex", 1, zlib.crc32(rest)) + rest + body


def test_a_forged_layout_is_not_believed(tmp_path: Path) -> None:
    packer, adapter = real_adapter()
    layout = adapter[0]
    cache = DiskCache(tmp_path / "cache", ROOM, FORM, packer.check_layout)
    cache.write(DIGEST, *adapter)
    text = disk_file._encode_layout(layout)
    body = bytes(layout.nbytes)
    sizes, blocks = json.loads(text)
    assert (
        damage(cache, adapter, forged(cache, text, len(sizes), body))[0] is not None
    )  # as it must be: the rest can fail
    bigger = json.dumps([[size + 64 for size in sizes], blocks]).encode()
    wider = json.dumps(
        [sizes, [[*block[:3], [part and [*part[:3], 2 * part[3], *part[4:]] for part in block[3]]] for block in blocks]]
    )
    for said, count, content in (
        (bigger, len(sizes), body + bytes(64 * len(sizes))),
        (wider.encode(), len(sizes), body),
        (text, len(sizes) + 1, body),
        (text, len(sizes) - 1, body),
        (text, len(sizes), body + bytes(64)),
        (text[:-1], len(sizes), body),
        (b"[" * 100_000, len(sizes), body),
        (b"", 0, b""),
    ):
        assert damage(cache, adapter, forged(cache, said, count, content)) == (None, DiskRead.MISSING)


def test_sizes_in_a_header_are_bounded_before_they_are_read(tmp_path: Path) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64])
    cache.write(DIGEST, *adapter)
    for num_extents, num_text in ((2**32 - 1, 10), (1, 2**32 - 1)):
        rest = disk_file._REST.pack(num_extents, num_text, 64, cache._identity(DIGEST))
        data = struct.pack("<8sII", b"loraplex", 1, zlib.crc32(rest)) + rest
        assert damage(cache, adapter, data + bytes(8192)) == (None, DiskRead.MISSING)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.just(64),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=20,
)


@settings(deadline=None)
@given(
    value=JSON | st.tuples(st.just([640, 64]), st.lists(st.tuples(st.text(), JSON, JSON, st.lists(JSON)), max_size=3))
)
def test_any_json_is_a_layout_or_damage(value: Any) -> None:
    try:
        layout = parse_layout(json.dumps(value).encode())
    except DamagedFileError:
        return
    for block in layout.blocks:
        for part in block.layouts:
            if part is not None:
                gains = part.gain_offset, part.input_gain_offset
                assert (
                    block.offset + max(part.a_offset, part.b_offset, part.bias_offset, *gains)
                    < layout.sizes[block.extent_index]
                )


PART = [0, 64, 128, 4, 2.0, "float32"]


def layout_text(part: list[Any]) -> bytes:
    return json.dumps([[640], [["t", 0, 0, [None, part]]]]).encode()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 1), (0, -64), (0, 640), (0, True), (0, 64.0), (0, "0"), (0, None), (1, 2**63), (3, -1), (3, 2**40),
        (3, 4.0), (4, 2), (4, float("nan")), (4, float("inf")), (4, "2"), (5, "float99"), (5, None), (5, ["float32"]),
        (5, "int16"),
    ],
)  # fmt: skip
def test_one_wrong_number_makes_a_layout_wrong(place: int, value: Any) -> None:
    assert parse_layout(layout_text(PART)).blocks[0].layouts[1] == SliceLayout(0, 64, 128, 4, 2.0, torch.float32)
    with pytest.raises(DamagedFileError):
        parse_layout(layout_text([*PART[:place], value, *PART[place + 1 :]]))


@pytest.mark.parametrize("gains", [(192, ABSENT), (ABSENT, 256), (192, 256)])
def test_gains_stand_behind_what_every_slice_has(gains: tuple[int, int]) -> None:
    """A plain adapter's file is as it was: those of earlier versions are read, and theirs find no gain unread."""
    plain = SliceLayout(0, 64, 128, 4, 2.0, torch.float32)
    layout = replace(plain, gain_offset=gains[0], input_gain_offset=gains[1])
    assert disk_file._encode_slice(plain) == tuple(PART)
    assert disk_file._encode_slice(layout) == (*PART, *gains)
    assert parse_layout(layout_text([*PART, *gains])).blocks[0].layouts[1] == layout


@pytest.mark.parametrize("gains", [[192], [192, 256, 320], [192, 32], [640, -1], [-2, -1], [None, -1], [-1, "64"]])
def test_one_wrong_gain_makes_a_layout_wrong(gains: list[Any]) -> None:
    with pytest.raises(DamagedFileError):
        parse_layout(layout_text([*PART, *gains]))


def test_files_with_row_norms_are_of_the_base_that_has_them(tmp_path: Path) -> None:
    """Of another base, or of a checkpoint that was written again, they are missing, not damaged; plain ones are
    there."""
    adapters, caches = {}, []
    for name in ("one base", "another"):
        base = FakeBase(BASE_BIAS, BASE_WEIGHTS, name)
        packer = Packer(TARGETS, BACKENDS[0], torch.float32, base)
        for digest, model in (("aa", make_model("plain")), ("bb", make_dora("dora")), ("cc", make_ia3("ia3"))):
            layout = packer.lay_out(model)
            views = [torch.empty(size, dtype=torch.uint8) for size in layout.sizes]
            packer.write(model, layout, views)
            adapters[digest] = layout, views, [checksum(view) for view in views]
        form = packer.form("auto")
        caches.append(DiskCache(tmp_path, ROOM, form, packer.check_layout, weights_name=packer.weights_name))
    first, second = caches
    for digest, adapter in adapters.items():
        assert first.write(digest, *adapter)
    assert [second.has(digest) for digest in adapters] == [True, False, True]
    assert second.read_layout("bb") is None
    assert second.read_into("bb", empty(adapters["bb"][1])) is DiskRead.MISSING
    assert second.write("bb", *adapters["bb"])
    for cache in caches:
        cache._rescan()
        for digest, (layout, views, checksums) in adapters.items():
            assert cache.read_layout(digest) == StoredLayout(layout, tuple(checksums))
            found = empty(views)
            assert cache.read_into(digest, found) is DiskRead.DONE
            assert same(found, views)
        assert (cache.stats().num_files, cache.stats().num_damaged) == (4, 0)
    assert second.drop("bb")
    assert [cache.has("bb") for cache in caches] == [True, False]


# --------------------------------------------------------------------------------------------------------------- budget


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, 4 * NUM_PAGES * 4096)
    fill(cache, "abcd")
    cache.touch("a")
    assert cache.write("e", *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("acde")
    assert cache.write("f", *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("adef")
    assert cache.write("abc", *adapter_of([5 * 4096]))  # room of two
    assert digests_in(tmp_path) == {"e", "f", "abc"}
    cache.check_integrity()
    assert cache.stats().num_evictions == 4
    assert cache.stats().used_bytes <= 4 * NUM_PAGES * 4096


def test_a_read_is_a_use(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, 2 * NUM_PAGES * 4096)
    fill(cache, "ab")
    assert cache.read_into("a", empty(adapter_of([2 * 4096])[1])) is DiskRead.DONE
    cache.write("c", *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("ac")


def test_other_forms_and_processes_count_alike(tmp_path: Path) -> None:
    clock = FakeClock()
    one, other = (cache_in(tmp_path, 3 * NUM_PAGES * 4096, form, clock) for form in ("one", "other"))
    fill(one, "ab", 1000)
    clock.now_s += disk_cache.RESCAN_S
    assert other.write("c", *adapter_of([2 * 4096]))
    assert other.write("d", *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("bcd")
    clock.now_s += disk_cache.RESCAN_S
    assert one.write("e", *adapter_of([2 * 4096]))  # which did not know of c and d, nor that a is gone
    assert digests_in(tmp_path) == set("cde")
    one.check_integrity()


def test_what_others_touched_or_deleted_is_seen_when_it_matters(tmp_path: Path) -> None:
    """Without a look at the whole folder."""
    mine = cache_in(tmp_path, 4 * NUM_PAGES * 4096)
    fill(mine, "abcd")
    theirs = cache_in(tmp_path, ROOM)
    theirs.touch("a")
    theirs.drop("b")
    assert mine.write("e", *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("acde")
    mine.check_integrity()


def test_what_cannot_fit_evicts_nobody(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, 2 * NUM_PAGES * 4096)
    fill(cache, "ab")
    assert not cache.write("c", *adapter_of([6 * 4096]))
    assert digests_in(tmp_path) == set("ab")
    assert (cache.stats().num_refused, cache.stats().num_evictions) == (1, 0)


def of_tenants(cache: DiskCache, **digests: str) -> None:
    for tenant, letters in digests.items():
        for digest in letters:
            cache.assign(digest, frozenset({tenant}))


def test_a_tenant_beyond_its_share_makes_its_own_room(tmp_path: Path) -> None:
    """However long the others have not used theirs."""
    cache = cache_in(tmp_path, 6 * NUM_PAGES * 4096)
    of_tenants(cache, acme="abc", beta="def0123")
    fill(cache, "abcdef")
    for digest in "0123":
        assert cache.write(digest, *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("abc123")
    cache.check_integrity()


def test_what_a_tenant_has_beyond_its_share_makes_room_for_others(tmp_path: Path) -> None:
    """Used just now or not; what is not needed is no one's."""
    cache = cache_in(tmp_path, 6 * NUM_PAGES * 4096)
    of_tenants(cache, beta="abcdef", acme="0123", gamma="45")
    fill(cache, "abcdef")  # of one that was alone
    for digest in "012":
        assert cache.write(digest, *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("def012")
    assert cache.write("3", *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("def123")
    for digest in "45":  # a third one: two of each
        assert cache.write(digest, *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("ef2345")
    cache.check_integrity()


def test_a_file_of_several_tenants_is_kept_for_any_of_them(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, 4 * NUM_PAGES * 4096)
    of_tenants(cache, beta="bcd01e")
    cache.assign("a", frozenset({"acme", "beta"}))
    fill(cache, "abcd")
    for digest in "01":
        assert cache.write(digest, *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("ad01")
    cache.assign("a", frozenset({"beta"}))  # the other one unloaded it
    assert cache.write("e", *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("d01e")


def test_what_was_there_before_its_adapters_is_theirs_when_it_matters(tmp_path: Path) -> None:
    """After a start the folder is read first; none waits for a look at all of it."""
    fill(cache_in(tmp_path), "abcd")
    cache = cache_in(tmp_path, 4 * NUM_PAGES * 4096)
    of_tenants(cache, acme="ab", beta="cd01")
    for digest in "01":
        assert cache.write(digest, *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("ab01")
    cache.check_integrity()


def test_a_file_beyond_its_tenants_share_takes_no_others(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, 4 * NUM_PAGES * 4096)
    of_tenants(cache, acme="ab", beta="0")
    fill(cache, "ab")
    assert not cache.write("0", *adapter_of([8 * 4096]))
    assert digests_in(tmp_path) == set("ab")
    assert cache.stats().num_refused == 1
    cache.check_integrity()


def test_touching_is_written_once_a_minute(tmp_path: Path) -> None:
    clock = FakeClock()
    cache = cache_in(tmp_path, clock=clock)
    fill(cache, "a")
    cache.touch("a")
    os.utime(file_of(cache, "a"), (1, 1))
    clock.now_s += disk_cache.TOUCH_S - 1
    cache.touch("a")
    assert file_of(cache, "a").stat().st_mtime == 1
    clock.now_s += 1
    cache.touch("a")
    assert file_of(cache, "a").stat().st_mtime > 1
    cache.touch("b")  # not there


@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["write", "read", "drop", "touch", "assign", "later"]), st.integers(0, 7)),
        max_size=40,
    )
)
def test_the_folder_never_holds_more_than_its_budget(steps: list[tuple[str, int]]) -> None:
    adapters = [adapter_of([4096 * (1 + i % 3)], i) for i in range(8)]
    with temporary() as folder:
        clock = FakeClock()
        cache, most = cache_in(folder, 9 * 4096, clock=clock), 9 * 4096
        for verb, i in steps:
            layout, views, checksums = adapters[i]
            if verb == "write":
                assert cache.write(f"{i}", layout, views, checksums) == cache.has(f"{i}")
            elif verb == "read":
                found = empty(views)
                is_there = cache.has(f"{i}")
                assert cache.read_into(f"{i}", found) is (DiskRead.DONE if is_there else DiskRead.MISSING)
                assert not is_there or same(found, views)
            elif verb == "drop":
                is_there = cache.has(f"{i}")
                assert cache.drop(f"{i}") == is_there
            elif verb == "touch":
                cache.touch(f"{i}")
            elif verb == "assign":
                cache.assign(f"{i}", frozenset(["acme", "beta", "gamma"][i % 3 : 1 + i % 4]))
            else:
                clock.now_s += 30
            cache.check_integrity()
            assert sum(file.stat().st_size for file in folder.rglob("*.lora")) <= most


# ---------------------------------------------------------------------------------------------- disks that do not work


class Disk:
    """os.statvfs of a disk of 1000 pages."""

    f_frsize = 4096
    f_blocks = 1000

    def __init__(self, num_free: int) -> None:
        self.f_bavail = num_free


def test_the_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 95 %: files of the cache make room, if they can."""
    cache = cache_in(tmp_path)
    fill(cache, "ab")
    monkeypatch.setattr(os, "statvfs", lambda folder: Disk(51 + NUM_PAGES))
    assert cache.write("c", *adapter_of([2 * 4096]))
    monkeypatch.setattr(os, "statvfs", lambda folder: Disk(51))
    assert cache.write("d", *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("bcd")
    monkeypatch.setattr(os, "statvfs", lambda folder: Disk(0))  # others filled it
    assert not cache.write("e", *adapter_of([2 * 4096]))
    assert digests_in(tmp_path) == set("bcd")


@pytest.mark.parametrize("call", ["pwritev", "open", "utime", "statvfs", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_disk_that_refuses_is_a_cache_that_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    clock = FakeClock()
    cache, adapter = cache_in(tmp_path, clock=clock), adapter_of([4096, 64])

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        for _ in range(3):
            assert not cache.write(DIGEST, *adapter)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # one line in a minute
    assert os.strerror(code) in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    cache.check_integrity()
    assert cache.stats().num_refused == 3
    assert cache.write(DIGEST, *adapter)
    clock.now_s += disk_cache.COMPLAINT_S


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    cache, adapter = cache_in(tmp_path), adapter_of([64])
    assert not cache.write(DIGEST, *adapter)
    assert cache.read_layout(DIGEST) is None
    assert cache.read_into(DIGEST, empty(adapter[1])) is DiskRead.MISSING
    assert not cache.has(DIGEST)
    assert not cache.drop(DIGEST)
    cache.touch(DIGEST)
    assert cache.stats().num_files == 0


def test_files_that_cannot_be_deleted_are_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_in(tmp_path, 2 * NUM_PAGES * 4096)
    fill(cache, "ab")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fail)
        assert not cache.write("c", *adapter_of([2 * 4096]))
    assert cache.stats().num_files == 2


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64])
    cache.write(DIGEST, *adapter)
    (tmp_path / "cache").rename(tmp_path / "gone")
    assert cache.read_layout(DIGEST) is None
    assert cache.write(DIGEST, *adapter)


# --------------------------------------------------------------------------------------------------- what is not ours


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, 2 * NUM_PAGES * 4096)
    fill(cache, "ab")
    folder = file_of(cache, "a").parent
    foreign = [
        folder / "notes.txt",
        folder / "XY.lora",
        folder.parent / "c.lora",
        folder / "c.lora.bak",
        folder / "d.tmp",
    ]
    for file in foreign:
        file.write_bytes(bytes(100_000))
    (folder / "dd.lora").mkdir()
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "ee.lora").write_bytes(bytes(100_000))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "ff.lora").write_bytes(bytes(100_000))
    (folder / "ff.lora").symlink_to(outside / "ff.lora")
    (folder.parent / ("0" * 16)).symlink_to(outside)
    again = cache_in(tmp_path, 2 * NUM_PAGES * 4096)
    assert again.stats().num_files == 2
    assert again.write("c", *adapter_of([2 * 4096]))
    assert again.stats().num_files == 2
    assert all(file.exists() for file in [*foreign, folder / "dd.lora", outside / "ff.lora", folder / "ff.lora"])


def test_links_and_other_things_are_not_read(tmp_path: Path) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64])
    cache.write(DIGEST, *adapter)
    file = file_of(cache)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert not cache.has(DIGEST)
    assert cache.read_layout(DIGEST) is None
    assert cache.read_into(DIGEST, empty(adapter[1])) is DiskRead.MISSING
    assert cache.write(DIGEST, *adapter)  # in the place of the link
    assert cache.read_into(DIGEST, empty(adapter[1])) is DiskRead.DONE
    cache.drop(DIGEST)
    os.mkfifo(file)
    assert cache.read_layout(DIGEST) is None
    file.unlink()
    file.mkdir()
    assert cache.read_layout(DIGEST) is None
    assert not cache.write(DIGEST, *adapter)
    assert not cache.drop(DIGEST)


def test_a_folder_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    cache, adapter = cache_in(tmp_path), adapter_of([64])
    (tmp_path / "outside").mkdir()
    (tmp_path / "cache").mkdir()
    cache._own_folder.symlink_to(tmp_path / "outside")
    assert not cache.write(DIGEST, *adapter)
    assert list((tmp_path / "outside").iterdir()) == []


def test_what_dead_writers_left_is_swept(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    fill(cache, "a")
    folder = file_of(cache, "a").parent
    dead, young, alive = (folder / f"{digest}.{'0' * 16}.tmp" for digest in ("d", "e", "f"))
    for file in (dead, young, alive):
        file.write_bytes(b"half")
    for file in (dead, alive):
        os.utime(file, (1, 1))
    with alive.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        cache_in(tmp_path)
    assert not dead.exists()
    assert young.exists()
    assert alive.exists()


# ---------------------------------------------------------------------------------------------------- several processes

WORK = """
import random, sys, torch
from pathlib import Path
from tests.memory.weights import test_disk_cache as t

seed, folder, rounds = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
rng, adapters = random.Random(seed), [t.adapter_of([4096 * (1 + i % 3), 64], i) for i in range(12)]
cache = t.DiskCache(folder, 18 * 4096, t.FORM, t.any_layout)
outcomes = {outcome: 0 for outcome in t.DiskRead}
for step in range(rounds):
    i = rng.randrange(12)
    layout, views, checksums = adapters[i]
    digest = f"{i:x}"
    if rng.random() < 0.4:
        assert cache.write(digest, layout, views, checksums)
    elif rng.random() < 0.1:
        cache.drop(digest)
    else:
        found = t.empty(views)
        outcome = cache.read_into(digest, found)
        outcomes[outcome] += 1
        assert outcome is not t.DiskRead.DONE or t.same(found, views)
    if step % 50 == 0:
        with cache._lock:
            cache._rescan()
assert outcomes[t.DiskRead.DAMAGED] == 0 == cache.stats().num_damaged
assert outcomes[t.DiskRead.DONE] > 0
assert cache.stats().num_evictions > 0
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """They write the same files, read and evict each other's, all at once: never a wrong byte, never a half file."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORK, str(seed), str(tmp_path), "300"], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for seed in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    assert list(tmp_path.rglob("*.tmp")) == []
    cache = DiskCache(tmp_path, ROOM, FORM, any_layout)
    cache.check_integrity()
    assert 0 < cache.stats().num_files <= 12


def test_parsed_layouts_are_kept_but_not_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_LAYOUTS", 2)
    cache = cache_in(tmp_path)
    adapters = [adapter_of([64 * (1 + i)], i) for i in range(4)]
    for i, adapter in enumerate(adapters):
        cache.write(f"{i}", *adapter)
        cache.write(f"a{i}", *adapter)
        first, second = cache.read_layout(f"{i}"), cache.read_layout(f"a{i}")
        assert first is not None
        assert second is not None
        assert first.layout is second.layout
        assert len(cache._layouts) <= 2
    assert replace(adapters[0][0]) == cache.read_layout("0").layout  # type: ignore[union-attr]
