"""An adapter packed for several ranks: what each of them finds is its share, also behind a compressed copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraplex.adapters.weights import LoRAModel
from loraplex.core import LoraTarget, Shard, ShardKind
from loraplex.distributed import NO_TOKEN
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.slices import SliceWeights
from loraplex.memory.weights.compression import get_compression
from loraplex.memory.weights.packing import PackedLayout
from loraplex.memory.weights.rank_packing import RankPacker
from tests.memory.rig import FakeBase
from tests.memory.weights.test_own_packing import ALL, EMBEDDING, FUSED, HEAD, HIDDEN, LINEAR, RANK, VOCAB, draw, layer

WIDE = VOCAB + 3
SIZES = pytest.mark.parametrize("size", [2, 5])


def cut(target: LoraTarget, shard: Shard) -> LoraTarget:
    """As a model of so many ranks publishes it."""
    if target.kind in (ShardKind.EMBEDDING, ShardKind.ROW):
        return replace(target, in_features=target.in_features // shard.size, shard=shard)
    if target.kind is ShardKind.NORM:
        return replace(target, shard=shard)
    here = target.slices[0].out_features // shard.size
    slices = [replace(s, out_offset=index * here, out_features=here) for index, s in enumerate(target.slices)]
    return replace(target, slices=tuple(slices), shard=shard)


def packer_of(size: int, base: FakeBase) -> RankPacker:
    targets = [[cut(target, Shard(rank, size)) for target in ALL] for rank in range(size)]
    return RankPacker(targets[0], ReferenceBackend(), torch.float32, base, targets[1:])


def adapter() -> LoRAModel:
    """Rows of the embedding are of one rank but for the added ones; of the head they are everywhere."""
    few, many = torch.tensor([1, 2, 4, *range(VOCAB, WIDE)]), torch.tensor([0, 7, 9, 30, 49, *range(VOCAB, WIDE)])
    layers = [
        layer(
            EMBEDDING.name,
            weight=draw(len(few), HIDDEN),
            row_ids=few,
            lora_a=draw(RANK, VOCAB),
            lora_b=draw(HIDDEN, RANK),
        ),
        layer(HEAD.name, weight=draw(len(many), HIDDEN), row_ids=many),
        layer(LINEAR.name, lora_a=draw(RANK, 40), lora_b=draw(HIDDEN, RANK)),
        layer(FUSED.slices[1].module_name, lora_a=draw(RANK, HIDDEN), lora_b=draw(40, RANK)),
    ]
    return LoRAModel("d", RANK, {each.module_name: each for each in layers}, vocab_size=WIDE)


def packed(packer: RankPacker, model: LoRAModel) -> tuple[PackedLayout, list[torch.Tensor]]:
    layout = packer.lay_out(model)
    views = list(torch.full((layout.nbytes,), 255, dtype=torch.uint8).split(list(layout.sizes)))
    packer.write(model, layout, views)
    return layout, views


def found(packer: RankPacker, layout: PackedLayout, views: list[torch.Tensor], name: str) -> list[SliceWeights]:
    """What each rank has of a target's last slice."""
    block = next(each for each in layout.blocks if each.target_name == name)
    slices = [packer.unpack(block, share)[-1] for share in packer.shares(views[block.extent_index])]
    assert all(each is not None for each in slices)
    return [each for each in slices if each is not None]


def rows_of(slices: list[SliceWeights]) -> dict[int, list[float]]:
    """By token, wherever it is."""
    rows = {}
    for rank, each in enumerate(slices):
        assert each.weight is not None
        assert each.row_ids is not None
        for token, row in zip(each.row_ids.tolist(), each.weight.tolist(), strict=True):
            if token != NO_TOKEN:
                assert rows.setdefault(token + rank * VOCAB // len(slices), row) is row, "it is there once"
    return rows


@SIZES
def test_parts_of_all_ranks_are_the_whole(size: int) -> None:
    model, packer = adapter(), packer_of(size, FakeBase({}))
    layout, views = packed(packer, model)
    for name in (EMBEDDING.name, HEAD.name):
        own = model.layers[name]
        assert own.weight is not None
        assert own.row_ids is not None
        expected = dict(zip(own.row_ids.tolist(), own.weight.tolist(), strict=True))
        assert rows_of(found(packer, layout, views, name)) == expected
    at_embedding, at_linear = (found(packer, layout, views, name) for name in (EMBEDDING.name, LINEAR.name))
    for slices, name in ((at_embedding, EMBEDDING.name), (at_linear, LINEAR.name)):
        parts = [each.lora_a for each in slices if each.lora_a is not None]
        assert torch.equal(torch.cat(parts, dim=1), model.layers[name].lora_a)
    packer.check_layout(layout)


def test_rows_that_are_the_bases_are_on_no_rank() -> None:
    model = adapter()
    rows = model.layers[HEAD.name]
    assert rows.weight is not None
    head = draw(VOCAB, HIDDEN, seed=9)
    head[[7, 30]] = rows.weight[[1, 3]]
    packer = packer_of(2, FakeBase({}, {HEAD.name: head, EMBEDDING.name: draw(VOCAB, HIDDEN, seed=8)}))
    layout, views = packed(packer, model)
    assert rows_of(found(packer, layout, views, HEAD.name)).keys() == {0, 9, 49, *range(VOCAB, WIDE)}


@SIZES
@pytest.mark.parametrize("name", ["lossless", "int8"])
def test_a_compressed_copy_is_of_all_ranks(size: int, name: str) -> None:
    packer = packer_of(size, FakeBase({}))
    layout, views = packed(packer, adapter())
    compression = get_compression(name, packer)
    assert compression is not None
    copy = compression.compress(layout, views)
    restored = [torch.full_like(view, 0) for view in views]
    compression.restore(copy, restored)
    if compression.is_exact:
        assert all(torch.equal(a, b) for a, b in zip(views, restored, strict=True))
        return
    assert 0 < copy.max_error < 1 / 250
    for target in (EMBEDDING, LINEAR, FUSED):
        pairs = (found(packer, layout, each, target.name) for each in (views, restored))
        for before, after in zip(*pairs, strict=True):
            for rows, got in ((before.lora_a, after.lora_a), (before.lora_b, after.lora_b)):
                assert rows is not None
                assert got is not None
                assert (got - rows).abs().max() <= rows.abs().max() / 250
    assert rows_of(found(packer, layout, restored, HEAD.name)) == rows_of(found(packer, layout, views, HEAD.name))
