"""A checksum changes with the bytes, and is one number wherever it is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.kernels.checksum import ROW_WORDS, _checksums_by_torch, checksum, checksums

ROW_BYTES = 8 * ROW_WORDS
LENGTHS = st.integers(0, 5 * ROW_BYTES // 64).map(lambda lines: 64 * lines)
"""Multiples of 64 that are mostly no multiples of 4096."""


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def assert_noticed(data: torch.Tensor, changed: torch.Tensor) -> None:
    assert not torch.equal(data, changed)
    assert checksum(data) != checksum(changed)


@settings(deadline=None)
@given(nbytes=LENGTHS, seed=st.integers(0, 3), fill=st.sampled_from([None, 0, 0xFF, 0x7F, 0x80]))
def test_numpy_and_torch_agree(nbytes: int, seed: int, fill: int | None) -> None:
    data = noise(nbytes, seed) if fill is None else torch.full((nbytes,), fill, dtype=torch.uint8)
    number = checksum(data)
    assert 0 <= number < 2**64
    assert number == checksum(data, is_summed_by_torch=True) == checksum(data, is_summed_by_torch=False)


def test_many_rows_agree() -> None:
    """More than are summed at once, and a rest."""
    data = noise(300 * ROW_BYTES + 192)
    assert checksum(data) == checksum(data, is_summed_by_torch=True)


def test_a_view_inside_an_arena_has_the_number_of_its_bytes() -> None:
    arena = noise(4 * ROW_BYTES)
    view = arena[64 : 64 + 2 * ROW_BYTES]
    assert checksum(view) == checksum(view.clone()) == checksum(view, is_summed_by_torch=True)


@settings(max_examples=200, deadline=None)
@given(nbytes=LENGTHS.filter(bool), fill=st.sampled_from([None, 0, 0xFF]), data=st.data())
def test_one_flipped_bit_is_noticed(nbytes: int, fill: int | None, data: st.DataObject) -> None:
    before = noise(nbytes) if fill is None else torch.full((nbytes,), fill, dtype=torch.uint8)
    after = before.clone()
    after[data.draw(st.integers(0, nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert_noticed(before, after)


@settings(max_examples=200, deadline=None)
@given(nbytes=LENGTHS.filter(bool), fill=st.sampled_from([None, 0]), data=st.data())
def test_a_changed_run_is_noticed(nbytes: int, fill: int | None, data: st.DataObject) -> None:
    before = noise(nbytes) if fill is None else torch.zeros(nbytes, dtype=torch.uint8)
    start = data.draw(st.integers(0, nbytes - 1))
    end = data.draw(st.integers(start + 1, nbytes))
    after = before.clone()
    after[start:end] ^= data.draw(st.integers(1, 255))
    assert_noticed(before, after)
    after[start:end] = noise(end - start, seed=1)
    if not torch.equal(before, after):
        assert_noticed(before, after)


@settings(max_examples=200, deadline=None)
@given(nbytes=LENGTHS.filter(bool), piece=st.sampled_from([8, 64, ROW_BYTES]), data=st.data())
def test_pieces_that_changed_places_are_noticed(nbytes: int, piece: int, data: st.DataObject) -> None:
    """Words, cache lines, pages."""
    count = nbytes // piece
    if count < 2:
        return
    order = st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True)
    a, b = (slice(i * piece, (i + 1) * piece) for i in data.draw(order))
    before = noise(nbytes)
    after = before.clone()
    after[a], after[b] = before[b], before[a]
    assert_noticed(before, after)


def test_lengths_of_zeros_differ() -> None:
    numbers = {checksum(torch.zeros(64 * lines, dtype=torch.uint8)) for lines in range(200)}
    assert len(numbers) == 200


def test_nothing_has_a_number() -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    assert checksum(nothing) == checksum(nothing, is_summed_by_torch=True)


@pytest.mark.parametrize("data", [torch.zeros(63, dtype=torch.uint8), torch.zeros(64), torch.zeros(8, 64).byte()])
def test_other_tensors_are_refused(data: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        checksum(data)


def test_many_pieces_are_one_transfer_and_the_same_numbers() -> None:
    """As on a device: all sums are made before any is brought to the host."""
    pieces = [noise(nbytes, seed) for seed, nbytes in enumerate((64, 3 * ROW_BYTES, 0, 5 * ROW_BYTES + 128))]
    assert _checksums_by_torch(pieces) == checksums(pieces) == tuple(checksum(piece) for piece in pieces)
    with pytest.raises(ValueError, match="multiple of 64"):
        _checksums_by_torch([noise(64), noise(63)])
