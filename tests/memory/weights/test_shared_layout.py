"""A layout with projections: to disk and back, refused where it is wrong, and adapters that come back from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.slices import ABSENT
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.memory.weights.disk_file import DamagedFileError, _encode_layout, parse_layout
from loraplex.memory.weights.packing import PackedLayout, Packer
from tests.kernels.cases import BACKENDS
from tests.memory.rig import BASE, TARGETS, Rig, make_model, make_shared

FP32 = torch.float32


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_layout_comes_back_from_its_text(backend: KernelBackend) -> None:
    packer = Packer(TARGETS, backend, FP32, BASE)
    layout = packer.lay_out(make_shared("d1"))
    assert parse_layout(_encode_layout(layout)) == layout
    packer.check_layout(layout)
    assert layout.own_nbytes + layout.shared_nbytes == layout.nbytes == sum(layout.sizes)
    assert layout.own_sizes == layout.sizes[:-1]
    views = [torch.full((size,), 0xFF, dtype=torch.uint8) for size in layout.sizes]
    packer.write(make_shared("d1"), layout, views)
    again = [torch.zeros_like(view) for view in views]
    packer.write(make_shared("d1"), layout, again)
    assert all(map(torch.equal, views, again)), "every byte is written"


def change(**fields: object) -> Callable[[PackedLayout], PackedLayout]:
    """Of the projections."""
    return lambda layout: replace(layout, projections=replace(layout.projections, **fields))  # type: ignore[type-var]


def with_rank(layout: PackedLayout) -> PackedLayout:
    """One slice reads more of A than there is."""
    block = layout.blocks[0]
    first = block.layouts[0]
    assert first is not None
    odd = replace(block, layouts=(replace(first, rank=first.rank + 1), *block.layouts[1:]))
    return replace(layout, blocks=(odd, *layout.blocks[1:]))


@pytest.mark.parametrize(
    "make",
    [
        change(rank=13),
        change(in_features=29),
        change(in_features=20),
        change(out_features=8),
        change(nbytes=64),
        change(b_offset=0),
        change(dtype=torch.float16),
        with_rank,
        lambda layout: replace(layout, sizes=layout.sizes[:-1], projections=None),
        lambda layout: replace(layout, sizes=(*layout.sizes[:-1], layout.sizes[-1] + 64)),
        lambda layout: replace(layout, sizes=layout.sizes[:-1]),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_wrong_layout_is_refused(make: Callable[[PackedLayout], PackedLayout], backend: KernelBackend) -> None:
    packer = Packer(TARGETS, backend, FP32, BASE)
    wrong = make(packer.lay_out(make_shared("d1")))
    with pytest.raises(ValueError, match=r"laid out|extents|layout|projections"):
        packer.check_layout(parse_layout(_encode_layout(wrong)))


@pytest.mark.parametrize(
    "text",
    [
        b'[[64],[],null,["zz",1,1,1,"float32",0,64]]',
        b'[[64],[],null,["00000000000000000000000000000000",1,1,1,"float99",0,64]]',
        b'[[64],[],null,["00000000000000000000000000000000",-1,1,1,"float32",0,64]]',
        b'[[64],[],null,["00000000000000000000000000000000",1,1,1,"float32",3,64]]',
        b"[[64],[],null,[1]]",
        b"[[64],[],null,7]",
        b"[[64],[],null,null,null]",
        b'[[64],[["q",0,0,[[-1,-1,-1,4,1.0,"float32",-1,-1,0]]]]]',
    ],
)
def test_text_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(DamagedFileError):
        parse_layout(text)


def test_a_packer_for_two_memories_neither_makes_nor_takes_them() -> None:
    one, two = (Packer(TARGETS, BACKENDS[0], FP32, BASE, is_one_memory=each) for each in (True, False))
    assert one.form("auto") != two.form("auto")
    with pytest.raises(ValueError, match="each adapter has an A and a B of its own"):
        two.check_layout(one.lay_out(make_shared("d1")))
    assert all(
        part is None or part.scales_offset == ABSENT
        for block in two.lay_out(make_model("d1")).blocks
        for part in block.layouts
    )


@pytest.mark.parametrize("backend", [each.name for each in BACKENDS])
def test_they_come_back_from_disk_without_their_sources(backend: str, tmp_path: Path) -> None:
    """As after a restart: another process, no source, one pair for all."""
    for is_restarted in (False, True):
        rig = Rig(num_device=16, num_host=16, backend=backend)
        packer = Packer(TARGETS, next(each for each in BACKENDS if each.name == backend), FP32, BASE)
        rig.manager._tiers.disk = DiskCache(tmp_path, 1 << 20, packer.form("auto"), packer.check_layout)
        for adapter_id in (1, 2, 3):
            rig.source.put(f"/p{adapter_id}", make_shared(f"ab{adapter_id}"))
        rig.manager.attach_adapters([rig.spec(adapter_id, f"ab{adapter_id}") for adapter_id in (1, 2, 3)])
        if is_restarted:
            rig.source.models.clear()
        for adapter_id in (1, 2, 3):
            rig.check_output(rig.acquire(adapter_id), make_shared(f"ab{adapter_id}"))
        assert len({rig.manager._residency.adapters[each].weights.shared for each in (1, 2, 3)}) == 1
        assert sum(rig.source.opens.values()) == (0 if is_restarted else 3)
        rig.manager.check_integrity()
