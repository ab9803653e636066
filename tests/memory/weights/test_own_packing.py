"""Blocks with weights of an adapter's own: what goes in comes out, on disk too; plain adapters are packed as ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.adapter_store import LongContext
from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.core import LoraSlice, LoraTarget, ShardKind
from loraplex.kernels.plan import SlotTable
from loraplex.kernels.protocols import AdapterPacking
from loraplex.kernels.slices import ABSENT, SliceWeights
from loraplex.kernels.triton.lora_packing import GpuPacking
from loraplex.memory.weights.compression import Int8Compression
from loraplex.memory.weights.disk_file import DamagedFileError, encode_header, parse_layout
from loraplex.memory.weights.own_packing import OwnPacking
from loraplex.memory.weights.packing import PackedLayout, Packer, UnfitWeightsError
from loraplex.memory.weights.vocabulary import Ends, fitted
from tests.kernels.cases import BACKENDS as KERNELS
from tests.memory.rig import TARGETS, FakeBase, make_model

VOCAB, HIDDEN, RANK = 50, 24, 3


def one_slice(name: str, layer: int, in_features: int, out_features: int, kind: ShardKind) -> LoraTarget:
    slices = (LoraSlice(name, 0, out_features, out_features),)
    return LoraTarget(name, layer, in_features, in_features, slices, kind)


EMBEDDING = one_slice("model.embed_tokens", -1, VOCAB, HIDDEN, ShardKind.EMBEDDING)
HEAD = one_slice("lm_head", 2, HIDDEN, VOCAB, ShardKind.HEAD)
NORM = one_slice("model.norm", 2, HIDDEN, HIDDEN, ShardKind.NORM)
LINEAR = one_slice("model.layers.0.mlp.down_proj", 0, 40, HIDDEN, ShardKind.ROW)
FUSED = LoraTarget(
    "model.layers.1.mlp.gate_up_proj",
    1,
    HIDDEN,
    HIDDEN,
    (LoraSlice("model.layers.1.mlp.gate_proj", 0, 40, 40), LoraSlice("model.layers.1.mlp.up_proj", 40, 40, 40)),
    ShardKind.COLUMN,
)
ALL = (LINEAR, FUSED, NORM, EMBEDDING, HEAD)


class Int8Packing(GpuPacking):
    block_dtype = torch.int8


PACKINGS: Mapping[str, AdapterPacking] = {
    **{backend.name: backend for backend in KERNELS},
    "gpu": GpuPacking(),
    "gpu int8": Int8Packing(),
}
each_packing = pytest.mark.parametrize("packing", PACKINGS.values(), ids=list(PACKINGS))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def own(weight: Tensor, row_ids: Sequence[int] | None = None, **parts: Any) -> SliceWeights:
    ids = None if row_ids is None else torch.tensor(row_ids)
    fields = {"lora_a": None, "lora_b": None, "bias": None, "scaling": 0.5, **parts}
    return SliceWeights(weight=weight, row_ids=ids, **fields)


A, B = draw(RANK, HIDDEN), draw(VOCAB, RANK)
CASES: Mapping[str, tuple[LoraTarget, Sequence[SliceWeights | None]]] = {
    "rows of a head": (HEAD, [own(draw(4, HIDDEN), [1, 5, 49, 50])]),
    "rows of a head and LoRA": (HEAD, [own(draw(17, HIDDEN), range(3, 20), lora_a=A, lora_b=B)]),
    "a whole head": (HEAD, [own(draw(VOCAB, HIDDEN))]),
    "LoRA of an embedding": (EMBEDDING, [SliceWeights(draw(RANK, VOCAB), draw(HIDDEN, RANK), None, 2.0)]),
    "rows of an embedding": (EMBEDDING, [own(draw(2, HIDDEN), [7, 60])]),
    "both": (EMBEDDING, [own(draw(1, HIDDEN), [7], lora_a=draw(RANK, VOCAB), lora_b=draw(HIDDEN, RANK))]),
    "a norm": (NORM, [own(draw(HIDDEN))]),
    "a linear": (LINEAR, [own(draw(HIDDEN, 40), bias=draw(HIDDEN))]),
    "one of two": (FUSED, [None, own(draw(40, HIDDEN))]),
    "one of two, beside LoRA": (
        FUSED,
        [SliceWeights(A, draw(40, RANK), None, 1.5), own(draw(40, HIDDEN), lora_a=A, lora_b=draw(40, RANK))],
    ),
}
each_case = pytest.mark.parametrize(("target", "slices"), CASES.values(), ids=list(CASES))


def packed(
    packing: AdapterPacking, target: LoraTarget, slices: Sequence[SliceWeights | None]
) -> tuple[OwnPacking, Tensor, tuple[Any, ...]]:
    blocks = OwnPacking(packing, torch.float32)
    out = torch.full((blocks.nbytes(target, slices),), 255, dtype=torch.uint8)
    layouts = blocks.pack(target, slices, out)
    assert layouts == blocks.layouts(target, slices)
    return blocks, out, layouts


@each_packing
@each_case
def test_what_goes_in_comes_out(
    packing: AdapterPacking, target: LoraTarget, slices: Sequence[SliceWeights | None]
) -> None:
    blocks, out, layouts = packed(packing, target, slices)
    assert out.numel() % 64 == 0
    again = blocks.unpack(target, layouts, out)
    is_exact = not isinstance(packing, Int8Packing) or target.kind in (ShardKind.EMBEDDING, ShardKind.NORM)
    for before, after in zip(slices, again, strict=True):
        if before is None:
            assert after is None
            continue
        assert after is not None
        for name in ("weight", "row_ids", "bias", *(("lora_a", "lora_b") if is_exact else ())):
            old, new = getattr(before, name), getattr(after, name)
            assert (old is None) == (new is None), name
            assert old is None or torch.equal(old, new), name
    copy = torch.full_like(out, 255)
    assert blocks.pack(target, again, copy) == layouts
    assert torch.equal(copy, out), "not all bytes are written, or other ones"


@each_packing
def test_sixteen_bits_stay_sixteen_bits(packing: AdapterPacking) -> None:
    rows = draw(40, HIDDEN).bfloat16()
    blocks, out, (layout,) = packed(packing, HEAD, [own(rows, range(40))])
    (again,) = blocks.unpack(HEAD, (layout,), out)
    assert again is not None
    assert again.weight is not None
    assert torch.equal(again.weight.float(), rows.float())
    if getattr(packing, "name", "") == "native":
        assert layout.weight_dtype is torch.bfloat16
        assert out.numel() == 48 * HIDDEN * 2 + 320  # panels of 16 rows


@each_packing
def test_plain_adapters_are_packed_by_the_backend_alone(packing: AdapterPacking) -> None:
    slices = [SliceWeights(A, draw(40, RANK), None, 1.5), None]
    _, out, layouts = packed(packing, FUSED, slices)
    alone = torch.full((packing.packed_nbytes(slices, torch.float32),), 255, dtype=torch.uint8)
    assert packing.pack(slices, torch.float32, alone) == layouts
    assert torch.equal(alone, out)


# ------------------------------------------------------------------------------------------------- whole adapters


BASE = FakeBase({}, {"model.embed_tokens": draw(VOCAB, HIDDEN, seed=5), "lm_head": draw(VOCAB, HIDDEN, seed=6)})


def layer(name: str, **parts: Any) -> LoRALayerWeights:
    fields = {"lora_a": None, "lora_b": None, **parts}
    return LoRALayerWeights(name, 0 if fields["lora_a"] is None else RANK, 1.0, scaling=0.5, **fields)


def model_of(*layers: LoRALayerWeights, vocab_size: int | None = None, digest: str = "d") -> LoRAModel:
    return LoRAModel(digest, RANK, {each.module_name: each for each in layers}, vocab_size=vocab_size)


def everything(vocab_size: int | None = None) -> LoRAModel:
    ids = torch.arange(4, vocab_size or VOCAB)
    return model_of(
        layer(EMBEDDING.name, weight=draw(len(ids), HIDDEN), row_ids=ids),
        layer(HEAD.name, weight=draw(len(ids), HIDDEN, seed=1), row_ids=ids, lora_a=A, lora_b=B),
        layer(NORM.name, weight=draw(HIDDEN)),
        layer(LINEAR.name, weight=draw(HIDDEN, 40), lora_a=draw(RANK, 40), lora_b=draw(HIDDEN, RANK)),
        layer(FUSED.slices[0].module_name, lora_a=A, lora_b=draw(40, RANK)),
        vocab_size=vocab_size,
    )


def written(packer: Packer, model: LoRAModel) -> tuple[PackedLayout, list[Tensor]]:
    layout = packer.lay_out(model)
    views = [torch.full((size,), 255, dtype=torch.uint8) for size in layout.sizes]
    packer.write(model, layout, views)
    return layout, views


@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("vocab_size", [None, VOCAB + 9, VOCAB - 9])
def test_a_layout_comes_back_from_disk(backend: AdapterPacking, vocab_size: int | None) -> None:
    packer = Packer(ALL, backend, torch.float32, BASE)
    layout, views = written(packer, everything(vocab_size))
    header = encode_header(bytes(16), layout, packer.checksums(views))
    text = header[48 + 8 * len(layout.sizes) :].rstrip(b"\0")
    parsed = parse_layout(text)
    assert parsed == layout
    assert parsed.vocab_size == vocab_size
    assert parsed.depends_on_base
    packer.check_layout(parsed)


@pytest.mark.parametrize("vocab_size", [None, VOCAB + 9])
def test_the_factor_of_a_context_comes_back_from_disk(vocab_size: int | None) -> None:
    packer = Packer(ALL, KERNELS[0], torch.float32, BASE)
    model = everything(vocab_size)
    plain = packer.lay_out(model)
    layout = packer.lay_out(replace(model, long_context=LongContext(2.5, 160)))
    assert layout == replace(plain, rope_factor=2.5)
    texts = [encode_header(bytes(16), each, (0,) * len(each.sizes)) for each in (plain, layout)]
    plain_text, text = (each[48 + 8 * len(layout.sizes) :].rstrip(b"\0") for each in texts)
    assert parse_layout(text) == layout
    assert parse_layout(plain_text) == plain
    assert text == plain_text[:-1] + (b",null,2.5]" if vocab_size is None else b",2.5]")
    for wrong in (b"0.0", b"-2.5", b"1e9", b"NaN", b"2", b'"2"', b"null", b"2.5,2.5"):
        with pytest.raises(DamagedFileError, match="its layout is not one"):
            parse_layout(text.replace(b"2.5]", wrong + b"]"))


@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
def test_a_layout_of_other_own_weights_is_not_this_models(backend: AdapterPacking) -> None:
    """Rows would be read from beyond an extent."""
    packer = Packer(ALL, backend, torch.float32, BASE)
    layout, _ = written(packer, everything())
    index = next(i for i, block in enumerate(layout.blocks) if block.target_name == HEAD.name)
    block = layout.blocks[index]
    (part,) = block.layouts
    assert part is not None
    for changes in (
        {"num_rows": part.num_rows + 16},
        {"weight_offset": part.weight_offset + 64},
        {"row_ids_offset": ABSENT},
        {"weight_dtype": torch.float64},
    ):
        changed = replace(block, layouts=(replace(part, **changes),))
        wrong = replace(layout, blocks=(*layout.blocks[:index], changed, *layout.blocks[index + 1 :]))
        with pytest.raises(ValueError, match=r"laid out|bytes"):
            packer.check_layout(wrong)


@pytest.mark.parametrize("vocab_size", [VOCAB + 100, 2**29])
def test_a_vocabulary_without_rows_for_it_is_not_this_models(vocab_size: int) -> None:
    """Logits would be as wide as it says."""
    packer = Packer(ALL, KERNELS[0], torch.float32, BASE)
    layout, _ = written(packer, everything(VOCAB + 9))
    packer.check_layout(layout)
    with pytest.raises(ValueError, match=f"no rows for a vocabulary of {vocab_size}"):
        packer.check_layout(replace(layout, vocab_size=vocab_size))


PLAIN_SLICE = '-1,-1,-1,0,1.0,"float32",-1,-1'


@pytest.mark.parametrize("own_text", ['0,-1,3,"float31"', '1,-1,3,"float32"', '0,-1,-3,"float32"', "0,-1,3"])
def test_a_layout_with_an_odd_own_weight_is_damaged(own_text: str) -> None:
    with pytest.raises(DamagedFileError):
        parse_layout(f'[[64],[["model.norm",0,0,[[{PLAIN_SLICE},{own_text}]]]]]'.encode())
    assert parse_layout(f'[[64],[["model.norm",0,0,[[{PLAIN_SLICE}]]]]]'.encode()).sizes == (64,)


@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
def test_lossy_copies_keep_own_weights_as_they_are(backend: AdapterPacking) -> None:
    packer = Packer(ALL, backend, torch.float32, BASE)
    layout, views = written(packer, everything())
    compression = Int8Compression(packer)
    copy = compression.compress(layout, views)
    restored = [torch.zeros_like(view) for view in views]
    compression.restore(copy, restored)
    for block in layout.blocks:
        pairs = zip(
            packer.unpack(block, views[block.extent_index]),
            packer.unpack(block, restored[block.extent_index]),
            strict=True,
        )
        for before, after in pairs:
            if before is not None and before.weight is not None:
                assert after is not None
                assert after.weight is not None
                assert torch.equal(after.weight, before.weight)
                assert before.row_ids is None or torch.equal(after.row_ids, before.row_ids)


# ------------------------------------------------------------------------------------------------- the slot table


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_the_slot_table_knows_which_slots_have_what(is_mirrored: bool) -> None:
    packer = Packer(ALL, KERNELS[0], torch.float32, BASE)
    layout, _ = written(packer, everything(VOCAB - 9))
    table = SlotTable(ALL, 4, torch.zeros(1 << 20, dtype=torch.uint8), is_mirrored=is_mirrored)
    assert table.num_rows == 4
    image = table.image([(block.target_name, block.layouts) for block in layout.blocks], layout.vocab_size, 4.0)
    offsets = [4096 * index for index in range(len(layout.blocks))]
    table.set_image(2, image, offsets)
    sets = (table.own_layers, table.embedding_slots, table.head_slots)
    assert sets == ({2}, {2}, {2})
    assert table.vocab_sizes == {2: VOCAB - 9}
    assert table.rope_factors == {2: 4.0}
    assert table.block_dtypes == {torch.float32}
    before = [table.addresses(row, 2) for row in range(6)]
    for block, offset in zip(layout.blocks, offsets, strict=True):
        table.set_block(block.target_name, 2, offset, block.layouts)
    assert [table.addresses(row, 2) for row in range(6)] == before
    table.flush()
    table.check_integrity()
    table.clear_slot(2)
    assert not any((*sets, table.vocab_sizes, table.rope_factors))
    assert table.is_clear(2)
    assert [table.addresses(row, 2) for row in range(6)] == [[0] * 5] * 6


def test_a_plain_adapter_is_in_none_of_the_sets() -> None:
    packer = Packer(TARGETS, KERNELS[0], torch.float32, FakeBase({}))
    layout = packer.lay_out(make_model("plain", modules=("k_proj",)))
    table = SlotTable(TARGETS, 1, torch.zeros(1 << 16, dtype=torch.uint8))
    table.set_image(0, table.image([(block.target_name, block.layouts) for block in layout.blocks]), [0, 4096])
    assert not any((table.own_layers, table.embedding_slots, table.head_slots, table.vocab_sizes))


# -------------------------------------------------------------------------------------------------- the vocabulary


ENDS = Ends.of(ALL)


def test_rows_that_are_the_bases_are_not_kept() -> None:
    base = BASE.weights["lm_head"].clone()
    base[[3, 17]] += 1
    whole = model_of(layer("lm_head", weight=torch.cat([base, draw(2, HIDDEN)])), *added_rows(2), vocab_size=VOCAB + 2)
    kept = fitted(whole, ENDS, BASE).layers["lm_head"]
    assert kept.row_ids is not None
    assert kept.row_ids.tolist() == [3, 17, VOCAB, VOCAB + 1]
    assert kept.weight is not None
    assert torch.equal(kept.weight[:2], base[[3, 17]])
    as_half = fitted(model_of(layer("lm_head", weight=BASE.weights["lm_head"].half())), ENDS, BASE).layers["lm_head"]
    assert as_half.weight is not None, "it was rounded, and is not the base's any more"
    same = fitted(model_of(layer("lm_head", weight=BASE.weights["lm_head"].clone())), ENDS, BASE).layers["lm_head"]
    assert same.weight is None
    unreadable = fitted(model_of(layer("lm_head", weight=BASE.weights["lm_head"].clone())), ENDS, FakeBase({}))
    assert unreadable.layers["lm_head"].weight is not None


def added_rows(count: int) -> tuple[LoRALayerWeights]:
    return (layer("model.embed_tokens", weight=draw(count, HIDDEN), row_ids=torch.arange(VOCAB, VOCAB + count)),)


def test_lora_of_added_tokens_is_in_their_rows() -> None:
    a, b, rows = draw(RANK, HIDDEN), draw(VOCAB + 2, RANK), draw(2, HIDDEN)
    ids = torch.arange(VOCAB, VOCAB + 2)
    head = layer("lm_head", weight=rows, row_ids=ids, lora_a=a, lora_b=b)
    kept = fitted(model_of(head, *added_rows(2), vocab_size=VOCAB + 2), ENDS, BASE).layers["lm_head"]
    assert kept.lora_b is not None
    assert torch.equal(kept.lora_b, b[:VOCAB])
    assert kept.weight is not None
    torch.testing.assert_close(kept.weight, rows + 0.5 * b[VOCAB:] @ a)
    assert torch.equal(rows, draw(2, HIDDEN)), "the file's own rows are not written to"


@pytest.mark.parametrize("missing", ["lm_head", "model.embed_tokens"])
def test_an_added_token_without_a_row_is_refused_by_name(missing: str) -> None:
    names = {"lm_head", "model.embed_tokens"} - {missing}
    ids = torch.arange(VOCAB, VOCAB + 2)
    model = model_of(
        *(layer(name, weight=draw(2, HIDDEN), row_ids=ids) for name in names),
        layer(missing, weight=draw(1, HIDDEN), row_ids=ids[1:]),
        vocab_size=VOCAB + 2,
    )
    with pytest.raises(UnfitWeightsError, match=rf"{missing}: .* for 1 of the 2 tokens added"):
        Packer(ALL, KERNELS[0], torch.float32, BASE).lay_out(model)


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head", LINEAR.name])
def test_dora_beside_an_own_weight_is_refused_by_name(name: str) -> None:
    target = next(each for each in ALL if each.name == name)
    out_features = target.slices[0].out_features
    parts = {"lora_a": draw(RANK, target.in_features), "lora_b": draw(out_features, RANK)}
    shape = (HIDDEN, 40) if target is LINEAR else (VOCAB, HIDDEN)
    dora = layer(name, **parts, magnitude=draw(out_features), weight=draw(*shape))
    with pytest.raises(UnfitWeightsError, match=rf"{name}.*DoRA|DoRA.*"):
        Packer(ALL, KERNELS[0], torch.float32, BASE).lay_out(model_of(dora))


def test_a_weight_that_overflows_is_refused_by_name() -> None:
    model = model_of(layer(NORM.name, weight=torch.full((HIDDEN,), 1e38)))
    with pytest.raises(UnfitWeightsError, match=r"model.norm: its weight does not fit in torch.float16"):
        Packer(ALL, KERNELS[0], torch.float16, BASE).lay_out(model)
