"""Every call of the self-test's cases with the memory that it reads and writes: what replay.cpp gives to a library that
another machine runs, or an emulator of one.

    python -m tests.kernels.native.recording FILE

What memory there is, Python's objects tell: tensors, arrays and structures that were made since `record` began. A word
in them that is an address in one of them is followed, and written down as such.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loraplex.core import Shard
from loraplex.kernels.native import glue, sampling
from loraplex.kernels.native.attention import KV_FORMATS, rotary_write_kv
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.board import RankBoard, board_nbytes
from loraplex.kernels.native.library import SIGNATURES, NativeLibrary, load
from loraplex.kernels.native.linear import linear, pack_linear
from loraplex.kernels.native.self_test import CASES
from tests.kernels import test_attention, test_projections
from tests.kernels.native.machine import tampered

ISA = "avx2"
"""Whose bits are recorded: NEON has to give the same, in the same layouts."""

NUM_THREADS = 3
"""Of every recorded call, in place of the case's one: bits do not depend on it."""

NUMBER, FLOAT, ADDRESS = range(3)


def _one_rank(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """Two ranks wait for one another, which one call after the other cannot."""
    x = torch.randn(3, 203, generator=torch.Generator().manual_seed(0))
    board = RankBoard(library, Shard(0, 1), torch.zeros(board_nbytes(1), dtype=torch.uint8), ())
    normed = glue.rms_norm_ranks(library, x, x[0].contiguous(), 1e-5, board, 1)
    return board.side_by_side(x), board.sum(x.clone()), normed


def _odd_numbers(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """What 16 bits keep of zeros, of numbers that are subnormal, halfway and too large, and of what is no number; and
    the order of such."""
    halfway = [1 + n * 2.0**-9 for n in range(7)] + [1 + n * 2.0**-12 for n in range(7)] + [65519.9, 65520.0, 3.395e38]
    numbers = torch.tensor([0.0, -0.0, 1e-40, 2.9e-8, 3e-8, 6e-8, 65504.0, -7e4, 3.4e38, inf, -inf, nan, *halfway])
    no_numbers = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    odd = torch.cat((numbers, no_numbers))
    v, none = odd.view(1, 1, 32), torch.zeros(1, 0)
    layers = [torch.zeros(1, 2, 1, 16, 32, dtype=dtype) for dtype in KV_FORMATS]
    for layer in layers:
        rotary_write_kv(library, v.clone(), v, v, none, none, layer, torch.tensor([5]), 1)
    generator = torch.Generator().manual_seed(0)
    tiny = (1e-7 * torch.randn(21, 35, generator=generator)).to(torch.float16)
    packed = pack_linear(library, tiny, torch.float16, 1)
    order = sampling.ordered_top_k(library, odd.repeat_interleave(70)[None], 600, 1)
    return *layers, linear(library, torch.randn(3, 35, generator=generator), packed, None, 1), *order


RECORDED: tuple[Callable[[NativeLibrary], object], ...] = (
    *(case for name, case in CASES.items() if name != "ranks"),
    *(_one_rank, _odd_numbers),
    *(
        partial(lambda test, library: test(NativeBackend(library, 1)), test)
        for test in (
            test_projections.test_rows_in_several_segments_are_a_sum,
            test_attention.test_chunked_prefill_equals_whole,
            test_attention.test_one_plan_serves_layers_with_and_without_a_window,
        )
    ),
)


def _memory(frame: Any) -> Iterator[tuple[int, int]]:
    """(address, bytes) of what objects have that are new or in the locals of `frame` and its callers."""
    holders = gc.get_objects()
    while frame is not None:
        holders.append(frame.f_locals)
        frame = frame.f_back
    for holder in holders:
        for each in (holder, *gc.get_referents(holder)):
            if issubclass(type(each), torch.Tensor):
                storage = each.untyped_storage()
                yield storage.data_ptr(), storage.nbytes()
            elif issubclass(type(each), np.ndarray) and each.base is None:
                yield each.ctypes.data, each.nbytes
            elif issubclass(type(each), array):
                yield each.buffer_info()[0], len(each) * each.itemsize
            elif issubclass(type(each), (ctypes.Structure, ctypes.Array)):
                yield ctypes.addressof(each), ctypes.sizeof(each)


class Regions:
    """Memory in order, what overlaps as one."""

    def __init__(self, memory: Iterator[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for start, nbytes in sorted({each for each in memory if each[1]}):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], start + nbytes)
            else:
                merged.append([start, start + nbytes])
        self.starts, self.ends = np.array(merged, np.uint64).reshape(-1, 2).T

    def find(self, addresses: np.ndarray) -> np.ndarray:
        """The region of each; -1: none."""
        index = np.searchsorted(self.starts, addresses, "right") - 1
        return np.where((index >= 0) & (addresses < self.ends[index]), index, -1)

    def image(self, region: int) -> tuple[bytes, list[tuple[int, int, int]]]:
        """Its bytes and its addresses: offset, region, offset in that."""
        start = int(self.starts[region])
        data = ctypes.string_at(start, int(self.ends[region]) - start)
        words = np.frombuffer(data, np.uint64, len(data) // 8)
        targets = self.find(words)
        places = np.flatnonzero(targets >= 0)
        return data, [(8 * int(p), int(targets[p]), int(words[p] - self.starts[targets[p]])) for p in places]

    def reached_from(self, addresses: Sequence[int]) -> list[int]:
        """In the order in which they are found."""
        found: list[int] = []
        new = [int(region) for region in self.find(np.array(addresses, np.uint64))]
        assert -1 not in new, "an argument is an address in no object that was made for the call"
        while new:
            region = new.pop()
            if region not in found:
                found.append(region)
                new += (target for _, target, _ in self.image(region)[1])
        return found


@dataclass
class Recording:
    """The file, as it grows: each content once, and calls, which refer to contents by number."""

    calls: list[bytes] = field(default_factory=list)
    _blobs: dict[bytes, int] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(_numbers(len(self._blobs)))
            for blob in self._blobs:
                file.writelines((_numbers(len(blob)), blob))
            file.writelines((_numbers(len(self.calls)), *self.calls))

    def wrap(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> None:
            kinds = SIGNATURES[name]
            given = [_value(each) for each in arguments]
            if kinds[-1] is ctypes.c_int32:
                given[-1] = NUM_THREADS
            addresses = [a for kind, a in zip(kinds, given, strict=True) if kind is ctypes.c_void_p and a]
            regions = Regions(_memory(sys._getframe(1)))
            reached = regions.reached_from(addresses)
            before = [self._image(regions, reached, region) for region in reached]
            function(*arguments)
            after = [self._image(regions, reached, region) for region in reached]
            places = dict(zip(addresses, map(int, regions.find(np.array(addresses, np.uint64))), strict=True))
            record = [name.encode().ljust(64, b"\0"), _numbers(len(given))]
            for kind, value in zip(kinds, given, strict=True):
                if kind is ctypes.c_float:
                    record.append(_numbers(FLOAT, *struct.unpack("<i", struct.pack("<f", value)), 0))
                elif value in places:
                    region = places[value]
                    record.append(_numbers(ADDRESS, reached.index(region), value - int(regions.starts[region])))
                else:
                    record.append(_numbers(NUMBER, value, 0))
            record += (_numbers(len(reached)), *(part for pair in zip(before, after, strict=True) for part in pair))
            self.calls.append(b"".join(record))

        return call

    def _image(self, regions: Regions, reached: Sequence[int], region: int) -> bytes:
        data, addresses = regions.image(region)
        known = [(at, reached.index(target), offset) for at, target, offset in addresses if target in reached]
        return _numbers(self._blobs.setdefault(data, len(self._blobs)), len(known), *chain(*known))


def _value(argument: Any) -> Any:
    """As C gets it."""
    if argument is None:
        return 0
    if isinstance(argument, (ctypes.Structure, ctypes.Array)):
        return ctypes.addressof(argument)
    return ctypes.addressof(argument._obj) if hasattr(argument, "_obj") else argument  # a byref


def _numbers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def record(path: Path) -> None:
    recording = Recording()
    library = tampered(load(ISA), recording.wrap)
    gc.collect()
    gc.freeze()  # what is there already is not of a call
    for case in RECORDED:
        case(library)
    recording.write(path)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
