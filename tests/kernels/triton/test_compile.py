"""Every Triton kernel compiles for an A100 and an H100, fits into their shared memory, and has the instructions that it is made for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
MAX_SHARED_BYTES = {80: 166_912, 90: 232_448}
ARCHS = tuple(MAX_SHARED_BYTES)


@dataclass(frozen=True)
class Report:
    """What `python -m tests.kernels.triton.compiling` printed."""

    kernels: list[Mapping[str, Any]]
    summary: Mapping[str, Any]


@pytest.fixture(scope="module", params=ARCHS, ids=lambda arch: f"sm_{arch}")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiling", "--arch", str(request.param)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    *kernels, summary = map(json.loads, result.stdout.splitlines())
    return Report(kernels, summary)


def _where(kernel: Mapping[str, Any]) -> str:
    return f"{kernel['kernel']} of {kernel['case']!r}: {kernel}"


def test_no_kernel_escapes(report: Report) -> None:
    assert report.summary["never"] == []


def test_every_case_compiles_and_none_is_left_to_stock_torch(report: Report) -> None:
    assert report.summary["failed"] == []


def test_shared_memory_is_enough(report: Report) -> None:
    limit = MAX_SHARED_BYTES[report.summary["arch"]]
    for kernel in report.kernels:
        assert kernel["shared_bytes"] <= limit, _where(kernel)


def test_decode_keeps_to_registers(report: Report) -> None:
    for kernel in report.kernels:
        if "decode" in kernel["case"]:
            assert kernel["local_bytes"] == 0 == kernel["instructions"]["local"], _where(kernel)


def test_products_of_16_bits_go_through_the_matrix_units(report: Report) -> None:
    for kernel in report.kernels:
        if kernel["has_dot"] and "float32" not in kernel["case"]:
            instructions = kernel["instructions"]
            assert instructions["HGMMA"] + instructions["HMMA"] + instructions["IMMA"] > 0, _where(kernel)
