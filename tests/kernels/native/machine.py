"""Which native libraries this machine has, and comparisons between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.choice import best_isa
from loraplex.kernels.native.library import ISAS, LOAD_ERRORS, SIGNATURES, NativeLibrary, load
from tests.kernels.cases import same_bits

__all__ = ["ISAS", "assert_same_on_every_isa", "assert_same_on_threads", "library_or_skip", "tampered"]


class Tampered:
    """The functions of a library, each passed through `wrap(name, function)`."""

    def __init__(self, library: NativeLibrary, wrap: Callable[[str, Any], Any]) -> None:
        for name in SIGNATURES:
            setattr(self, name, wrap(name, getattr(library.functions, name)))


def tampered(library: NativeLibrary, wrap: Callable[[str, Any], Any]) -> NativeLibrary:
    functions: Any = Tampered(library, wrap)
    return replace(library, functions=functions)


def library_or_skip(isa: str) -> NativeLibrary:
    if isa not in ISAS:
        pytest.skip(f"{isa} is of another architecture")
    try:
        best = best_isa()
        if ISAS.index(isa) < ISAS.index(best):
            pytest.skip(f"this processor has {best}, not {isa}")
        return load(isa)
    except LOAD_ERRORS as error:
        pytest.skip(str(error))


Outputs = tuple[torch.Tensor, ...]


def assert_same_on_every_isa(run: Callable[[NativeBackend], Outputs]) -> None:
    """avx512 gives the bits of avx2. (So does the portable library only where its compiler had fused multiply-adds.)"""
    wide, narrow = (run(NativeBackend(library_or_skip(isa), 1)) for isa in ("avx512", "avx2"))
    for a, b in zip(wide, narrow, strict=True):
        assert same_bits(a, b)


def assert_same_on_threads(native: NativeBackend, run: Callable[[NativeBackend], Outputs]) -> None:
    """Any number of threads gives the bits of one."""
    expected = run(native)
    for num_threads in (2, 3):
        for a, b in zip(run(NativeBackend(native.library, num_threads)), expected, strict=True):
            assert same_bits(a, b)
