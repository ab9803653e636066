"""packed_nbytes, pack and the views of the slot table: what goes in comes out, aligned, in one dtype, without residue.

The views are of the stock layout; what the native layout holds is checked by what the kernels make of it
(native/test_lora.py), and by `unpack`, which every backend has.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.choice import best_isa
from loraplex.kernels.native.library import ISAS, LOAD_ERRORS, load
from loraplex.kernels.slices import SliceWeights
from tests.kernels.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    POISON,
    draw_gain,
    make_table,
    make_target,
    make_weights,
    same_bits,
)

TARGET = make_target(37, (24, 5, 9))

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
each_stock_backend = pytest.mark.parametrize(
    "backend", [b for b in BACKENDS if b.name != "native"], ids=lambda b: b.name
)


@each_stock_backend
@pytest.mark.parametrize("adapter_dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("compute_dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("ranks", [(4, 4, 4), (5, None, 12), (0, 3, None)], ids=str)
def test_what_goes_in_comes_out(
    backend: Any, adapter_dtype: torch.dtype, compute_dtype: torch.dtype, ranks: tuple[int | None, ...]
) -> None:
    weights = make_weights(TARGET, ranks, adapter_dtype, True, torch.Generator().manual_seed(0), True)
    table = make_table(TARGET, [weights], compute_dtype, backend)
    packed_dtype = torch.promote_types(adapter_dtype, compute_dtype)
    for row, s in enumerate(weights):
        view = table.views(row, 0)
        assert (view is None) == (s is None)
        if s is None or view is None:
            continue
        assert view.scale == s.scaling
        for got, given in zip(view[:3], (s.lora_a, s.lora_b, s.bias), strict=True):
            assert (got is None) == (given is None)
            if got is not None and given is not None:
                assert got.data_ptr() % 64 == table.buffer.data_ptr() % 64
                assert same_bits(got, given.to(packed_dtype))
        assert view.gain is not None
        assert s.gain is not None
        assert view.gain.data_ptr() % 64 == table.buffer.data_ptr() % 64
        assert same_bits(view.gain, s.gain)


@each_backend
def test_a_block_is_whole_lines_and_pack_stays_inside(backend: Any) -> None:
    weights = make_weights(TARGET, (5, None, 12), FP32, True, torch.Generator().manual_seed(0))
    nbytes = backend.packed_nbytes(weights, FP32)
    assert nbytes % 64 == 0
    out = torch.full((nbytes + 128,), POISON, dtype=torch.uint8)
    backend.pack(weights, FP32, out[64:])
    assert (out[:64] == POISON).all()
    assert (out[64 + nbytes :] == POISON).all()


@each_backend
@pytest.mark.parametrize("has_gain", [False, True])
def test_equal_adapters_have_equal_bytes_whatever_was_there(backend: Any, has_gain: bool) -> None:
    weights = make_weights(TARGET, (5, 3, 12), BF16, True, torch.Generator().manual_seed(0), has_gain)
    nbytes = backend.packed_nbytes(weights, BF16)
    clean, dirty = torch.zeros(nbytes, dtype=torch.uint8), torch.full((nbytes,), POISON, dtype=torch.uint8)
    assert backend.pack(weights, BF16, clean) == backend.pack(weights, BF16, dirty)
    assert torch.equal(clean, dirty)


@each_backend
def test_an_adapter_without_this_target_needs_no_bytes(backend: Any) -> None:
    assert backend.packed_nbytes((None, None, None), FP32) == 0
    assert backend.pack((None, None, None), FP32, torch.empty(0, dtype=torch.uint8)) == (None, None, None)


@each_backend
def test_too_little_room_is_refused(backend: Any) -> None:
    weights = make_weights(TARGET, (5, 3, 12), FP32, False, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="does not fit in 64"):
        backend.pack(weights, FP32, torch.empty(64, dtype=torch.uint8))


# --------------------------------------------------------------------------------------------------------------- unpack


def each_library() -> list[Any]:
    """Every backend, the native one once per instruction set of this machine."""
    found: list[Any] = [b for b in BACKENDS if b.name != "native"]
    for isa in ISAS:
        with suppress(*LOAD_ERRORS):
            if ISAS.index(isa) >= ISAS.index(best_isa()):
                found.append(NativeBackend(load(isa), 1))
    return found


def name_of(backend: Any) -> str:
    return f"native-{backend.library.isa}" if isinstance(backend, NativeBackend) else str(backend.name)


def pack(backend: Any, weights: Any, compute_dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    block = torch.full((backend.packed_nbytes(weights, compute_dtype) + 64,), POISON, dtype=torch.uint8)
    return backend.pack(weights, compute_dtype, block), block


@pytest.mark.parametrize("backend", each_library(), ids=name_of)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, torch.float64], ids=str)
@pytest.mark.parametrize(("has_bias", "has_gain"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize(
    "ranks", [(1, 1, 1), (5, None, 12), (48, 5, 5), (0, 3, None), (12, 48, 0), (None, 0, None), (70, 65, 200)], ids=str
)
def test_unpack_is_the_inverse_of_pack(
    backend: Any, dtype: torch.dtype, has_bias: bool, has_gain: bool, ranks: tuple[int | None, ...]
) -> None:
    target = make_target(37, (130, 5, 48))
    weights = make_weights(target, ranks, dtype, has_bias, torch.Generator().manual_seed(0), has_gain)
    layouts, block = pack(backend, weights, BF16)
    found = backend.unpack(layouts, 37, (130, 5, 48), block)
    for got, given, layout in zip(found, weights, layouts, strict=True):
        assert (got is None) == (given is None)
        if got is None or given is None:
            continue
        assert got.scaling == given.scaling
        for part, original in ((got.lora_a, given.lora_a), (got.lora_b, given.lora_b), (got.bias, given.bias)):
            assert (part is None) == (original is None)
            if part is not None:
                assert same_bits(part, original.to(part.dtype))
        assert (got.gain is not None) == has_gain
        assert got.gain is None or same_bits(got.gain, given.gain)
        assert all(part.dtype == layout.dtype for part in (got.lora_a, got.lora_b) if part is not None)
    again, same = pack(backend, found, BF16)
    assert again == layouts
    assert torch.equal(same, block)


@pytest.mark.parametrize("backend", each_library(), ids=name_of)
def test_unpack_keeps_the_bits_of_nan(backend: Any) -> None:
    weights = make_weights(TARGET, (5, 3, 12), BF16, True, torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(1)
    for s in weights:
        for part in (s.lora_a, s.lora_b):
            part.view(torch.int16).random_(-(2**15), 2**15, generator=noise)
    layouts, block = pack(backend, weights, BF16)
    for got, given in zip(backend.unpack(layouts, 37, (24, 5, 9), block), weights, strict=True):
        assert same_bits(got.lora_a, given.lora_a)
        assert same_bits(got.lora_b, given.lora_b)


@each_backend
@pytest.mark.parametrize("ranks", [(5, None, 12), (0, 3, None)], ids=str)
@pytest.mark.parametrize("has_gain", [False, True])
def test_layouts_are_known_from_shapes_alone(backend: Any, ranks: tuple[int | None, ...], has_gain: bool) -> None:
    weights = make_weights(TARGET, ranks, FP16, True, torch.Generator().manual_seed(0), has_gain)
    layouts, _ = pack(backend, weights, FP32)
    parts = ("lora_a", "lora_b", "bias", "gain")
    empty = [s and replace(s, **{n: t.to("meta") for n in parts if (t := getattr(s, n)) is not None}) for s in weights]
    assert backend.packed_layouts(empty, FP32) == layouts


@pytest.mark.parametrize("backend", each_library(), ids=name_of)
@pytest.mark.parametrize("rank", [None, 5])
def test_an_input_gain_goes_in_and_comes_out(backend: Any, rank: int | None) -> None:
    """With nothing else, and behind all that a slice can have."""
    generator = torch.Generator().manual_seed(0)
    target, gain = make_target(37, (130,)), draw_gain(37, generator)
    if rank is None:
        weights = SliceWeights(None, None, None, 1.0, input_gain=gain)
    else:
        (found,) = make_weights(target, (rank,), FP16, True, generator, True)
        assert found is not None
        weights = replace(found, input_gain=gain)
    layouts, block = pack(backend, (weights,), FP16)
    assert backend.packed_layouts((weights,), FP16) == layouts
    assert (block[-64:] == POISON).all()
    assert backend.packed_nbytes((weights,), FP16) == block.numel() - 64 >= 4 * 37 + (0 if rank is None else 4 * 130)
    (got,) = backend.unpack(layouts, 37, (130,), block)
    assert got is not None
    assert same_bits(got.input_gain, gain)
    assert rank is None or same_bits(got.gain, weights.gain)
    if rank is None:
        layouts, block = pack(backend, (None, weights, weights), FP16)
        assert [
            each and same_bits(each.input_gain, gain) for each in backend.unpack(layouts, 37, (8, 130, 9), block)
        ] == [
            None,
            True,
            True,
        ]
    else:
        with pytest.raises(AssertionError, match="an input gain beside A and B in a target of 2 slices"):
            backend.packed_nbytes((weights, None), FP16)


def test_layouts_that_differ_have_names_that_differ() -> None:
    """The portable library's panels are narrower than the others'; stock torch has one layout on every machine."""
    weights = make_weights(make_target(37, (130,)), (48,), BF16, False, torch.Generator().manual_seed(0))
    blocks: dict[str, torch.Tensor] = {}
    for backend in each_library():
        _, block = pack(backend, weights, BF16)
        assert torch.equal(blocks.setdefault(backend.adapter_format, block), block), name_of(backend)
