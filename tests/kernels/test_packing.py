"""packed_nbytes, pack and the views of the slot table: what goes in comes out, aligned, in one dtype, without residue.

The views are of the stock layout; what the native layout holds is checked by what the kernels make of it (native/test_lora.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases import BACKENDS, BF16, FP16, FP32, POISON, make_table, make_target, make_weights, same_bits

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
    weights = make_weights(TARGET, ranks, adapter_dtype, True, torch.Generator().manual_seed(0))
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
def test_equal_adapters_have_equal_bytes_whatever_was_there(backend: Any) -> None:
    weights = make_weights(TARGET, (5, 3, 12), BF16, True, torch.Generator().manual_seed(0))
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
