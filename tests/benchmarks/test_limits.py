"""The limit's formula, against figures worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.fixture import SIZES
from benchmarks.limits import AdapterSize, ModelShape, Peaks, limit_of, linear_s, lora_s, step_s
from benchmarks.machine import Machine, keep, machine

PEAKS = Peaks(bandwidth=42e9, fp32=207e9, int16=286e9)
SHAPE = ModelShape.of(SIZES["s"])


def test_the_shape_of_a_model() -> None:
    assert SHAPE.linears == ((960, 576), (576, 576), (3072, 576), (576, 1536))
    assert (SHAPE.num_layers, SHAPE.head) == (30, (49152, 576))
    wide_heads = ModelShape.of({**SIZES["s"], "head_dim": 128})
    assert wide_heads.linears[:2] == ((15 * 128, 576), (576, 9 * 128))


@pytest.mark.parametrize(
    ("storage", "requests", "milliseconds"),
    [
        ("float32", 1, 12.8),
        ("float32", 16, 20.8),
        ("bfloat16", 1, 6.4),
        ("float16", 16, 20.8),
        ("int8", 1, 3.2),
        ("int8", 16, 15.0),
        ("int4", 1, 2.0),
        ("int4", 16, 9.1),
        ("int4-a16", 16, 15.0),
    ],
)
def test_a_decode_step(storage: str, requests: int, milliseconds: float) -> None:
    """Bound by memory for one request, by arithmetic for sixteen."""
    assert 1e3 * step_s(SHAPE, storage, 1, [None] * requests, PEAKS) == pytest.approx(milliseconds, abs=0.06)


def test_a_linear_takes_the_longer_of_the_two() -> None:
    peaks = Peaks(bandwidth=100.0, fp32=1000.0, int16=500.0)
    assert linear_s(1, (10, 10), "float32", peaks) == pytest.approx(4.0)
    assert linear_s(100, (10, 10), "float32", peaks) == pytest.approx(20.0)
    assert linear_s(100, (10, 10), "int8", peaks) == pytest.approx(20.0)  # floats are faster than int16 here
    assert linear_s(100, (10, 10), "int4-a16", peaks) == pytest.approx(20.0)


def test_an_adapter_is_read_once_for_all_its_requests() -> None:
    peaks = Peaks(bandwidth=10.0, fp32=1e9, int16=1e9)
    one, other = AdapterSize(40, 10), AdapterSize(40, 10)
    assert lora_s(1, [one, one, None, one], peaks) == pytest.approx(4.0)
    assert lora_s(1, [one, other, None], peaks) == pytest.approx(8.0)
    assert lora_s(1, [None, None], peaks) == 0
    slow = Peaks(bandwidth=1e9, fp32=10.0, int16=10.0)
    assert lora_s(5, [one, one, None], slow) == pytest.approx(2 * 5 * 20 / 10)


def test_the_whole_batch_has_a_prefill_and_steps() -> None:
    limit = limit_of(SHAPE, "float32", [None] * 16, 64, 64, PEAKS)
    assert limit.step_ms == pytest.approx(20.8, abs=0.06)
    assert limit.tokens_per_s == pytest.approx(434, abs=3)
    assert limit_of(SHAPE, "float32", [None] * 16, 64, 1, PEAKS).tokens_per_s == pytest.approx(16 / 1.054, rel=0.01)


def test_the_size_of_an_adapter_is_in_its_header(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4, 6, dtype=torch.bfloat16), "b": torch.zeros(8, 4)}
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    assert AdapterSize.of_folder(tmp_path) == AdapterSize(2 * 24 + 4 * 32, 24 + 32)


def test_the_machine_goes_to_a_file_and_back(tmp_path: Path) -> None:
    kept = Machine("a processor", 2, "avx2", "2026-11-21 12:00", {1: PEAKS, 2: PEAKS})
    assert Machine.from_json(kept.to_json()) == kept
    keep(kept, tmp_path / "results" / "machine.json")
    # Figures of another machine are not this one's.
    assert machine(may_measure=False, cache=tmp_path / "results" / "machine.json") is None
