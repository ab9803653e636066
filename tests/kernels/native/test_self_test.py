"""The self-test runs every function of the library, and finds a function that writes other bits."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.library import SIGNATURES
from loraplex.kernels.native.self_test import CASES, first_difference
from tests.kernels.native.machine import library_or_skip, tampered


def test_every_function_has_a_case(native: NativeBackend) -> None:
    called: set[str] = set()

    def record(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> None:
            called.add(name)
            function(*arguments)

        return call

    library = tampered(native.library, record)
    for case in CASES.values():
        assert len(case(library)) > 0
    computing = set(SIGNATURES) - {"loraplex_team_stats"}
    assert called == computing, f"without a case in self_test.py: {computing - called}"


def test_a_library_is_like_itself(native: NativeBackend) -> None:
    assert first_difference(native.library, native.library) == ""


def test_avx512_is_like_avx2() -> None:
    assert first_difference(library_or_skip("avx512"), library_or_skip("avx2")) == ""


@pytest.mark.parametrize(
    ("function", "output", "case"),
    [
        ("loraplex_linear", 9, "linear float32"),
        ("loraplex_pack_linear", 4, "linear float32"),
        ("loraplex_row_norms", 11, "linear float32"),
        ("loraplex_rms_norm", 8, "rms_norm, add_scaled"),
        ("loraplex_add_rms_norm", 2, "rms_norm, add_scaled"),
        ("loraplex_add_scaled", 2, "rms_norm, add_scaled"),
        ("loraplex_layer_norm", 7, "layer_norm"),
        ("loraplex_silu_mul", 4, "silu_mul"),
        ("loraplex_gelu", 6, "gelu"),
        ("loraplex_scale_input", 2, "scale_input"),
        ("loraplex_top_k", 5, "argmax, top_k, logprobs"),
        ("loraplex_floor_weights", 4, "token weights"),
    ],
)
def test_one_wrong_bit_is_found(native: NativeBackend, function: str, output: int, case: str) -> None:
    """The lowest bit of the first number that the function writes is turned."""

    def turn(name: str, original: Any) -> Any:
        def call(*arguments: Any) -> None:
            original(*arguments)
            ctypes.c_uint8.from_address(arguments[output]).value ^= 1

        return call if name == function else original

    assert first_difference(tampered(native.library, turn), native.library) == case
