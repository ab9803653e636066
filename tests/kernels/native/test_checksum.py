"""The library's checksums are those of kernels/checksum.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.kernels.checksum import ROW_WORDS, checksums
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.library import ISAS
from tests.kernels.native.machine import library_or_skip

LENGTHS = st.integers(0, 3 * 8 * ROW_WORDS // 64).map(lambda lines: 64 * lines)


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None)
@given(lengths=st.lists(LENGTHS, max_size=5), fill=st.sampled_from([None, 0, 0x80, 0xFF]))
def test_numbers_are_those_of_the_reference(isa: str, lengths: list[int], fill: int | None) -> None:
    pieces = [noise(n, n) if fill is None else torch.full((n,), fill, dtype=torch.uint8) for n in lengths]
    assert NativeBackend(library_or_skip(isa), 1).checksums(pieces) == checksums(pieces)


def test_a_piece_inside_an_arena_and_many_rows(native: NativeBackend) -> None:
    arena = noise(1 << 20, 1)
    pieces = [arena[64 : 64 + 300 * 8 * ROW_WORDS // 4], arena[4096:8192], arena]
    assert native.checksums(pieces) == checksums(pieces)


@pytest.mark.parametrize(
    "data",
    [torch.zeros(63, dtype=torch.uint8), torch.zeros(64), torch.zeros(8, 64).byte(), torch.zeros(128).byte()[::2]],
)
def test_other_tensors_are_refused(native: NativeBackend, data: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        native.checksums([data])
