"""Compressed copies: the same bytes where that is promised, and the stated error where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.core import LoraSlice, LoraTarget
from loraplex.errors import ConfigError
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.slices import SliceLayout
from loraplex.memory.weights.compression import COMPRESSIONS, Int8Compression, LosslessCompression, get_compression
from loraplex.memory.weights.packing import PackedBlock, PackedLayout, Packer
from tests.kernels.cases import BACKENDS as KERNELS
from tests.kernels.cases import BF16, FP16, FP32, same_bits
from tests.memory.gains import make_dora, make_ia3
from tests.memory.rig import BASE, CPU, TARGETS, FakeBase, make_model
from tests.memory.weights.test_packing import BACKENDS

ROUNDING = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}
"""Largest relative error of rounding to the dtype."""

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def packed(
    backend: str, rank: int, dtype: torch.dtype, spread: float = 1.0, modules: tuple[str, ...] = ("q_proj", "down_proj")
) -> tuple[Packer, PackedLayout, list[torch.Tensor]]:
    """An adapter of that dtype; its biases too."""
    model = make_model(f"{rank}", rank, modules=modules)
    layers = {name: in_dtype(layer, dtype, spread) for name, layer in model.layers.items()}
    model = replace(model, layers=layers)
    packer = Packer(TARGETS, get_backend(backend, CPU), dtype, BASE)
    layout = packer.lay_out(model)
    views = list(torch.full((layout.nbytes,), 255, dtype=torch.uint8).split(list(layout.sizes)))
    packer.write(model, layout, views)
    return packer, layout, views


def in_dtype(layer: LoRALayerWeights, dtype: torch.dtype, spread: float) -> LoRALayerWeights:
    tensors = {name: getattr(layer, name) for name in ("lora_a", "lora_b", "bias", "lora_bias")}
    return replace(layer, **{name: None if t is None else (t * spread + 0.0).to(dtype) for name, t in tensors.items()})


def poisoned(views: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.full_like(view, 0xFF) for view in views]


def layout_of(sizes: list[int], dtype: torch.dtype) -> PackedLayout:
    """Any extents, as wide words."""
    part = SliceLayout(0, 64, -1, 1, 1.0, dtype)
    return PackedLayout(tuple(sizes), tuple(PackedBlock("t", i, 0, (None, part)) for i in range(len(sizes))))


# ------------------------------------------------------------------------------------------------------------- lossless


@settings(deadline=None)
@given(
    lines=st.lists(st.integers(0, 900), max_size=4),
    dtype=st.sampled_from([FP32, FP16, BF16, torch.float64]),
    seed=st.integers(0, 2**30),
    kind=st.sampled_from(["random", "zeros", "few values", "halves"]),
)
def test_lossless_restores_any_bytes(lines: list[int], dtype: torch.dtype, seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    views = [torch.randint(0, 256, (64 * n,), dtype=torch.uint8, generator=generator) for n in lines]
    for view in views:
        if kind == "zeros":
            view.zero_()
        elif kind == "few values":
            view &= 3
        elif kind == "halves":
            view[view.numel() // 2 :] = 7
    layout = layout_of([view.numel() for view in views], dtype)
    compression = LosslessCompression()
    copy = compression.compress(layout, views)
    assert (copy.layout.nbytes, copy.max_error) == (layout.nbytes, 0.0)
    assert copy.nbytes <= layout.nbytes
    restored = poisoned(views)
    compression.restore(copy, restored)
    assert all(torch.equal(a, b) for a, b in zip(views, restored, strict=True))


@each_backend
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("rank", [1, 5, 12, 48])
def test_lossless_restores_an_adapter(backend: str, dtype: torch.dtype, rank: int) -> None:
    packer, layout, views = packed(backend, rank, dtype)
    compression = get_compression("lossless", packer)
    assert compression is not None
    assert compression.is_exact
    copy = compression.compress(layout, views)
    restored = poisoned(views)
    compression.restore(copy, restored)
    assert all(torch.equal(a, b) for a, b in zip(views, restored, strict=True))


def test_lossless_keeps_the_bits_of_nan() -> None:
    words = torch.tensor([0x7F81, 0x7FC0, 0xFFFF, 0xFF80, 0x7F80, 0x8000] * 512, dtype=torch.int32).to(torch.int16)
    views = [words.view(torch.uint8)]
    layout, restored = layout_of([views[0].numel()], BF16), poisoned(views)
    copy = LosslessCompression().compress(layout, views)
    assert copy.nbytes < layout.nbytes
    LosslessCompression().restore(copy, restored)
    assert torch.equal(views[0], restored[0])


def test_a_copy_shares_no_memory_with_the_extents() -> None:
    """They are freed and written by others while the copy lives."""
    views = [torch.randint(0, 256, (4096,), dtype=torch.uint8)]
    before, layout = views[0].clone(), layout_of([4096], BF16)
    copy = LosslessCompression().compress(layout, views)
    views[0].fill_(0xFF)
    LosslessCompression().restore(copy, views)
    assert torch.equal(views[0], before)


@pytest.mark.parametrize(("dtype", "most"), [(BF16, 0.68), (FP16, 0.85), (FP32, 0.84)], ids=str)
def test_the_stated_ratio_of_weights(dtype: torch.dtype, most: float) -> None:
    weights = (torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    views = [weights.view(-1).view(torch.uint8)]
    copy = LosslessCompression().compress(layout_of([views[0].numel()], dtype), views)
    assert copy.nbytes < most * copy.layout.nbytes


# ----------------------------------------------------------------------------------------------------------------- int8


@each_backend
@settings(max_examples=20, deadline=None)
@given(
    rank=st.sampled_from([1, 5, 12, 48]),
    dtype=st.sampled_from([FP32, FP16, BF16]),
    spread=st.sampled_from([1e-4, 1.0, 100.0]),
)
def test_int8_is_within_half_a_step(backend: str, rank: int, dtype: torch.dtype, spread: float) -> None:
    packer, layout, views = packed(backend, rank, dtype, spread)
    compression = Int8Compression(packer)
    copy = compression.compress(layout, views)
    restored = poisoned(views)
    compression.restore(copy, restored)
    worst = 0.0
    for block in layout.blocks:
        slices = (packer.unpack(block, each[block.extent_index]) for each in (views, restored))
        for before, after in zip(*slices, strict=True):
            assert (before is None) == (after is None)
            if before is None or after is None:
                continue
            if before.bias is not None:
                assert same_bits(before.bias, after.bias)
            for rows, got in ((before.lora_a, after.lora_a), (before.lora_b.T, after.lora_b.T)):
                largest = rows.double().abs().amax(-1, keepdim=True)
                error = (got.double() - rows.double()).abs()
                allowed = largest / 254 * (1 + 1e-5) + got.double().abs() * ROUNDING[dtype] + 2.0**-25 * (dtype == FP16)
                assert (error <= allowed).all()
                worst = max(worst, (error / largest).max().item())
    assert copy.max_error == pytest.approx(worst, rel=1e-4)
    assert spread < 1 or copy.max_error <= 1 / 254 + ROUNDING[dtype] + 1e-6


@each_backend
def test_what_int8_restores_stays(backend: str) -> None:
    """Its own copy is the same again up to the scale's rounding, and every byte of the extents is written."""
    packer, layout, views = packed(backend, 5, FP32)
    compression = Int8Compression(packer)
    first, second = poisoned(views), [torch.zeros_like(view) for view in views]
    copy = compression.compress(layout, views)
    compression.restore(copy, first)
    compression.restore(copy, second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert compression.compress(layout, first).max_error < 1e-6


@each_backend
def test_int8_of_zeros_and_of_nothing_is_exact(backend: str) -> None:
    for modules in (("q_proj", "v_proj"), ()):
        packer, layout, views = packed(backend, 4, BF16, 0.0, modules)
        copy = Int8Compression(packer).compress(layout, views)
        restored = poisoned(views)
        Int8Compression(packer).restore(copy, restored)
        assert copy.max_error == 0
        assert all(torch.equal(a, b) for a, b in zip(views, restored, strict=True))


@each_backend
def test_int8_is_half_of_bfloat16(backend: str) -> None:
    target = LoraTarget("t", 0, 896, 896, (LoraSlice("t", 0, 896, 896),))
    packer = Packer([target], get_backend(backend, CPU), BF16, FakeBase({}))
    a, b = torch.randn(16, 896).to(BF16), torch.randn(896, 16).to(BF16)
    model = LoRAModel("d", 16, {"t": LoRALayerWeights("t", 16, 16.0, a, b, None, None, 1.0)})
    layout = packer.lay_out(model)
    views = [torch.empty(layout.nbytes, dtype=torch.uint8)]
    packer.write(model, layout, views)
    copy = Int8Compression(packer).compress(layout, views)
    assert 0.5 < copy.nbytes / copy.layout.nbytes < 0.51


def with_both_gains(model: LoRAModel, gains: LoRAModel) -> LoRAModel:
    """Those on inputs of the other one, too."""
    layers = {
        layer.module_name: replace(layer, input_gain=gains.layers[layer.module_name].input_gain) for layer in model
    }
    return replace(model, layers=layers)


@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", ["lossless", "int8"])
@pytest.mark.parametrize(
    "model",
    [make_dora("dora", with_biases=True), make_ia3("ia3"), with_both_gains(make_dora("both"), make_ia3("gains"))],
    ids=["DoRA", "IA3", "both gains"],
)
def test_gains_come_back_as_they_were(backend: KernelBackend, name: str, model: LoRAModel) -> None:
    packer = Packer(TARGETS, backend, FP32, BASE)
    layout = packer.lay_out(model)
    views = [torch.full((size,), 255, dtype=torch.uint8) for size in layout.sizes]
    packer.write(model, layout, views)
    compression = get_compression(name, packer)
    assert compression is not None
    copy, restored = compression.compress(layout, views), poisoned(views)
    compression.restore(copy, restored)
    for block in layout.blocks:
        slices = (packer.unpack(block, each[block.extent_index]) for each in (views, restored))
        for before, after in zip(*slices, strict=True):
            for part in ("bias", "gain", "input_gain"):
                kept, got = (None if each is None else getattr(each, part) for each in (before, after))
                assert (kept is None) == (got is None)
                assert kept is None or same_bits(kept, got)
    is_same = all(torch.equal(a, b) for a, b in zip(views, restored, strict=True))
    assert is_same == (compression.is_exact or copy.max_error == 0)


def test_compressions_by_name() -> None:
    packer = Packer(TARGETS, get_backend("reference", CPU), FP32, BASE)
    found = {name: get_compression(name, packer) for name in COMPRESSIONS}
    assert {name: each and each.name for name, each in found.items()} == {
        "none": None,
        "lossless": "lossless",
        "int8": "int8",
    }
    with pytest.raises(ConfigError, match="none, lossless, int8, got 'zip'"):
        get_compression("zip", packer)
