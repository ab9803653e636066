"""Blocks of the Triton backend: one dtype for all adapters; int8 with its error, round trip, and disk tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.config import LoRAConfig
from loraplex.errors import ConfigError
from loraplex.kernels.checksum import checksum
from loraplex.kernels.ops import get_backend
from loraplex.kernels.slices import SliceWeights
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.lora_packing import dequantize, quantize
from loraplex.memory.weights.compression import get_compression
from loraplex.memory.weights.disk_cache import DiskCache, DiskRead, StoredLayout
from loraplex.memory.weights.packing import Packer
from tests.kernels.cases import BF16, FP16, FP32, POISON, draw_gain, make_target, make_weights, same_bits
from tests.memory.rig import BASE, CPU, TARGETS, make_model

INT8 = torch.int8
TARGET = make_target(37, (130, 5, 48))
WIDTHS = (130, 5, 48)
RANKS = [(1, 1, 1), (5, None, 12), (48, 5, 5), (0, 3, None), (70, 65, 200)]

each_ranks = pytest.mark.parametrize("ranks", RANKS, ids=str)


def backend_of(block_dtype: torch.dtype | None) -> TritonBackend:
    return TritonBackend(CPU, block_dtype=block_dtype)


def pack(backend: TritonBackend, weights: Any, compute_dtype: torch.dtype = FP32) -> tuple[Any, torch.Tensor]:
    block = torch.full((backend.packed_nbytes(weights, compute_dtype) + 64,), POISON, dtype=torch.uint8)
    return backend.pack(weights, compute_dtype, block), block


@each_ranks
@pytest.mark.parametrize("adapter_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("block_dtype", "compute_dtype"), [(None, FP16), (None, BF16), (FP16, FP32), (FP32, BF16)], ids=str
)
def test_all_adapters_have_the_dtype_of_the_engine(
    ranks: Any, adapter_dtype: torch.dtype, block_dtype: torch.dtype | None, compute_dtype: torch.dtype
) -> None:
    backend = backend_of(block_dtype)
    weights = make_weights(TARGET, ranks, adapter_dtype, True, torch.Generator().manual_seed(0), True)
    layouts, block = pack(backend, weights, compute_dtype)
    expected = block_dtype or compute_dtype
    assert backend.adapter_dtype(compute_dtype) == expected
    assert {layout.dtype for layout in layouts if layout is not None} == {expected}
    for got, given in zip(backend.unpack(layouts, 37, WIDTHS, block), weights, strict=True):
        assert (got is None) == (given is None)
        if got is not None and given is not None:
            for part, original in ((got.lora_a, given.lora_a), (got.lora_b, given.lora_b), (got.bias, given.bias)):
                assert (part is None) == (original is None)
                assert part is None or same_bits(part, original.to(expected))
            assert same_bits(got.gain, given.gain)


@each_ranks
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_gain", [True, False])
def test_int8_comes_back_to_the_byte(ranks: Any, has_bias: bool, has_gain: bool) -> None:
    backend = backend_of(INT8)
    weights = make_weights(TARGET, ranks, FP32, has_bias, torch.Generator().manual_seed(0), has_gain)
    for s in weights:  # ranks that are nothing: A's row, B's column
        if s is not None and s.rank >= 3:
            s.lora_a[1], s.lora_b[:, 2] = 0, 0
    layouts, block = pack(backend, weights)
    assert backend.packed_layouts(weights, FP32) == layouts
    assert (block[-64:] == POISON).all()
    found = backend.unpack(layouts, 37, WIDTHS, block)
    again, same = pack(backend, found)
    assert again == layouts
    assert torch.equal(same, block)
    for got, given in zip(found, weights, strict=True):
        assert (got is None) == (given is None)
        if got is not None and given is not None and given.bias is not None:
            assert same_bits(got.bias, given.bias)
        if got is not None and given is not None:
            assert (got.gain is not None) == has_gain
            assert got.gain is None or same_bits(got.gain, given.gain)


@pytest.mark.parametrize("block_dtype", [INT8, FP16, None], ids=str)
def test_an_input_gain_is_float32_behind_the_rest(block_dtype: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(0)
    (weights,) = make_weights(make_target(37, (130,)), (5,), FP32, True, generator, True)
    assert weights is not None
    weights = replace(weights, input_gain=draw_gain(37, generator))
    backend = backend_of(block_dtype)
    layouts, block = pack(backend, (weights,), FP16)
    (got,) = backend.unpack(layouts, 37, (130,), block)
    assert got is not None
    assert same_bits(got.gain, weights.gain)
    assert same_bits(got.input_gain, weights.input_gain)
    with pytest.raises(AssertionError, match="an input gain beside A and B in a target of 2 slices"):
        backend.packed_layouts((None, weights), FP16)


def test_int8_blocks_are_a_quarter_of_float32() -> None:
    weights = make_weights(make_target(512, (512,)), (16,), FP32, False, torch.Generator().manual_seed(0))
    assert backend_of(INT8).packed_nbytes(weights, FP32) == 2 * 512 * 16 + 64
    assert backend_of(None).packed_nbytes(weights, FP32) == 4 * 2 * 512 * 16


def test_equal_adapters_have_equal_bytes_whatever_was_there() -> None:
    weights = make_weights(TARGET, (5, 3, 12), BF16, True, torch.Generator().manual_seed(0))
    for backend in (backend_of(INT8), backend_of(None)):
        nbytes = backend.packed_nbytes(weights, BF16)
        clean, dirty = torch.zeros(nbytes, dtype=torch.uint8), torch.full((nbytes,), POISON, dtype=torch.uint8)
        assert backend.pack(weights, BF16, clean) == backend.pack(weights, BF16, dirty)
        assert torch.equal(clean, dirty)
        with pytest.raises(ValueError, match="does not fit in 64"):
            backend.pack(weights, BF16, clean[:64])


@pytest.mark.parametrize("rank", [1, 4, 16, 64])
@pytest.mark.parametrize("size", [64, 512, 2048])
def test_the_error_of_int8_is_as_stated(rank: int, size: int) -> None:
    """Of the delta on normal weights and inputs: 1.6 % or less, in the mean square and at worst relative to the
    largest."""
    generator = torch.Generator().manual_seed(rank + size)
    a, b = torch.randn(rank, size, generator=generator), torch.randn(size, rank, generator=generator)
    x = torch.randn(64, size, generator=generator).double()
    q_a, q_b = dequantize(*quantize(a, b))
    exact, got = (x @ a.double().T) @ b.double().T, (x @ q_a.T) @ q_b.T
    assert (got - exact).norm() / exact.norm() < 0.017
    assert 0.001 < (got - exact).abs().max() / exact.abs().max() < 0.017


def test_a_weight_is_off_by_half_a_step_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(12, 100, generator=generator), torch.randn(80, 12, generator=generator)
    q_a, scale, q_b = quantize(a, b)
    a_unit, b_unit = a.abs().amax(1, keepdim=True) / 127, b.abs().amax(0) / 127
    assert ((q_a * a_unit - a).abs() <= 0.5001 * a_unit).all()
    assert ((q_b * b_unit - b).abs() <= 0.5001 * b_unit).all()
    torch.testing.assert_close(scale, a_unit[:, 0] * b_unit)


# ------------------------------------------------------------------------------------------------ where blocks are kept


def packed_model(block_dtype: torch.dtype | None) -> tuple[Packer, Any, list[torch.Tensor]]:
    packer = Packer(TARGETS, backend_of(block_dtype), FP32, BASE)
    model = make_model("content", 5)
    layout = packer.lay_out(model)
    views = [torch.full((size,), POISON, dtype=torch.uint8) for size in layout.sizes]
    packer.write(model, layout, views)
    return packer, layout, views


def test_int8_goes_through_the_disk_tier(tmp_path: Path) -> None:
    packer, layout, views = packed_model(INT8)
    packer.check_layout(layout)
    checksums = [checksum(view) for view in views]
    cache = DiskCache(tmp_path, 1 << 20, packer.form("int8"), packer.check_layout)
    assert cache.write("ab", layout, views, checksums)
    assert cache.read_layout("ab") == StoredLayout(layout, tuple(checksums))
    found = [torch.full_like(view, POISON) for view in views]
    assert cache.read_into("ab", found) is DiskRead.DONE
    assert all(torch.equal(a, b) for a, b in zip(found, views, strict=True))
    (file,) = (tmp_path).glob("*/*.lora")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert cache.read_into("ab", found) is not DiskRead.DONE


def test_layouts_of_another_dtype_are_refused() -> None:
    packers = [packed_model(dtype) for dtype in (INT8, FP16, None)]
    assert len({packer.form("auto") for packer, _, _ in packers}) == 3
    for packer, layout, _ in packers:
        for other, _, _ in packers:
            if other is packer:
                other.check_layout(layout)
            else:
                with pytest.raises(ValueError, match="laid out"):
                    other.check_layout(layout)


@pytest.mark.parametrize("compression", ["lossless", "int8"])
def test_int8_blocks_can_be_compressed(compression: str) -> None:
    packer, layout, views = packed_model(INT8)
    method = get_compression(compression, packer)
    assert method is not None
    copy = method.compress(layout, views)
    restored = [torch.full_like(view, POISON) for view in views]
    method.restore(copy, restored)
    if method.is_exact:
        assert all(torch.equal(a, b) for a, b in zip(restored, views, strict=True))
        return
    assert copy.max_error < 1e-6  # they are of eight bits already
    for block in layout.blocks:
        pairs = zip(
            packer.unpack(block, views[block.extent_index]),
            packer.unpack(block, restored[block.extent_index]),
            strict=True,
        )
        for before, after in pairs:
            assert _close(before, after)


def _close(before: SliceWeights | None, after: SliceWeights | None) -> bool:
    if before is None or after is None:
        return before is after
    parts = zip(before.tensors, after.tensors, strict=True)
    return all(torch.allclose(a, b, rtol=1e-5) for a, b in parts)


# ---------------------------------------------------------------------------------------------------------- the setting


def test_int8_is_for_triton_alone() -> None:
    assert LoRAConfig(lora_dtype="int8").lora_dtype == "int8"
    backend = get_backend("triton", CPU, "int8")
    assert isinstance(backend, TritonBackend)
    assert backend.block_dtype == INT8
    assert backend.adapter_dtype(BF16) is None
    for name in ("torch", "reference", "auto"):
        with pytest.raises(ConfigError, match="int8 needs triton kernels"):
            get_backend(name, CPU, "int8")
    assert get_backend("torch", CPU, "float16").adapter_dtype(FP32) is None
    with pytest.raises(ConfigError, match="int4"):
        LoRAConfig(lora_dtype="int4")
