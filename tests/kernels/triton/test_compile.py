"""Every Triton kernel compiles for an L4 and an H100 (an A100 with `-m grid`), in every dtype that it takes on the last
of them, fits into their shared memory, and has the instructions that it is made for.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
MAX_SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448}
MOST_VARIANTS = {
    "shrink_small_kernel": 1,
    "expand_small_kernel": 1,
    "shrink_large_kernel": 3,  # rows of a tile; K split or not
    "reduce_kernel": 1,
    "expand_large_kernel": 2,
    "decode_attention_kernel": 2,  # listed or not
    "prefill_attention_kernel": 3,  # rows of a tile; keys split or not
    "combine_attention_kernel": 1,
    "rms_norm_kernel": 2,
    "silu_mul_kernel": 1,
    "rotary_write_kv_kernel": 2,
    "scale_input_kernel": 3,  # rows of a tile
    "route_kernel": 1,
    "count_kernel": 1,
    "place_kernel": 3,  # rows of a block
    "group_kernel": 1,
    "shrink_kernel": 6,  # rows of a block, and the two linears of an expert
    "product_kernel": 6,
    "combine_kernel": 1,
}
"""Of kernels in the steps of `many_sizes_case`: each is seconds of compiling, in the middle of serving."""

FLOATS = ("fp32", "fp16", "bf16")
BLOCKS = {(of_model, of_block) for of_model in FLOATS for of_block in (of_model, "int8")}
EACH_FLOAT = {(dtype,) for dtype in FLOATS}
FLOAT8 = "fp8e4nv"
KEPT = ("int8", "uint8", FLOAT8)
"""Of weights of experts."""

DTYPES = {
    "attention_kernels.combine_attention_kernel": (("out_ptr",), EACH_FLOAT),
    "attention_kernels.decode_attention_kernel": (("q_ptr",), EACH_FLOAT),
    "attention_kernels.prefill_attention_kernel": (("q_ptr",), EACH_FLOAT),
    "experts_products.combine_kernel": (("y",), EACH_FLOAT),
    "experts_products.product_kernel": (("out", "WEIGHT"), {(of, kept) for of in FLOATS for kept in (of, *KEPT)}),
    "experts_products.shrink_kernel": (("x", "ADAPTER"), BLOCKS),
    "experts_routing.count_kernel": (("chosen",), {("i32",)}),
    "experts_routing.group_kernel": (("order",), {("i32",)}),
    "experts_routing.place_kernel": (("chosen",), {("i32",)}),
    "experts_routing.route_kernel": (("logits",), EACH_FLOAT),
    "glue.rms_norm_kernel": (("x_ptr",), EACH_FLOAT),
    "glue.rotary_write_kv_kernel": (("q_ptr",), EACH_FLOAT),
    "glue.silu_mul_kernel": (("gate_up_ptr",), EACH_FLOAT),
    "linear.add_splits_kernel": (("y_ptr",), EACH_FLOAT),
    "linear.dequantize_int4_kernel": (("out_ptr",), EACH_FLOAT),
    "linear.dequantize_int8_kernel": (("out_ptr",), EACH_FLOAT),
    "linear.round_rows_kernel": (("x_ptr", "q_ptr"), {(dtype, FLOAT8) for dtype in FLOATS}),
    "linear.skinny_linear_kernel": (("x_ptr", "q_ptr"), set(itertools.product(FLOATS, ("i8", "u8")))),
    "input_gain.scale_input_kernel": (("x",), EACH_FLOAT),
    "lora_large.expand_large_kernel": (("y", "BLOCK"), BLOCKS),
    "lora_large.reduce_kernel": (("s",), EACH_FLOAT),
    "lora_large.shrink_large_kernel": (("x", "BLOCK"), BLOCKS),
    "lora_small.expand_small_kernel": (("y", "BLOCK"), BLOCKS),
    "lora_small.shrink_small_kernel": (("x", "BLOCK"), BLOCKS),
    "nucleus.keep_nucleus_kernel": (("x_ptr",), {("fp32",)}),
}
"""Kernel -> the arguments that tell its dtypes, and all that these can be with `lora_dtype` auto, int8 (others: `-m
grid`)."""

NOT_THERE = {80: ["linear.round_rows_kernel"], 89: [], 90: []}
"""float8 begins with sm_89."""

OF_ONE_DTYPE = ("keep_nucleus_kernel", "count_kernel", "group_kernel", "place_kernel")


SPILT_BYTES = {80: 16, 89: 16, 90: 0}
"""Of a thread in a decode step, at most: the compiler of Triton 3.6 spills some registers of two kernels on sm_80, that
of 3.7 none."""

SPILT_AT_RANK_128 = 24
"""The compiler of Triton 3.7, in the fused kernel on sm_90; that of 3.6 none."""

WIDE_INT4 = ("experts Mixtral-8x7B float32 int4",)
SPILT_OF_WIDE_INT4 = 600
"""Gate and up in int4 under float32: without matrix units a product has all of its depth in registers."""

LIMIT_S = 1500
RUNS = [(arch, options) for arch in MAX_SHARED_BYTES for options in (("--core",), ())]
"""Each kernel in each dtype, on sm_89 in bfloat16. All cases, and sm_80, which has nothing that sm_90 has not, take
many minutes: `-m grid`."""

IN_GRID = [not options or arch == 80 for arch, options in RUNS]

pytestmark = [pytest.mark.timeout(LIMIT_S), pytest.mark.compile]


@dataclass(frozen=True)
class Report:
    """What `python -m tests.kernels.triton.compiling` printed."""

    kernels: list[Mapping[str, Any]]
    summary: Mapping[str, Any]
    is_core: bool


def _compile(arch: int, cache: Path, *options: str) -> Report:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiling", "--arch", str(arch), *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    *kernels, summary = map(json.loads, result.stdout.splitlines())
    return Report(kernels, summary, "--core" in options)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=pytest.mark.grid if is_in else ()) for each, is_in in zip(RUNS, IN_GRID, strict=True)
    ],
    ids=[f"sm_{arch}{'-core' * bool(options)}" for arch, options in RUNS],
)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    arch, options = request.param
    return _compile(arch, tmp_path_factory.mktemp("triton"), *options)


def _where(kernel: Mapping[str, Any]) -> str:
    return f"{kernel['kernel']} of {kernel['cases'][0]!r}: {kernel}"


def _is_of(kernel: Mapping[str, Any], *words: str) -> bool:
    """Whether a case that launches it has one of these words in its name."""
    return any(word in case for word in words for case in kernel["cases"])


def _is_routing(kernel: Mapping[str, Any]) -> bool:
    """It reads some numbers of each row, and no weights."""
    return str(kernel["kernel"]).startswith("experts_routing.")


def _dtypes(kernel: Mapping[str, Any], arguments: Sequence[str]) -> tuple[str, ...]:
    """Of pointers, and of constants that are a dtype."""
    types = dict(argument.split(": ") for argument in kernel["signature"]) | kernel["constants"]
    return tuple(types[name].removeprefix("*") for name in arguments)


def test_no_kernel_escapes(report: Report) -> None:
    assert report.summary["never"] == NOT_THERE[report.summary["arch"]]


def test_every_dtype_of_every_kernel_is_compiled(report: Report) -> None:
    """A new kernel needs a line in DTYPES."""
    arch = report.summary["arch"]
    assert {*report.summary["compiled"], *report.summary["never"]} == DTYPES.keys()
    for name, (arguments, wanted) in DTYPES.items():
        found = {_dtypes(kernel, arguments) for kernel in report.kernels if kernel["kernel"] == name}
        if name in NOT_THERE[arch]:
            assert not found
        elif report.is_core and arch == 89:
            assert found == {dtypes for dtypes in wanted if "bf16" in dtypes} or name.endswith(OF_ONE_DTYPE)
        else:
            there = {dtypes for dtypes in wanted if arch != 80 or FLOAT8 not in dtypes}
            assert found >= there, f"{name} is compiled for {sorted(found)}"


def test_every_case_compiles_and_none_is_left_to_stock_torch(report: Report) -> None:
    assert report.summary["failed"] == []


def test_steps_of_many_sizes_share_their_kernels(report: Report) -> None:
    if report.is_core and report.summary["arch"] == 89:
        return
    names = [kernel["kernel"].rpartition(".")[2] for kernel in report.kernels if _is_of(kernel, "many sizes")]
    assert set(names) == set(MOST_VARIANTS)
    for name, most in MOST_VARIANTS.items():
        assert names.count(name) <= most, f"{names.count(name)} of {name}"


def test_shared_memory_is_enough(report: Report) -> None:
    limit = MAX_SHARED_BYTES[report.summary["arch"]]
    for kernel in report.kernels:
        assert kernel["shared_bytes"] <= limit, _where(kernel)


def test_decode_keeps_to_registers(report: Report) -> None:
    for kernel in report.kernels:
        if _is_of(kernel, "decode"):
            most = SPILT_AT_RANK_128 if _is_of(kernel, "ranks=128-128") else SPILT_BYTES[kernel["arch"]]
            most = SPILT_OF_WIDE_INT4 if _is_of(kernel, *WIDE_INT4) else most
            assert kernel["local_bytes"] <= most, _where(kernel)


def test_products_of_16_bits_go_through_the_matrix_units(report: Report) -> None:
    for kernel in report.kernels:
        is_wide = _is_of(kernel, "float32") or kernel["constants"].get("DOT") == "fp32"  # that of float16 and bfloat16
        if kernel["has_dot"] and not is_wide:
            instructions = kernel["instructions"]
            assert instructions["HGMMA"] + instructions["HMMA"] + instructions["IMMA"] > 0, _where(kernel)


def test_decode_reads_16_bytes_at_a_time(report: Report) -> None:
    """Kernels that stream 16-bit numbers; a part of int8 blocks is narrower than that."""
    for kernel in report.kernels:
        if _is_of(kernel, "decode") and not _is_of(kernel, "float32", "int8") and not _is_routing(kernel):
            instructions = kernel["instructions"]
            assert instructions["LDG.128"] + instructions["LDGSTS.128"] > 0, _where(kernel)
